"""GPT: token ids in, logits or a loss out. One file that can be copied alone.

The architecture, the weight names and the arithmetic are GPT-2's (Radford et al. 2019), so that its published weights
fit: every `c_attn`, `c_proj` and `c_fc` transposed, since GPT-2 stores them for `x @ W`. Shapes are written with
B = sequences, T = tokens in a sequence, C = n_embd.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.checkpoint import checkpoint

PRESETS: dict[str, dict[str, int]] = {
    "gpt-nano": {"n_layer": 3, "n_head": 3, "n_embd": 48},
    "gpt-micro": {"n_layer": 4, "n_head": 4, "n_embd": 128},
    "gpt-mini": {"n_layer": 6, "n_head": 6, "n_embd": 192},
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},  # 124M parameters with GPT-2's 50257 tokens
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},  # 355M
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},  # 774M
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},  # 1558M
}

# What `attend`, the loss and sampling choose their kernels by.
EXPLICIT_UP_TO = 256  # tokens; for more than that torch's own attention is the faster one in bfloat16 too
CPU_HAS_BFLOAT16 = any(torch.cpu.get_capabilities().get(units) for units in ("avx512_bf16", "amx_bf16"))
LOGITS_AT_ONCE = {"cuda": 2**26}  # by device; the CPU gains nothing from less
LARGE = 2**17  # weights in a layer from which on a product of few rows on a CPU gains by `product`
# Whether torch has oneDNN's order of weights, on the kind of processor where that was measured.
CPU_PACKS = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX")


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. Raises ValueError, with the setting's dotted name, where no such model can be."""

    vocab_size: int
    block_size: int = 1024  # the longest context, in tokens
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in linear layers and layer norms; GPT-2 has them, without is a little faster
    activation_checkpointing: bool = False  # recompute each block in the backward: less memory, a third more time

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} is too small; give 1 or more")
        if self.n_embd % self.n_head:
            raise ValueError(
                f"model.n_head={self.n_head} does not divide model.n_embd={self.n_embd}; "
                f"take another n_head, or a multiple of {self.n_head} for n_embd"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout={self.dropout} is no probability; give 0 or more and less than 1")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: a multiple of 64, the tile of a GPU's matrix units."""
        return math.ceil(self.vocab_size / 64) * 64

    @property
    def num_parameters(self) -> int:
        """Parameters, the tied one once and without the padding: 124,439,808 for gpt2 with its 50257 tokens."""
        C, vector = self.n_embd, self.n_embd * (2 if self.bias else 1)  # of a layer norm, or of a bias beside a weight
        block = 12 * C * C + 2 * vector + (9 * C if self.bias else 0)
        return (self.vocab_size + self.block_size) * C + self.n_layer * block + vector


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Attention (B, n_head, T, head size), causal where `mask` is None, by the kernel that suits device and shape."""
    T = q.size(2)
    causal = False
    if mask is None and T > 1:  # a single query is the last token; a branch, as a compiler may not know T
        causal = True
    if causal and q.dtype == torch.bfloat16 and q.device.type == "cpu" and T <= EXPLICIT_UP_TO and CPU_HAS_BFLOAT16:
        # torch's own kernel for bfloat16 on CPUs leaves the units for matrix products idle at this length.
        future = torch.full((T, T), -math.inf, device=q.device).triu(1)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.size(3)) + future).softmax(dim=-1)
        return F.dropout(weights, dropout).to(v.dtype) @ v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # query, key, value of all heads
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.dropout = config.n_head, config.dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        y = attend(q, k, v, None, self.dropout if self.training else 0.0)
        x = self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))
        return x


class TanhGELU(torch.autograd.Function):
    """GELU in GPT-2's form, x (1 + tanh u) / 2 = x sigmoid(2 u) (Hendrycks and Gimpel 2016), and its derivative.

    torch's own takes nearly twice as long on CPUs, because of the tanh: up to a tenth of a small model's step.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        y, derivative = torch.empty_like(x), torch.empty_like(x)
        a, b = math.sqrt(8 / math.pi), 0.044715  # 2 u = a w, with w = x + b x^3
        for part, value, slope in zip(*(each.view(-1).split(2**17) for each in (x, y, derivative)), strict=True):
            w = torch.addcmul(part, part, part * part, value=b, out=slope)  # pieces that stay in the caches
            s = (w * a).sigmoid_()
            torch.mul(part, s, out=value)
            # dy/dx = s + s (1 - s) a (x + 3 b x^3), which is s + s (1 - s) 3 a (w - 2/3 x)
            torch.addcmul(s, torch.addcmul(s, s, s, value=-1), w.sub_(part, alpha=2 / 3), value=3 * a, out=slope)
        ctx.save_for_backward(derivative)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        differentiated_once()
        derivative: Tensor = ctx.saved_tensors[0]
        return grad * derivative


def differentiated_once() -> None:
    """For a backward that has no derivative of its own: torch would take it for a constant, and say nothing."""
    if torch.is_grad_enabled():  # create_graph=True
        raise RuntimeError("mingpt's GPT has no second derivatives in this dtype on this device; take model.double()")


def gelu(x: Tensor) -> Tensor:
    """GELU in the form that GPT-2's weights were trained with, by the kernel that suits device and dtype."""
    transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if x.device.type == "cpu" and x.dtype == torch.float32 and x.requires_grad and not transformed:
        y: Tensor = TanhGELU.apply(x)  # type: ignore[no-untyped-call]
        return y
    return F.gelu(x, approximate="tanh")


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = gelu(self.c_fc(x))
        x = self.dropout(self.c_proj(x))
        return x


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))  # Decoder writes out what Block, its attention and its MLP do: change both
        x = x + self.mlp(self.ln_2(x))
        return x


