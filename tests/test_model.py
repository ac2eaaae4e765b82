"""The model is GPT-2, sees no future, and its padding, cache and checkpointing change nothing."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mingpt.model
from mingpt.model import GPT, PRESETS, Decoder, GPTConfig, attend, check_causal, gelu, product, sample_token
from mingpt.optim import make_optimizer

VOCAB, BLOCK = 61, 16  # 61 is padded to 64


def tiny(**changes: Any) -> GPT:
    shape: dict[str, Any] = {"vocab_size": VOCAB, "block_size": BLOCK, "n_layer": 2, "n_head": 2, "n_embd": 32}
    torch.manual_seed(1)
    return GPT(GPTConfig(**(shape | changes)))


def spread(model: GPT) -> GPT:
    """Weights large enough that attention and positions decide the logits: fresh ones hardly look at their context."""
    torch.manual_seed(2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.8)
    return model.eval()


def random_ids(B: int, T: int, vocab_size: int = VOCAB) -> Tensor:
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(B + T))


def logits_of(model: GPT, idx: Tensor) -> Tensor:
    logits, loss = model(idx)
    assert loss is None
    return logits


def tokens(generated: Iterator[Tensor]) -> Tensor:
    """(B, made) of what `generate` yields."""
    return torch.stack(list(generated), dim=1)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# what it computes


@pytest.mark.parametrize("bias", [True, False])
def test_no_token_sees_a_later_one(bias: bool) -> None:
    model = spread(tiny(bias=bias))
    for T in (2, BLOCK):
        idx = random_ids(3, T)
        changed = idx.clone()
        changed[:, -1] = (idx[:, -1] + 1) % VOCAB
        before, after = logits_of(model, idx), logits_of(model, changed)
        assert torch.equal(before[:, :-1], after[:, :-1])
        assert not torch.equal(before[:, -1], after[:, -1])


def test_check_causal_refuses_a_model_that_sees_the_future() -> None:
    class Leaky(nn.Module):
        def __init__(self, model: GPT) -> None:
            super().__init__()
            self.model = model

        def forward(self, idx: Tensor) -> tuple[Tensor, None]:
            logits = logits_of(self.model, idx).clone()
            logits[:, 3] += 1e-3 * idx[:, -1:]  # one early position knows a little of the last token
            return logits, None

    model = tiny(dropout=0.5).train()
    state = torch.get_rng_state()
    check_causal(model, VOCAB, BLOCK, "cpu")
    assert model.training and torch.equal(state, torch.get_rng_state())
    with pytest.raises(ValueError, match="not causal: token 15 changes the logits at position 3"):
        check_causal(Leaky(model), VOCAB, BLOCK, "cpu")


def test_logits_and_loss_equal_those_of_transformers_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    model = spread(tiny())
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCAB, n_positions=BLOCK, n_embd=32, n_layer=2, n_head=2)
    ).eval()
    weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    for name, weight in weights.items():
        if name.endswith("wte.weight"):
            weights[name] = weight[:VOCAB]
        elif weight.dim() == 2 and not name.endswith("wpe.weight"):
            weights[name] = weight.T
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"] and unexpected == []  # the tied one

    idx = random_ids(3, BLOCK)
    with torch.no_grad():
        output = theirs(idx, labels=idx)  # shifts the labels itself
    logits = logits_of(model, idx)
    assert logits.std() > 1  # else the tolerance below would forgive anything
    torch.testing.assert_close(logits, output.logits, atol=1e-5, rtol=1e-5)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten())
    torch.testing.assert_close(loss, output.loss, atol=1e-5, rtol=1e-5)


def test_the_loss_is_the_mean_over_all_targets() -> None:
    model = spread(tiny())
    idx, targets = random_ids(3, BLOCK), random_ids(3, BLOCK).flip(1)
    logits, loss = model(idx, targets)
    assert logits is None
    by_hand = -logits_of(model, idx).log_softmax(dim=-1).gather(2, targets.unsqueeze(2)).mean()
    torch.testing.assert_close(loss, by_hand)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_in_parts_give_the_same_loss_and_gradients(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    idx, targets = random_ids(3, BLOCK), random_ids(3, BLOCK).flip(1)
    targets[1, 3:9] = -100  # torch's mark for what does not count
    results, sizes, gradients_made = [], [], []
    log_softmax: Callable[..., Tensor] = Tensor.log_softmax
    exp: Callable[..., Tensor] = Tensor.exp_
    monkeypatch.setattr(Tensor, "exp_", lambda x: gradients_made.append(len(x)) or exp(x))

    def counting(x: Tensor, dim: int) -> Tensor:
        sizes.append(len(x))
        return log_softmax(x, dim=dim)

    monkeypatch.setattr(Tensor, "log_softmax", counting)
    for most in ({}, {"cpu": 64 * 20}):  # all 48 rows, and 20 at a time
        monkeypatch.setattr(mingpt.model, "LOGITS_AT_ONCE", most)
        model = spread(tiny(n_layer=1))
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = model(idx, targets)[1]
            with torch.no_grad():
                assert torch.equal(model(idx, targets)[1], loss)
        assert loss.dtype == torch.float32
        (loss * 8).backward()  # as a GradScaler would
        results.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    assert sizes == [20, 20, 8] * 2 and gradients_made == [20, 20, 8], "none where nobody asks for it"
    (whole, gradients), (parts, others) = results
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(parts, whole, rtol=tolerance, atol=0)
    for name, gradient in gradients.items():
        assert gradient.dtype == others[name].dtype
        assert (gradient - others[name]).norm() <= tolerance * gradient.norm(), name
    assert (others["transformer.wte.weight"][VOCAB:] == 0).all()


def test_second_derivatives_are_right_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(n_layer=1)
    idx, bias = random_ids(2, BLOCK), model.transformer.h[0].mlp.c_fc.bias
    with pytest.raises(RuntimeError, match=r"no second derivatives .* model\.double"):
        torch.autograd.grad(model(idx, idx)[1], bias, create_graph=True)
    model.double()
    (first,) = torch.autograd.grad(model(idx, idx)[1], bias, create_graph=True)
    assert torch.autograd.grad(first.square().sum(), bias)[0].abs().sum() > 0
    monkeypatch.setattr(mingpt.model, "LOGITS_AT_ONCE", {"cpu": 64 * 20})
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(model(idx, idx)[1], bias, create_graph=True)


def test_logits_in_parts_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mingpt.model, "LOGITS_AT_ONCE", {"cpu": 64 * 20})
    idx, losses = random_ids(3, BLOCK), []
    for compiled in (False, True):
        model = spread(tiny(n_layer=1))
        loss = (torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model)(idx, idx)[1]
        loss.backward()
        losses.append(torch.stack([loss.detach(), model.lm_head.weight.grad.norm()]))
    torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_both_kernels_of_attention_compute_the_same(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 2, 2, 8, 16, generator=seeded(1)).to(torch.bfloat16).requires_grad_().unbind()
    results, calls = [], []
    sdpa = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        nn.functional, "scaled_dot_product_attention", lambda *args, **kwargs: calls.append(1) or sdpa(*args, **kwargs)
    )
    for explicit in (False, True):
        monkeypatch.setattr(mingpt.model, "CPU_HAS_BFLOAT16", explicit)
        torch.manual_seed(4)
        results.append(torch.stack([attend(q, k, v, None, dropout).mean() for _ in range(200)]))
    assert len(calls) == 200
    assert torch.equal(results[1][1:], results[1][:-1]) == (dropout == 0)
    torch.testing.assert_close(results[0].float().mean(), results[1].float().mean(), atol=2e-2, rtol=2e-2)
    if dropout == 0:
        outputs = []
        for explicit in (False, True):
            monkeypatch.setattr(mingpt.model, "CPU_HAS_BFLOAT16", explicit)
            outputs.append(attend(q, k, v, None, 0.0))
        torch.testing.assert_close(outputs[0], outputs[1], atol=2e-2, rtol=2e-2)
        changed = k.clone()
        changed[:, :, -1] += 1
        assert torch.equal(attend(q, changed, v, None, 0.0)[:, :, :-1], outputs[1][:, :, :-1])  # the future is unseen
    monkeypatch.setattr(mingpt.model, "EXPLICIT_UP_TO", 7)
    attend(q, k, v, None, dropout)
    assert calls.pop()  # longer than that


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    idx = random_ids(4, BLOCK)
    loss = tiny()(idx, idx.roll(-1, 1))[1]
    assert abs(loss.item() - math.log(VOCAB)) < 0.05


def test_initialisation_is_gpt2s() -> None:
    model = tiny(n_layer=8, n_embd=128)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02  # 4 = sqrt(2 * 8 layers)
            assert parameter.std().item() == pytest.approx(std, rel=0.1), name
        else:
            value = 1 if "ln_" in name and name.endswith("weight") else 0
            assert (parameter == value).all(), name


def test_loss_is_float32_under_autocast() -> None:
    model = tiny()
    idx = random_ids(2, BLOCK)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert logits_of(model, idx).dtype == torch.bfloat16  # else this test shows nothing
        loss = model(idx, idx)[1]
        assert loss.dtype == torch.float32
        tokens(model.generate(idx, 2 * BLOCK))  # the cache takes the keys as they come
    assert loss.item() == pytest.approx(model(idx, idx)[1].item(), rel=1e-2)
    assert model.bfloat16()(idx, idx)[1].dtype == torch.float32


def test_checkpointing_changes_no_bit_of_the_gradients() -> None:
    gradients = []
    for activation_checkpointing in (False, True):
        model = tiny(dropout=0.3, activation_checkpointing=activation_checkpointing).train()
        torch.manual_seed(5)
        model(random_ids(3, BLOCK), random_ids(3, BLOCK))[1].backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_checkpointing_keeps_less() -> None:
    def kept(activation_checkpointing: bool) -> int:
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        model = tiny(activation_checkpointing=activation_checkpointing)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(random_ids(2, BLOCK), random_ids(2, BLOCK))
        return sum(sizes)

    assert kept(True) < kept(False) / 2


# what it counts


@pytest.mark.parametrize(
    ("preset", "count"),
    [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200)],
)
def test_parameter_counts_are_the_published_ones(preset: str, count: int) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50257, **PRESETS[preset]))
    assert model.config.num_parameters == count


def test_counts_by_hand() -> None:
    for model in (tiny(), tiny(bias=False)):
        padding = (model.config.padded_vocab_size - VOCAB) * model.config.n_embd
        assert model.config.num_parameters == sum(p.numel() for p in model.parameters()) - padding
    L, C, T = 2, 32, BLOCK
    weights = VOCAB * C + T * C + L * (C * 3 * C + C * C + 2 * 4 * C * C) + (2 * L + 1) * C
    biases = L * (3 * C + C + 4 * C + C) + (2 * L + 1) * C
    assert tiny(bias=False).config.num_parameters == weights
    assert tiny().config.num_parameters == weights + biases
    assert tiny().flops_per_token() == 6 * (weights + biases - T * C) + 12 * L * C * T


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_head": 5, "n_embd": 128}, r"model\.n_head=5 does not divide model\.n_embd=128"),
        ({"n_head": 0}, r"model\.n_head=0"),
        ({"n_layer": 0}, r"model\.n_layer=0"),
        ({"vocab_size": 0}, r"model\.vocab_size=0"),
        ({"block_size": -1}, r"model\.block_size=-1"),
        ({"dropout": 1.0}, r"model\.dropout=1\.0"),
        ({"dropout": float("nan")}, r"model\.dropout=nan"),
    ],
)
def test_impossible_shapes_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


# padding, and ids that are none


def test_padding_gets_no_logit_no_gradient_and_is_never_drawn() -> None:
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[VOCAB:] = 100 * model.lm_head.weight[:3].sign()  # would win, were it looked at
    idx = random_ids(8, BLOCK)
    assert logits_of(model, idx).shape == (8, BLOCK, VOCAB)
    loss = model(idx, idx.roll(-1, 1))[1]
    assert abs(loss.item() - math.log(VOCAB)) < 0.1
    loss.backward()
    gradient = model.lm_head.weight.grad
    assert (gradient[VOCAB:] == 0).all() and (gradient[:VOCAB] != 0).any()
    assert tokens(model.generate(idx, 3 * BLOCK, temperature=100.0)).max() < VOCAB
    assert tokens(model.generate(idx, 3 * BLOCK, temperature=0.0)).max() < VOCAB


@pytest.mark.parametrize("vocab_size", [1, 64, 65])
def test_other_vocabularies(vocab_size: int) -> None:
    model = tiny(vocab_size=vocab_size)
    idx = random_ids(2, BLOCK, vocab_size)
    assert logits_of(model, idx).shape[-1] == vocab_size
    assert model(idx, idx)[1].isfinite()
    assert tokens(model.generate(idx, 3)).max() < vocab_size
    check_causal(model, vocab_size, BLOCK, "cpu")


def test_ids_out_of_place_are_refused() -> None:
    model = tiny()
    with pytest.raises(ValueError, match="17 tokens per sequence; give 1 to block_size=16"):
        model(random_ids(2, BLOCK + 1))
    with pytest.raises(ValueError, match="0 tokens"):
        model(torch.zeros(2, 0, dtype=torch.int64))
    for wrong in (-1, VOCAB, 63, 1000):  # 61 to 63 are rows of the table, but no tokens
        with pytest.raises(ValueError, match="vocab_size=61"):
            model(torch.tensor([[0, wrong]]))
        with pytest.raises(ValueError, match="vocab_size=61"):
            model.generate(torch.tensor([[0, wrong]]), 1)


# what it writes


def greedy_without_cache(model: GPT, idx: Tensor, count: int) -> Tensor:
    for _ in range(count):
        last = logits_of(model, idx[:, -BLOCK:])[:, -1]
        idx = torch.cat((idx, last.argmax(dim=-1, keepdim=True)), dim=1)
    return idx[:, -count:]


@pytest.mark.parametrize("length", [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK])
@torch.no_grad()
def test_the_cache_changes_no_token(length: int) -> None:
    model, idx = spread(tiny()), random_ids(3, length)
    made = tokens(model.generate(idx, 2 * BLOCK + 3, temperature=0.0))
    assert torch.equal(made, greedy_without_cache(model, idx, 2 * BLOCK + 3))
    assert len(made.unique()) > 6  # a model that repeats itself would prove little


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """What Decoder was asked: the texts' length at most, tokens seen, new tokens."""
    calls: list[tuple[int, int, int]] = []
    decode = Decoder.__call__

    def counting(decoder: Decoder, idx: Tensor, start: int, padding: Tensor | None) -> Tensor:
        calls.append((decoder.length, start, idx.size(1)))
        assert padding is None or len(idx) > 1  # alone, the attention needs no mask
        return decode(decoder, idx, start, padding)

    monkeypatch.setattr(Decoder, "__call__", counting)
    return calls


