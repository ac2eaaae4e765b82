"""GPT-2 comes in from Hugging Face's layout and goes out to it with the same bits; what is no GPT-2 is refused."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from conftest import Runs, text
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mingpt import storage
from mingpt.data import Validation
from mingpt.grid import split_point
from mingpt.image import encode
from mingpt.interop import main, new_folder
from mingpt.model import GPT, PRESETS, GPTConfig
from mingpt.snapshot import find_image, load_snapshot, model_tensors
from mingpt.tokenizer import BPETokenizer, CharTokenizer, Tokenizer

transformers = pytest.importorskip("transformers")

BPE = BPETokenizer.train([text()], 290)
VOCAB, BLOCK = BPE.vocab_size, 24
SHAPE = {"vocab_size": VOCAB, "n_positions": BLOCK, "n_embd": 32, "n_layer": 2, "n_head": 2}


def their_model(**changes: Any) -> Any:
    """A random GPT2LMHeadModel whose weights are large enough that every part of it matters."""
    torch.manual_seed(4)
    ends = {"bos_token_id": VOCAB - 1, "eos_token_id": None}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**(SHAPE | ends | changes))).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    torch.nn.init.zeros_(model.transformer.ln_f.bias)  # else one token wins always
    return model


def write_tokenizer(folder: Path, tokenizer: BPETokenizer = BPE) -> None:
    """By hand, as GPT-2's own files are."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)}
    texts = ["".join(names[byte] for byte in token) for token in tokenizer.tokens]
    vocab = {name: i for i, name in enumerate([*texts, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    merges, known = ["#version: 0.2"], {*texts[:256]}
    for name in texts[256:]:
        first = max(i for i in range(1, len(name)) if {name[:i], name[i:]} <= known)
        merges.append(f"{name[:first]} {name[first:]}")
        known.add(name)
    (folder / "merges.txt").write_text("\n".join(merges) + "\n", encoding="utf-8")


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder as transformers writes it, with GPT-2's two tokenizer files."""
    folder = tmp_path / "theirs"
    their_model().save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: object) -> tuple[int, str, str]:
        return main([str(argument) for argument in arguments]), *capsys.readouterr()

    return call


def ids(count: int = BLOCK, B: int = 3) -> Tensor:
    return torch.randint(VOCAB, (B, count), generator=torch.Generator().manual_seed(count))


def logits(model: Any, idx: Tensor) -> Tensor:
    with torch.no_grad():
        output = model(idx)
    result: Tensor = output[0] if isinstance(output, tuple) else output.logits
    return result


def image_file(path: Path, tokenizer: Tokenizer, **changes: Any) -> Path:
    """An image of a random model of ours."""
    config = GPTConfig(tokenizer.vocab_size, block_size=BLOCK, n_layer=2, n_head=2, n_embd=32, **changes)
    torch.manual_seed(5)
    model = GPT(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tensors = {f"model.{name}": tensor for name, tensor in model_tensors(model).items()}
    metadata = {"model": asdict(config), "tokenizer": tokenizer.to_dict(), "step": 7}
    path.write_bytes(encode(tensors, metadata).numpy().tobytes())
    return path


def edit(folder: Path, **changes: Any) -> None:
    """Changes config.json; None removes nothing, it is a value there too."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


Call = Callable[..., tuple[int, str, str]]


# in


def test_an_imported_model_computes_and_writes_what_transformers_does(theirs: Path, run: Call, tmp_path: Path) -> None:
    code, out, err = run("import", theirs, "--out", tmp_path / "ours")
    assert (code, err) == (0, "") and "2 layers, 2 heads, 32 wide, block 24; tokenizer bpe, 290 tokens" in out
    model, tokenizer, info = load_snapshot(str(tmp_path / "ours"))
    reference, idx = their_model(), ids()
    assert logits(reference, idx).std() > 1  # else the tolerance below would forgive anything
    torch.testing.assert_close(logits(model, idx), logits(reference, idx), atol=1e-5, rtol=1e-5)
    assert tokenizer == BPE and info["step"] == 0 and info["val_loss"] is None

    prompt = ids(4, B=16)
    settings = {"max_new_tokens": BLOCK - 4, "do_sample": False, "pad_token_id": 0}
    expected = reference.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[:, 4:]
    made = torch.stack(list(model.generate(prompt, BLOCK - 4, temperature=0.0)), dim=1)
    assert torch.equal(made, expected) and len(made.unique()) > 6


def test_every_way_that_it_is_stored_gives_the_same_image(theirs: Path, run: Call, tmp_path: Path) -> None:
    def imported(source: object) -> dict[str, Tensor]:
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        assert run("import", source, "--out", out)[0] == 0
        return find_image(str(out))[1].tensors

    def same(source: object) -> bool:
        tensors = imported(source)
        return tensors.keys() == expected.keys() and all(torch.equal(expected[name], tensors[name]) for name in tensors)

    expected = imported(theirs)
    assert same(theirs / "model.safetensors") and same(f"{theirs}/") and same(f"file://{theirs}")

    remote = fsspec.filesystem("memory")
    for file in theirs.iterdir():
        remote.pipe(f"/hub/{file.name}", file.read_bytes())
    assert same("memory://hub") and same("memory://hub/model.safetensors")

    whole = load_file(theirs / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in whole.items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, BLOCK, BLOCK, dtype=torch.uint8), "h.1.attn.masked_bias": torch.ones(())}
    save_file(old | {"lm_head.weight": old["wte.weight"].clone()}, theirs / "model.safetensors")
    assert same(theirs), "as the first uploads were: no prefix, masks, the head again"

    (theirs / "model.safetensors").unlink()
    their_model().save_pretrained(theirs, max_shard_size="30KB")
    assert len([*theirs.glob("model-*.safetensors")]) > 2
    assert same(theirs) and same(theirs / "model.safetensors.index.json")
    next(theirs.glob("model-*.safetensors")).unlink()
    code, _, err = run("import", theirs, "--out", tmp_path / "out")
    assert code == 2 and "model-0000" in err

    their_model().save_pretrained(theirs)
    transformers.AutoTokenizer.from_pretrained(theirs).save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.json").rename(theirs / "tokenizer.json")
    for name in ("vocab.json", "merges.txt"):
        (theirs / name).unlink()
    out = tmp_path / "as transformers writes tokenizers"
    assert run("import", theirs, "--out", out)[0] == 0 and load_snapshot(str(out))[1] == BPE


def test_weights_keep_their_dtype_and_unaligned_files_are_read(theirs: Path, run: Call, tmp_path: Path) -> None:
    half = {name: tensor.bfloat16() for name, tensor in load_file(theirs / "model.safetensors").items()}
    save_file(half, theirs / "model.safetensors")
    data = (theirs / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    shifted = (length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :]
    (theirs / "model.safetensors").write_bytes(shifted)
    assert run("import", theirs, "--out", tmp_path / "ours")[0] == 0
    tensors = find_image(str(tmp_path / "ours"))[1].tensors
    assert torch.equal(tensors["model.transformer.wpe.weight"], half["transformer.wpe.weight"])
    assert run("export", tmp_path / "ours", "--out", tmp_path / "back")[0] == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == half.keys() and all(torch.equal(half[name], back[name]) for name in half)


def test_gpt2_sizes_are_known_without_a_config(theirs: Path, run: Call, tmp_path: Path, monkeypatch: Any) -> None:
    (theirs / "config.json").unlink()
    code, _, err = run("import", theirs, "--out", tmp_path / "ours")
    assert code == 2 and "config.json is missing" in err
    monkeypatch.setitem(PRESETS, "gpt2-tiny", {"n_layer": 2, "n_head": 2, "n_embd": 32})
    assert run("import", theirs, "--out", tmp_path / "ours")[0] == 0
    torch.testing.assert_close(logits(load_snapshot(str(tmp_path / "ours"))[0], ids()), logits(their_model(), ids()))


# out


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokenizer", [BPE, CharTokenizer("\n\"'éŠ日")], ids=["bpe", "char"])
def test_transformers_opens_what_is_exported(tmp_path: Path, run: Call, tokenizer: Tokenizer, bias: bool) -> None:
    image = image_file(tmp_path / "image.safetensors", tokenizer, bias=bias, dropout=0.3)
    code, _, err = run("export", image, "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    model, _, _ = load_snapshot(str(image))
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()) and theirs.config.resid_pdrop == 0.3
    idx = ids() % tokenizer.vocab_size
    assert logits(theirs, idx).shape == (3, BLOCK, tokenizer.vocab_size)
    torch.testing.assert_close(logits(model, idx), logits(theirs, idx), atol=1e-5, rtol=1e-5)

    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for sample in (
        ("é日\n", "'\"'\n\n") if isinstance(tokenizer, CharTokenizer) else (text(200), " the  fox\t\r\n12é 日🎉")
    ):
        assert reader(sample)["input_ids"] == tokenizer.encode(sample).tolist()
        assert reader.decode(tokenizer.encode(sample).tolist(), clean_up_tokenization_spaces=False) == sample

    assert run("import", tmp_path / "out", "--out", tmp_path / "back")[0] == 0
    back, original = find_image(str(tmp_path / "back"))[1], find_image(str(image))[1]
    assert back.metadata["tokenizer"] == original.metadata["tokenizer"]
    for name, tensor in original.tensors.items():
        rows = tokenizer.vocab_size if name.endswith("wte.weight") else None  # the padding is nobody's
        assert torch.equal(back.tensors[name][:rows], tensor[:rows]), name
    assert all((back.tensors[name] == 0).all() for name in back.tensors.keys() - original.tensors.keys())


def test_merges_are_those_that_the_ranks_mean(run: Call, tmp_path: Path) -> None:
    single = [bytes([byte]) for byte in range(256)]
    tokenizer = BPETokenizer("bpe", (*single, b"bc", b"ab", b"abc", b"aba", b"abab"))
    assert run("export", image_file(tmp_path / "image", tokenizer), "--out", tmp_path / "out")[0] == 0
    merges = (tmp_path / "out" / "merges.txt").read_text(encoding="utf-8").splitlines()
    assert merges == ["#version: 0.2", "b c", "a b", "a bc", "ab a", "ab ab"]  # not "ab c": "bc" comes first

    unreachable = image_file(tmp_path / "unreachable", BPETokenizer("bpe", (*single, b"abc")))
    code, _, err = run("export", unreachable, "--out", tmp_path / "none")
    assert code == 2 and "b'abc' is not made of two earlier ones" in err


def test_their_weights_come_back_with_the_same_bits(theirs: Path, run: Call, tmp_path: Path) -> None:
    run("import", theirs, "--out", tmp_path / "ours")
    run("export", tmp_path / "ours", "--out", tmp_path / "back")
    with safe_open(tmp_path / "back" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers before 5 opens no other
    before, after = load_file(theirs / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    for name, read in {"vocab.json": json.loads, "merges.txt": str}.items():
        ours, original = ((folder / name).read_text(encoding="utf-8") for folder in (tmp_path / "back", theirs))
        assert read(ours) == read(original)


def test_training_goes_on_from_an_imported_model(runs: Runs, run: Call) -> None:
    tokenizer, folder = CharTokenizer.from_text([text()]), runs.folder
    image = image_file(folder / "image.safetensors", tokenizer)
    assert run("export", image, "--out", folder / "theirs")[0] == 0
    code, told, _ = run("import", folder / "theirs", "--out", folder / "imported")
    assert code == 0 and "train on" in told and "finetune_gpt2" not in told  # that is for GPT-2's tokenizer
    shape = ["--model.n_embd=32", f"--model.block_size={BLOCK}", "--model.dropout=0"]
    runs("--snapshot.init_from=imported", "--train.max_steps=1", "--optim.warmup_steps=0", *shape)
    (began,) = (row["val/loss"] for row in runs.rows() if row["step"] == 0 and "val/loss" in row)

    tokens = tokenizer.encode(text())
    validation = Validation(tokens[split_point(len(tokens), 0.1) :], BLOCK, 1)
    cells = [validation.cell(i, torch.device("cpu")) for i in range(len(validation))]
    losses = [load_snapshot(str(image))[0](*cell)[1] * cell[1].numel() for cell in cells]
    assert began == pytest.approx(sum(losses).item() / sum(targets.numel() for _, targets in cells), rel=1e-5)


# refusals


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "llama"}, "model_type='llama'"),
        ({"model_type": "gpt_neo"}, "model_type='gpt_neo'"),
        ({"model_type": None}, "model_type=None"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"scale_attn_weights": False}, "scale_attn_weights=False"),
        ({"activation_function": "relu"}, "activation_function='relu'"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06"),
        ({"add_cross_attention": True}, "add_cross_attention=True"),
        ({"quantization_config": {"bits": 8}}, "quantization_config"),
        ({"n_inner": 100}, "n_inner=100"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"n_head": 5}, "n_head=5 does not divide"),
        ({"n_layer": "2"}, "n_layer='2' is no whole number"),
        ({"n_layer": 3}, "h.2.attn.c_attn.bias missing instead of [96]"),
        ({"n_layer": 1}, "h.1.attn.c_attn.bias [96] instead of nothing"),
        ({"n_embd": 64}, "[96] instead of [192]"),
        ({"n_positions": 25}, "wpe.weight [24, 32] instead of [25, 32]"),
        ({"vocab_size": 10**15}, "wte.weight has 290 rows, but vocab_size=1000000000000000"),
        ({"vocab_size": 289}, "290 tokens, but the model vocab_size=289"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_architecture_is_refused_by_name(
    theirs: Path, run: Call, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    edit(theirs, **changes)
    before = sorted(tmp_path.iterdir())
    code, out, err = run("import", theirs, "--out", tmp_path / "ours")
    assert (code, out) == (2, "") and named in err and str(theirs) in err and err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_an_untied_head_and_other_weights_are_refused(theirs: Path, run: Call, tmp_path: Path) -> None:
    whole = load_file(theirs / "model.safetensors")
    for extra, named in {"lm_head.weight": "lm_head.weight differs", "score.weight": "score.weight"}.items():
        save_file(whole | {extra: torch.ones(VOCAB, 32)}, theirs / "model.safetensors")
        code, _, err = run("import", theirs, "--out", tmp_path / "ours")
        assert code == 2 and named in err and err.count("\n") == 1


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickles_are_refused_with_the_way_to_convert(theirs: Path, run: Call, tmp_path: Path, name: str) -> None:
    (theirs / "model.safetensors").rename(theirs / name)
    for source in (theirs, theirs / name, tmp_path / "no such.pt"):
        code, _, err = run("import", source, "--out", tmp_path / "ours")
        assert code == 2 and "save_pretrained(NEW)" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b"\xff\xfe"),
        ("model.safetensors", b""),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        ("model.safetensors", b"\x02\0\0\0\0\0\0\0{}"),
        ("vocab.json", b'{"a": 0}'),
        ("vocab.json", b'{"a": "b", "c": 1}'),
        ("merges.txt", b"#version: 0.2\n"),
        ("merges.txt", b"\xff\n\n x"),
    ],
)
def test_damaged_files_are_named_in_one_line(
    theirs: Path, run: Call, tmp_path: Path, name: str, content: bytes
) -> None:
    (theirs / name).write_bytes(content)
    code, out, err = run("import", theirs, "--out", tmp_path / "ours")
    named = "vocab.json" if name == "merges.txt" else name
    assert (code, out) == (2, "") and err.count("\n") == 1 and (named in err or len(content) == 10)
    assert not (tmp_path / "ours").exists()


def test_sources_that_are_none(theirs: Path, run: Call, tmp_path: Path) -> None:
    for source in (tmp_path / "nothing", tmp_path / "nothing.safetensors", theirs / "config.json", "memory://none"):
        code, _, err = run("import", source, "--out", tmp_path / "ours")
        assert code == 2 and str(source).rpartition("/")[2] in err and err.count("\n") == 1
    for source in (tmp_path / "nothing", theirs / "model.safetensors"):
        code, _, err = run("export", source, "--out", tmp_path / "ours")
        assert code == 2 and str(source) in err and err.count("\n") == 1
    assert "python -m mingpt.interop import" in err
    own = tmp_path / "own.safetensors"
    own.write_bytes(encode({"model.table": torch.ones(2)}, {"model": None, "tokenizer": None}).numpy().tobytes())
    assert "the user's own model" in run("export", own, "--out", tmp_path / "ours")[2]


def test_gpt2s_own_tokenizer_is_not_guessed_for_a_small_vocabulary(theirs: Path, run: Call, tmp_path: Path) -> None:
    (theirs / "merges.txt").unlink()
    code, _, err = run("import", theirs, "--out", tmp_path / "ours")
    assert code == 2 and "vocab_size=290 is not GPT-2's" in err


# whole or not at all


def test_what_is_there_stays(theirs: Path, run: Call, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    for out in (tmp_path / "full", theirs / "config.json", "s3://bucket/gpt2", "", "."):
        code, _, err = run("import", theirs, "--out", out)
        assert code == 2 and f"--out={out}" in err and err.count("\n") == 1
    assert os.listdir(tmp_path / "full") == ["mine"]
    assert run("import", theirs, "--out", tmp_path / "a" / "new" / "one")[0] == 0


def test_what_a_killed_one_left_is_removed_unless_it_lives(tmp_path: Path) -> None:
    dead, living, other = (tmp_path / f".{name}.tmp" for name in ("out.0", "out.1", "out2.0"))
    for folder in (dead, living, other):
        folder.mkdir()
    with storage.lock(living / ".lock"), new_folder(str(tmp_path / "out")) as folder:
        assert folder.is_dir() and living.exists() and other.exists() and not dead.exists()
    assert not [*(tmp_path / "out").iterdir()]


@pytest.mark.parametrize("command", ["import", "export"])
def test_a_full_disk_leaves_nothing(
    theirs: Path, run: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    source = theirs if command == "import" else image_file(tmp_path / "image.safetensors", BPE)
    before = sorted(tmp_path.iterdir())
    replace_file = storage.replace_file

    def full(path: Path, chunks: Any) -> None:
        if path.suffix == ".safetensors":
            raise OSError(28, "No space left on device", str(path))
        replace_file(path, chunks)

    monkeypatch.setattr(storage, "replace_file", full)
    code, _, err = run(command, source, "--out", tmp_path / "out")
    assert code == 1 and "No space left" in err and err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before