class Transformer(nn.Module):
    """Token ids (B, T) to hidden states (B, T, C): all of GPT but its head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.activation_checkpointing = config.activation_checkpointing

    def forward(self, idx: Tensor) -> Tensor:
        x: Tensor = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device)))
        for block in self.h:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)  # restores the generators: dropout repeats itself
            else:
                x = block(x)
        x = self.ln_f(x)
        return x


class ChunkedCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of hidden states (N, C) under a head, whose logits never stand in memory as a whole.

    In float32 those of 16 sequences of GPT-2 would take 3 GB, and their gradient as much again. The gradient is made
    with the loss, `rows` at a time, so that no product is computed twice; it is scaled in the backward, since a
    GradScaler's factor is known only there, and float16 keeps more of it as it is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, rows: int) -> Tensor:
        kind, dtype = x.device.type, x.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        wanted = any(ctx.needs_input_grad)
        total, known = torch.zeros((), device=x.device), targets != -100  # which torch's own passes over
        with torch.autocast(kind, enabled=False):
            hidden, head = x.to(dtype), weight.to(dtype)
            if wanted:
                dx, dweight = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
            for start in range(0, len(x), rows):
                part = slice(start, start + rows)
                logits = (hidden[part] @ head.t()).float()
                logits[:, vocab_size:] = -math.inf
                logprobs = logits.log_softmax(dim=-1)
                total += F.nll_loss(logprobs, targets[part], reduction="sum")
                if wanted:
                    gradient = logprobs.exp_()
                    at = targets[part, None].clamp(min=0)
                    gradient.scatter_add_(1, at, gradient.new_full((len(gradient), 1), -1.0))
                    gradient = gradient.mul_(known[part, None]).to(dtype)
                    dx[part] = gradient @ head
                    dweight += gradient.t() @ hidden[part]
        if wanted:
            ctx.save_for_backward(dx, dweight, known.sum())
        ctx.dtype = weight.dtype
        return total / known.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        differentiated_once()
        dx, dweight, count = ctx.saved_tensors
        grad = grad / count
        return (dx * grad).to(dx.dtype), (dweight * grad).to(ctx.dtype), None, None, None


class GPT(nn.Module):
    """The language model. Its vocabulary is padded inside; the padded logits exist for nobody outside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # tied (Press & Wolf 2017)
        for name, parameter in self.named_parameters():  # a tied one comes once, as transformer.wte.weight
            if name.endswith("c_proj.weight"):  # the residual stream sums 2 * n_layer of them (GPT-2, section 2.3)
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Ids (B, T) to (logits (B, T, vocab_size), None), or with targets (B, T) to (None, loss).

        The loss is the mean cross-entropy over the B * T targets in nats, float32 under autocast too. Raises
        ValueError for more than block_size tokens and, on the CPU, for ids outside the vocabulary.
        """
        T, block_size = idx.size(1), self.config.block_size
        if not 1 <= T <= block_size:
            raise ValueError(f"idx has {T} tokens per sequence; give 1 to block_size={block_size}")
        if idx.device.type == "cpu" and not torch.compiler.is_compiling():  # elsewhere it would wait for the device
            self._check_ids(idx)
        x = self.transformer(idx)
        if targets is not None and (most := LOGITS_AT_ONCE.get(idx.device.type)):
            rows = math.ceil(most / self.config.padded_vocab_size)
            rows -= rows % 128 if rows > 128 else 0  # whole tiles of a GPU's matrix units
            head, vocab_size = self.lm_head.weight, self.config.vocab_size
            if not torch.is_grad_enabled():
                head = head.detach()  # a Function is not told, and would make the gradient in an evaluation too
            loss = ChunkedCrossEntropy.apply(x.flatten(0, 1), head, targets.flatten(), vocab_size, rows)  # type: ignore[no-untyped-call]
            return None, loss
        logits: Tensor = self.lm_head(x)[..., : self.config.vocab_size]
        if targets is None:
            return logits, None
        return None, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def _check_ids(self, idx: Tensor) -> None:
        low, high = (int(bound) for bound in idx.aminmax())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(f"idx holds ids from {low} to {high}; give 0 to vocab_size={self.config.vocab_size} - 1")

    def flops_per_token(self) -> float:
        """Floating point operations to train on one token: 6 N + 12 L C T (PaLM, Chowdhery et al. 2022, appendix B).

        N leaves out the position table, which is only looked up; the token table counts, as it is the head.
        """
        c = self.config
        return 6.0 * (c.num_parameters - c.block_size * c.n_embd) + 12.0 * c.n_layer * c.n_embd * c.block_size

    def generate(
        self,
        idx: Tensor | Sequence[Tensor],
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        logprobs: list[Tensor] | None = None,
    ) -> Iterator[Tensor]:
        """Continues the prompts idx, (B, T) or B of any lengths (T,); yields the next ids (B,) as they are made.

        The context is the last block_size tokens. Until the longest reaches that, a token costs one token's work
        (cached keys and values), beyond it a whole block's: every token then has another position. It also costs a
        whole forward where a module around the layers was replaced or has a hook. Temperature 0 takes the likeliest
        token, top_k draws from the k likeliest (and those as likely as the last of them), top_p from the fewest that
        reach this probability (Holtzman et al. 2020). The generators must live on the model's device: one, or one for
        each sequence, which then draws what it would draw alone; None draws from torch's own. The list `logprobs`
        receives the natural logarithms (B,) of the model's own probabilities of the ids. Between two tokens the model
        is in the mode it was in, and its weights may be trained in place (a few of them changed by `.data` or numpy may
        stay unseen). For several texts a CPU holds float32 weights twice. Raises ValueError for settings out of range
        at the call, for logits that are not finite when they appear.
        """
        if not len(idx) or not all(len(row) for row in idx):
            raise ValueError("idx is empty; give at least one token to continue")
        check_settings(max_new_tokens, temperature, top_k, top_p)
        if isinstance(generator, Sequence) and len(generator) != len(idx):
            raise ValueError(f"generator has {len(generator)} for {len(idx)} sequences; give one, or one for each")
        for row in idx:
            self._check_ids(row)

        def pick(logits: Tensor) -> Tensor:
            ids = sample_token(logits, temperature, top_k, top_p, generator)
            if logprobs is not None:
                logprobs.append(logits.log_softmax(dim=-1).gather(1, ids.unsqueeze(1)).squeeze(1))
            return ids

        return self._generate([row[-self.config.block_size :] for row in idx], max_new_tokens, pick)

    @torch.no_grad()
    def _generate(
        self, prompts: list[Tensor], max_new_tokens: int, pick: Callable[[Tensor], Tensor]
    ) -> Iterator[Tensor]:
        block_size, longest = self.config.block_size, max(map(len, prompts))
        # Padded on the left, so that all sequences take their next token at the same place.
        context = torch.stack([F.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
        padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=context.device)
        ragged = bool(padding.any())
        decoder = (
            Decoder(self, len(prompts), min(longest + max_new_tokens, block_size)) if can_be_decoded(self) else None
        )
        fresh = context  # what it has not seen
        for length in range(longest, longest + max_new_tokens):
            if length > block_size:  # the window moves on: every token has another position
                fresh, padding = context, (padding - 1).clamp(min=0)  # padding is what leaves first
                ragged = bool(padding.any())
            with evaluating(self):  # for each token, not once: a reader may stop here, or train between two tokens
                if decoder:
                    logits = decoder(fresh, context.size(1) - fresh.size(1), padding if ragged else None)
                else:
                    rows = zip(context.split(1), padding.tolist(), strict=True)
                    texts = [row[:, unseen:] for row, unseen in rows] if ragged else [context]
                    logits = torch.cat([self(text)[0][:, -1] for text in texts])
            next_idx = pick(logits[:, : self.config.vocab_size].float())
            fresh = next_idx.unsqueeze(1)
            context = torch.cat((context, fresh), dim=1)[:, -block_size:]
            yield next_idx


class Decoder:
    """GPT for sampling: new tokens in, the next one's logits out; the keys and values of all tokens stay here.

    What the modules around the layers compute (`WRITTEN_OUT`) stands here once more: for one token on a CPU, so many
    modules, and views that are made each time, take as long as a small model's products.
    """

    def __init__(self, model: GPT, texts: int, length: int) -> None:
        """For `texts` of up to `length` tokens."""
        self.transformer, self.lm_head, self.length = model.transformer, product(model.lm_head, texts), length
        self.blocks = [
            (block.attn.n_head, block.ln_1, product(block.attn.c_attn, texts), product(block.attn.c_proj, texts),
             block.ln_2, product(block.mlp.c_fc, texts, gelu), product(block.mlp.c_proj, texts))
            for block in cast("Iterable[Block]", model.transformer.h)
        ]  # fmt: skip
        self.caches: dict[int, Tensor] = {}  # of each block: keys and values (2, B, n_head, length, head size)

    @torch.no_grad()
    def __call__(self, idx: Tensor, start: int, padding: Tensor | None) -> Tensor:
        """The logits (B, padded_vocab_size) after the tokens idx (B, T), which follow `start` tokens of earlier calls.

        Start 0 begins anew. The first `padding` (B,) tokens of each text are none, unseen.
        """
        (B, T), end = idx.shape, start + idx.size(1)
        assert start == 0 or T == 1  # a causal mask aligns the first query with the first key
        positions, mask = torch.arange(start, end, device=idx.device), None
        if padding is not None:  # the attention is faster without a mask
            keys, queries = torch.arange(end, device=idx.device), positions.unsqueeze(1)
            seen = (keys <= queries) & (keys >= padding.view(-1, 1, 1))
            # Padding sees itself alone: some kernels give nan where nothing is seen, and 0 * nan is nan.
            mask = (seen | (keys == queries)).unsqueeze(1)
            positions = (positions - padding.unsqueeze(1)).clamp(min=0)
        x = (self.transformer.wte(idx) + self.transformer.wpe(positions)).flatten(0, 1)
        for layer, (n_head, ln_1, c_attn, c_proj, ln_2, c_fc_gelu, mlp_c_proj) in enumerate(self.blocks):
            qkv = c_attn(ln_1(x)).view(B, T, 3, n_head, -1).permute(2, 0, 3, 1, 4)
            if start == 0:  # once for the whole text: growing would copy everything for every token
                self.caches[layer] = qkv.new_empty(2, B, n_head, self.length, qkv.size(4))
            k, v = kv = self.caches[layer][..., :end, :]
            kv[..., start:, :] = qkv[1:]
            y = attend(qkv[0], k, v, mask, 0.0)
            x = x + c_proj(y.transpose(1, 2).reshape(B * T, -1))
            x = x + mlp_c_proj(c_fc_gelu(ln_2(x)))
        return self.lm_head(self.transformer.ln_f(x.view(B, T, -1)[:, -1]))


# The forwards that Decoder writes out, by the last part of their modules' names, and the layers that it calls.
WRITTEN_OUT = {
    "": GPT.forward,
    "transformer": Transformer.forward,
    "h": nn.ModuleList.forward,
    "attn": CausalSelfAttention.forward,
    "mlp": MLP.forward,
    **dict.fromkeys(("drop", "resid_dropout", "dropout"), nn.Dropout.forward),
    "block": Block.forward,
}
CALLED = {"wte", "wpe", "ln_1", "c_attn", "c_proj", "ln_2", "c_fc", "ln_f", "lm_head"}


def can_be_decoded(model: GPT) -> bool:
    """Whether the modules that Decoder does not call are as they stand here: none replaced, overridden or hooked."""
    return not _has_any_global_hook() and all(
        type(module).forward is WRITTEN_OUT.get(name.rpartition(".")[2], WRITTEN_OUT["block"]) and not changed(module)
        for name, module in model.named_modules()
        if CALLED.isdisjoint(name.split("."))
    )


def changed(module: nn.Module) -> bool:
    """Whether this one module has a hook, or a forward of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def product(
    layer: nn.Linear, rows: int, activation: Callable[[Tensor], Tensor] | None = None
) -> Callable[[Tensor], Tensor]:
    """`layer` and then `activation` (gelu or none), or on a CPU what computes the same of x (rows, in_features) faster.

    MKL, which torch asks, works on one row in one thread, and on 2 to 30 rows at half the rate at which memory gives
    the weights. Any other number of rows, a prompt's or a window's that slides, is the layer's own affair.
    """

    def plain(x: Tensor) -> Tensor:
        return layer(x) if activation is None else activation(layer(x))

    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter or changed(layer):  # LoRA, quantized
        return plain
    weight, threads = layer.weight, torch.get_num_threads()
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.numel() < LARGE:
        return plain
    if weight.is_inference() or not weight.is_contiguous() or (threads == 1 if rows == 1 else not CPU_PACKS):
        return plain
    fast = divided(layer, threads, activation) if rows == 1 else packed(layer, rows, activation)
    return lambda x: fast(x) if len(x) == rows and not torch.is_autocast_enabled("cpu") else plain(x)