def test_the_cache_saves_work(decoded: list[tuple[int, int, int]]) -> None:
    model = spread(tiny())
    tokens(model.generate(random_ids(1, BLOCK - 3), 6))
    whole = (BLOCK, 0, BLOCK)  # position 16 is outside the block: the window slides
    one_by_one = [(BLOCK, start, 1) for start in range(BLOCK - 3, BLOCK)]
    assert decoded == [(BLOCK, 0, BLOCK - 3), *one_by_one, whole, whole]
    decoded.clear()
    tokens(model.generate(random_ids(1, 3), 2))
    assert decoded == [(5, 0, 3), (5, 3, 1)]  # no memory for what will not be written


def called(monkeypatch: pytest.MonkeyPatch, space: Any, name: str) -> list[tuple[Tensor, ...]]:
    """What `space.name` is asked from now on."""
    calls: list[tuple[Tensor, ...]] = []
    function = getattr(space, name)
    monkeypatch.setattr(space, name, lambda *arguments: calls.append(arguments) or function(*arguments))
    return calls


class Other(GPT):
    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        logits, loss = super().forward(idx, targets)
        return None if logits is None else logits.flip(-1), loss


class Adapted(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.adapter = layer, nn.Linear(layer.in_features, layer.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.adapter(x)


def flip(_: nn.Module, __: Any, output: Any) -> Any:
    return output.flip(-1) if isinstance(output, Tensor) else (output[0].flip(-1), None)


# What is done to a model, and whether Decoder still can compute what it computes.
CHANGES: dict[str, tuple[Callable[[Any, pytest.MonkeyPatch], Any], bool]] = {
    "a hook": (lambda model, _: model.transformer.h[1].mlp.register_forward_hook(flip), False),
    "a hook before": (
        lambda model, _: model.transformer.h[1].attn.register_forward_pre_hook(lambda _, x: (x[0].flip(-1),)),
        False,
    ),
    "a hook on the whole": (lambda model, _: model.register_forward_hook(flip), False),
    "a forward": (lambda model, _: setattr(model.transformer.h[1].mlp, "forward", lambda x: x.flip(-1)), False),
    "a class's forward": (lambda _, patch: patch.setattr(mingpt.model.MLP, "forward", lambda _, x: x.flip(-1)), False),
    "a class": (lambda model, _: setattr(model, "__class__", Other), False),
    "a block": (lambda model, _: setattr(model.transformer.h[1], "mlp", nn.Linear(32, 32)), False),
    "an adapter": (lambda model, _: setattr(model.transformer.h[1].mlp, "dropout", nn.Linear(32, 32)), False),
    "heads": (lambda model, _: setattr(model.transformer.h[1].attn, "n_head", 8), True),
    "a norm": (
        lambda model, _: setattr(model.transformer.h[1], "ln_1", nn.LayerNorm(32, elementwise_affine=False)),
        True,
    ),
    "a layer": (
        lambda model, _: setattr(model.transformer.h[1].mlp, "c_fc", Adapted(model.transformer.h[1].mlp.c_fc)),
        True,
    ),
    "a layer's hook": (lambda model, _: model.transformer.h[1].mlp.c_proj.register_forward_hook(flip), True),
    "a layer's weight": (
        lambda model, _: nn.utils.parametrize.register_parametrization(
            model.transformer.h[1].mlp.c_fc, "weight", nn.Tanh()
        ),
        True,
    ),
    "an embedding's hook": (lambda model, _: model.transformer.wpe.register_forward_hook(flip), True),
}


@pytest.mark.parametrize("lengths", [(5,), (3, BLOCK, 1)])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_writes_what_it_computes(
    change: str, lengths: tuple[int, ...], decoded: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mingpt.model, "LARGE", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    prompts = [random_ids(1, length) for length in lengths]
    model = spread(tiny())
    unchanged = torch.cat([greedy_without_cache(model, prompt, 2 * BLOCK) for prompt in prompts])
    apply, cached = CHANGES[change]
    apply(model, monkeypatch)
    made = tokens(model.generate([prompt[0] for prompt in prompts], 2 * BLOCK, temperature=0.0))
    assert torch.equal(made, torch.cat([greedy_without_cache(model, prompt, 2 * BLOCK) for prompt in prompts]))
    assert not torch.equal(made, unchanged)
    assert bool(decoded) == cached


def test_a_hook_on_all_modules_is_asked() -> None:
    model, idx = spread(tiny()), random_ids(2, 3)
    unchanged = tokens(model.generate(idx, 5, temperature=0.0))
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, _, output: output.flip(-1) if isinstance(module, mingpt.model.MLP) else None
    )
    try:
        made = tokens(model.generate(idx, 5, temperature=0.0))
        assert torch.equal(made, greedy_without_cache(model, idx, 5)) and not torch.equal(made, unchanged)
    finally:
        hook.remove()


def fused_step(model: GPT) -> None:
    """A step of torch's, which does not count as a new version of the weights."""
    weight = model.lm_head.weight
    weight.grad = weight.detach().clone()
    torch.optim.SGD([weight], lr=1.0, fused=True).step()


def our_step(model: GPT) -> None:
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)
    make_optimizer(model, learning_rate=1.0, weight_decay=1.0).step()


# Ways to make the logits of a model zero.
TRAINED: dict[str, Callable[[GPT], Any]] = {
    "head": lambda model: nn.init.zeros_(model.lm_head.weight),
    "norm": lambda model: [nn.init.zeros_(each) for each in model.transformer.ln_f.parameters()],
    "data": lambda model: model.lm_head.weight.data.zero_(),
    "load": lambda model: model.load_state_dict({k: 0 * v for k, v in model.state_dict().items()}),
    "fused": fused_step,
    "ours": our_step,
}


@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize("way", TRAINED)
def test_a_reader_may_train_between_two_tokens(way: str, texts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mingpt.model, "LARGE", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    packed = called(monkeypatch, torch.ops.mkldnn, "_linear_pointwise") if mingpt.model.CPU_PACKS else None
    model, idx = spread(tiny()), random_ids(texts, 4)
    logprobs: list[Tensor] = []
    made = model.generate(idx, 6, temperature=0.0, logprobs=logprobs)
    next(made)
    assert packed is None or len(packed) == (texts > 1)  # of a prompt, only the head's product
    ids = next(made)
    assert packed is None or len(packed) == (texts > 1) * (1 + 1 + 4 * 2)
    assert (ids != 0).any()
    weight = model.lm_head.weight
    (model(ids.unsqueeze(1))[0].sum() + (weight * logprobs[0].sum()).sum()).backward()
    assert weight.grad is not None
    model.zero_grad()
    TRAINED[way](model)
    assert next(made).tolist() == [0] * texts  # all ids are equally likely now


@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (2, 2**17 + 1)])
def test_gelu_and_its_gradient_are_torchs(shape: tuple[int, ...]) -> None:
    torch.manual_seed(5)
    x = (3 * torch.randn(shape)).requires_grad_()
    exact = x.detach().double().requires_grad_()
    value, expected = gelu(x), nn.functional.gelu(exact, approximate="tanh")
    assert "TanhGELU" in str(value.grad_fn)
    (gradient,), (slope,) = (torch.autograd.grad(y.sin().sum(), at) for y, at in ((value, x), (expected, exact)))
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), slope, rtol=1e-5, atol=3e-6)
    for other in (x.detach(), x.bfloat16(), x.double()):
        assert torch.equal(gelu(other), nn.functional.gelu(other, approximate="tanh"))
    torch.testing.assert_close(gelu(x.unsqueeze(0).mT), value.unsqueeze(0).mT)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(gelu(x).sum(), x, create_graph=True)
    slopes = torch.func.grad(lambda x: gelu(x).sin().sum())(x.detach())
    torch.testing.assert_close(slopes.double(), slope, rtol=1e-5, atol=3e-6)
    far = torch.tensor([-math.inf, -1e30, -40.0, 0.0, 40.0, 1e30, math.nan], requires_grad=True)
    torch.testing.assert_close(gelu(far), nn.functional.gelu(far, approximate="tanh"), equal_nan=True)


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [None, gelu])
@pytest.mark.parametrize("width", [8, 512, 513])
@torch.no_grad()
def test_one_row_is_divided_among_threads(
    width: int,
    activation: Callable[[Tensor], Tensor] | None,
    bias: bool,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    divided = called(monkeypatch, torch, "baddbmm" if bias else "bmm")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(mingpt.model, "LARGE", 8 * 12)
    layer = nn.Linear(width, 12, bias=bias)
    multiply = product(layer, 1, activation)
    for rows in (2, 17, 1):
        x = torch.randn(width, rows).t()
        layer.weight.neg_()  # as an optimizer does
        torch.testing.assert_close(multiply(x), activation(layer(x)) if activation else layer(x))
    parts = 12 if threads == 3 else 4  # of 12 outputs, by up to four parts a thread
    last = (parts, width, 12 // parts) if width > 512 else (parts, width, 1)
    assert [call[-1].shape for call in divided] == ([] if threads == 1 else [last])


@pytest.mark.skipif(not mingpt.model.CPU_PACKS, reason="no processor or no torch for oneDNN's order of weights")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [None, gelu])
@torch.no_grad()
def test_several_rows_take_weights_as_onednn_reads_them(
    activation: Callable[[Tensor], Tensor] | None, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, products = (
        called(monkeypatch, torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )
    monkeypatch.setattr(mingpt.model, "LARGE", 8 * 12)
    layer = nn.Linear(8, 12, bias=bias)
    multiply = product(layer, 8, activation)
    for made in (1, 2, 3, 4):
        for rows in (40, 8, 3, 0, 8):  # a prompt can have any number of tokens
            x = 9 * torch.randn(rows, 8)
            torch.testing.assert_close(multiply(x), activation(layer(x)) if activation else layer(x))
        assert (len(copies), len(products)) == (made, 2 * made)
        if made == 1:
            layer.weight[1, 1] += 9
        elif made == 2:
            layer.weight.data.neg_()
        elif made == 3:
            layer.weight.neg_()
    with torch.autocast("cpu", torch.bfloat16):
        assert multiply(x).dtype == torch.bfloat16
    monkeypatch.setattr(mingpt.model, "CPU_PACKS", False)
    torch.testing.assert_close(product(layer, 8)(x), layer(x))
    assert len(products) == 8


@pytest.mark.parametrize("rows", [1, 8])
@torch.no_grad()
def test_what_is_no_plain_layer_computes_itself(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    divided = called(monkeypatch, torch, "baddbmm")
    packed = called(monkeypatch, torch.ops.mkldnn, "_linear_pointwise") if mingpt.model.CPU_PACKS else []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(mingpt.model, "LARGE", 8 * 12)
    quantized, hooked = nn.Linear(8, 12), nn.Linear(8, 12)
    quantized.weight = type("Packed", (nn.Parameter,), {})(quantized.weight.detach())  # has arithmetic of its own
    hooked.register_forward_hook(lambda _, __, y: y.flip(-1))
    with torch.inference_mode():
        inference = nn.Linear(8, 12)  # its weight has no version
    turned = nn.Linear(8, 12)
    turned.weight = nn.Parameter(torch.randn(8, 12).t())
    layers = (nn.Linear(8, 11), nn.Linear(8, 12).double(), quantized, hooked, inference, turned)
    for layer in (*layers, Adapted(nn.Linear(8, 12))):
        x = torch.randn(rows, 8, dtype=next(layer.parameters()).dtype)
        assert torch.equal(product(layer, rows)(x), layer(x))  # type: ignore[arg-type]
        assert torch.equal(product(layer, rows, gelu)(x), gelu(layer(x)))  # type: ignore[arg-type]
    assert not divided and not packed
    elsewhere = nn.Linear(8, 12, device="meta")
    assert product(elsewhere, rows)(torch.empty(rows, 8, device="meta")).shape == (rows, 12)
    assert not divided and not packed


@pytest.mark.parametrize("lengths", [(3,), (BLOCK,), (3, 1, BLOCK)])
def test_threads_change_no_token(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = spread(tiny()), [random_ids(1, length)[0] for length in lengths]
    alone = tokens(model.generate(prompts, 2 * BLOCK, temperature=0.0))
    monkeypatch.setattr(mingpt.model, "LARGE", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert torch.equal(tokens(model.generate(prompts, 2 * BLOCK, temperature=0.0)), alone)


def test_tokens_come_one_by_one() -> None:
    made = tiny().generate(random_ids(2, 3), 10**12)
    first = next(made)
    assert first.shape == (2,) and first.dtype == torch.int64
    assert list(tiny().generate(random_ids(2, 3), 0)) == []


def test_a_seed_repeats_a_sample() -> None:
    model, idx = spread(tiny()), random_ids(2, 4)
    state = torch.get_rng_state()
    once, again, other = (tokens(model.generate(idx, 30, generator=seeded(seed))) for seed in (1, 1, 2))
    assert torch.equal(once, again) and not torch.equal(once, other)
    assert torch.equal(state, torch.get_rng_state())  # the run's own random numbers are not touched


@pytest.mark.parametrize(
    "settings", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-9}, {"temperature": 1e-320}, {"temperature": 0.0}]
)
def test_all_ways_to_take_the_likeliest_agree(settings: dict[str, Any]) -> None:
    model, idx = spread(tiny()), random_ids(3, 4)
    made = tokens(model.generate(idx, 30, **settings))
    assert torch.equal(made, greedy_without_cache(model, idx, 30))


def test_draws_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.05, 0.5, 0.15, 0.3])
    logits = probabilities.log().expand(20_000, 4)

    def shares(**settings: Any) -> list[float]:
        ids = sample_token(logits, generator=seeded(3), **({"temperature": 1.0} | settings))
        return (ids.bincount(minlength=4) / len(ids)).tolist()

    def near(expected: list[float]) -> Any:
        return pytest.approx(expected, abs=0.015)

    squares = probabilities**2 / (probabilities**2).sum()
    assert shares() == near([0.05, 0.5, 0.15, 0.3])
    assert shares(temperature=0.5) == near(squares.tolist())
    assert shares(top_k=2) == near([0, 0.625, 0, 0.375])
    assert shares(top_k=2)[0] == shares(top_k=2)[2] == 0
    assert shares(top_k=100) == shares(top_p=1.0) == shares()
    assert shares(top_p=0.6) == near([0, 0.625, 0, 0.375])  # the one that crosses 0.6 still belongs to it
    assert shares(top_p=0.45)[1] == 1
    assert shares(top_k=3, top_p=0.8) == near([0, 0.625, 0, 0.375])  # top_p of what top_k left: 0.53 + 0.32 >= 0.8


def test_equal_logits_are_equally_likely() -> None:
    ties = torch.zeros(4, 5000)
    assert sample_token(ties, 0.0).tolist() == [0, 0, 0, 0]
    assert len(sample_token(ties, 1.0, top_k=1, generator=seeded(3)).unique()) == 4  # which is the likeliest?
    assert sample_token(ties, 1.0, top_p=1e-9).tolist() == [0, 0, 0, 0]  # the fewest that reach it: one


def test_the_ends_of_the_random_numbers_draw_no_impossible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]]).clamp(min=-1e30)  # finite, with probability zero
    for number, drawn in ((0.0, 2), (1 - 2**-24, 1), (0.5, 1), (0.49, 2)):
        monkeypatch.setattr(torch, "rand", lambda *shape, number=number, **_: torch.full(shape, number))
        assert sample_token(logits, 1.0).tolist() == sample_token(logits, 1.0, top_k=2).tolist() == [drawn]


# many prompts of different lengths


LENGTHS = [3, 1, BLOCK - 2, BLOCK + 5, 3, BLOCK]


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 7}, {"top_p": 0.8, "temperature": 1.3}])
@pytest.mark.parametrize("bias", [True, False])
def test_each_prompt_gets_what_it_gets_alone(bias: bool, settings: dict[str, Any]) -> None:
    model = spread(tiny(bias=bias))
    prompts = [random_ids(1, length)[0] for length in LENGTHS]
    together: list[Tensor] = []
    generators = [seeded(i) for i in range(len(prompts))]
    made = tokens(model.generate(prompts, 2 * BLOCK, generator=generators, logprobs=together, **settings))
    for i, prompt in enumerate(prompts):
        single: list[Tensor] = []
        alone = model.generate(prompt.unsqueeze(0), 2 * BLOCK, generator=seeded(i), logprobs=single, **settings)
        assert torch.equal(tokens(alone)[0], made[i]), f"prompt of {len(prompt)}"
        torch.testing.assert_close(torch.stack(together)[:, i], torch.cat(single), atol=1e-4, rtol=1e-4)
    assert len(made.unique()) > 6  # a model that repeats itself would prove little
    assert torch.equal(made[0], made[4]) == (settings == {"temperature": 0.0})  # one prompt, two generators