def divided(
    layer: nn.Linear, threads: int, activation: Callable[[Tensor], Tensor] | None
) -> Callable[[Tensor], Tensor]:
    """`product` of one row: its outputs in four parts a thread, which suit the caches better than one."""
    weight, bias = layer.weight, layer.bias
    # MKL reads long rows of weights up to 1.5 times as fast for x @ weight.T, short ones 1.1 times for weight @ x.T.
    parts, long = math.gcd(len(weight), 4 * threads), weight.size(1) > 512
    weights = weight.view(parts, -1, weight.size(1)).mT if long else weight.view(parts, -1, weight.size(1))
    biases = None if bias is None else bias.view(parts, 1, -1) if long else bias.view(parts, -1, 1)

    def multiply(x: Tensor) -> Tensor:
        both = (x.expand(parts, -1, -1), weights) if long else (weights, x.t().expand(parts, -1, -1))
        y = (torch.bmm(*both) if biases is None else torch.baddbmm(biases, *both)).view(1, -1)
        return y if activation is None else activation(y)

    return multiply


def packed(layer: nn.Linear, rows: int, activation: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor]:
    """`product` of several rows by oneDNN, with a copy of the weights in the order in which it reads them.

    A new copy (a second for 2 GB) where the weights changed. For one row it would gain nothing.
    """
    weight, then = layer.weight, ("none", "") if activation is None else ("gelu", "tanh")
    copy, version = weight, -1
    # Fused optimizers change weights without a new version, and so does `.data`: some of the weights are compared.
    some = weight.detach().view(-1)[:: max(1, weight.numel() // 16)]
    known = some.clone()

    def multiply(x: Tensor) -> Tensor:
        nonlocal copy, version, known
        if version != weight._version or not torch.equal(some, known):
            copy, version = torch.ops.mkldnn._reorder_linear_weight(weight, rows), weight._version
            known = some.clone()
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, copy, layer.bias, then[0], [], then[1]))

    return multiply