def test_padding_is_never_seen() -> None:
    model = spread(tiny())
    idx, padding = random_ids(2, 9), torch.tensor([4, 0])
    changed = idx.clone()
    changed[0, :4] = (idx[0, :4] + 1) % VOCAB
    logits, same = (Decoder(model, 2, 9)(ids, 0, padding) for ids in (idx, changed))
    assert torch.equal(logits, same)
    for row, unseen in enumerate(padding.tolist()):
        alone = logits_of(model, idx[row : row + 1, unseen:])[0, -1]
        torch.testing.assert_close(logits[row, :VOCAB], alone, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_logprobs_are_the_models_own() -> None:
    model, idx = spread(tiny()), random_ids(2, 5)
    logprobs: list[Tensor] = []
    made = tokens(model.generate(idx, BLOCK - 5, temperature=1.7, top_k=3, generator=seeded(1), logprobs=logprobs))
    expected = logits_of(model, torch.cat((idx, made), dim=1)).log_softmax(dim=-1)[:, 4:-1].gather(2, made.unsqueeze(2))
    torch.testing.assert_close(torch.stack(logprobs, dim=1), expected.squeeze(2), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": math.inf},
        {"top_k": 0},
        {"top_k": -3},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"max_new_tokens": -1},
        {"idx": torch.zeros(1, 0, dtype=torch.int64)},
        {"idx": []},
        {"idx": [torch.tensor([1]), torch.tensor([], dtype=torch.int64)]},
        {"generator": [torch.Generator()] * 2},
    ],
)
def test_settings_out_of_range_are_refused_at_the_call(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        tiny().generate(**({"idx": random_ids(1, 2), "max_new_tokens": 5} | settings))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_damaged_weights_are_reported(temperature: float) -> None:
    for damage in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="logits are not finite"):
            sample_token(torch.tensor([[0.0, 1.0], [damage, 1.0]]), temperature)
    model = tiny().train()
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[0, 0] = math.nan
    made = model.generate(random_ids(1, 2), 5, temperature=temperature)
    with pytest.raises(ValueError, match="logits are not finite"):
        next(made)
    assert model.training


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("hooked", [True, False])
def test_generation_has_no_dropout_and_leaves_the_mode_alone(training: bool, hooked: bool) -> None:
    plain, model = spread(tiny()), spread(tiny(dropout=0.5))
    model.train(training)
    if hooked:  # its modules are asked
        model.transformer.register_forward_hook(lambda *_: None)
    idx = random_ids(2, 3)
    made = model.generate(idx, 30, temperature=0.0)
    first = next(made)
    assert model.training == training  # though this reader never comes to the end
    assert torch.is_grad_enabled()
    assert torch.equal(torch.stack([first, *made], dim=1), greedy_without_cache(plain, idx, 30))
    assert model.training == training