def check_settings(max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raises ValueError, with its name, for a setting of `generate` that is out of range."""
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} is negative; give 0 or more")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature} is out of range; give 0 (the likeliest token) or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} leaves no token; give 1 or more, or leave it out")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} is out of range; give more than 0 and at most 1, or leave it out")


def sample_token(
    logits: Tensor,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
) -> Tensor:
    """Draws one id (B,) from each row of float32 logits (B, vocab_size). Raises ValueError where one is not finite."""
    if not math.isfinite(logits.sum()):  # a draw would be an id that is none
        raise ValueError("the logits are not finite (nan or inf); the weights are damaged, take an earlier snapshot")
    if temperature < 1e-6:  # float32 logits are no finer than that; dividing by less would overflow
        return logits.argmax(dim=-1)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.size(1))).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    probabilities, ids = F.softmax(logits / temperature, dim=-1), None
    if top_p is not None and top_p < 1:
        probabilities, ids = probabilities.sort(dim=-1, descending=True, stable=True)
        probabilities[probabilities.cumsum(dim=-1) - probabilities >= top_p] = 0  # never the first: 0 < top_p
    # One random number a row: in (0, 1], so that it falls into no token without probability.
    rows = [(len(logits), generator)] if not isinstance(generator, Sequence) else [(1, each) for each in generator]
    draws = torch.cat([1 - torch.rand(count, 1, generator=each, device=logits.device) for count, each in rows])
    sums = probabilities.cumsum(dim=-1)
    choice = torch.searchsorted(sums, draws * sums[:, -1:])
    return (choice if ids is None else ids.gather(1, choice)).squeeze(1)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it the model is in eval mode (no dropout), after it in the mode it was in."""
    if not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()


@torch.no_grad()
def check_causal(model: nn.Module, vocab_size: int, block_size: int, device: str | torch.device) -> None:
    """Changes the last of some tokens: the logits of all earlier ones must keep every bit, else ValueError.

    A model that sees the future reaches a low loss and writes nonsense. Costs two forwards of at most 64 tokens, under
    half a second for gpt2 on a core; draws nothing from torch's global generator.
    """
    block_size = min(block_size, 64)
    idx = torch.randint(vocab_size, (1, block_size), generator=torch.Generator().manual_seed(0)).to(device)
    changed = idx.clone()
    changed[:, -1] = (idx[:, -1] + 1) % vocab_size
    with evaluating(model):
        before, after = (model(ids)[0][:, :-1] for ids in (idx, changed))
    if not torch.equal(before, after):
        position = int((before != after).any(dim=-1).nonzero()[0, 1])
        raise ValueError(f"the model is not causal: token {block_size - 1} changes the logits at position {position}")
