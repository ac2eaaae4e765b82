"""GPT-2 as Hugging Face lays it out, in and out.

    python -m mingpt.interop import SOURCE --out FOLDER      a GPT-2 becomes a snapshot, to sample from and to train on
    python -m mingpt.interop export SNAPSHOT --out FOLDER    a snapshot becomes a folder that transformers opens

SOURCE is a folder or a .safetensors file, local or at a URI. FOLDER is new; it is written whole or not at all. Nothing
that can execute is read: weights come as safetensors only. Exit codes: 0 done; 1 something cannot be read or written;
2 wrong use, or a model that is no GPT-2; 130 Ctrl-C.
"""

import argparse
import glob
import json
import os
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mingpt import storage
from mingpt.faults import redact
from mingpt.image import Image, brief, encode, pack, unpack
from mingpt.model import GPT, PRESETS, GPTConfig
from mingpt.snapshot import Snapshots, find_image, load_weights, model_tensors
from mingpt.storage import LocalStore
from mingpt.tokenizer import END_OF_TEXT, GPT2_FINGERPRINT, BPETokenizer, CharTokenizer, Tokenizer, tokenizer_from_dict

# What changes the arithmetic, the only values that ours has, and what is meant where nothing is said (the first).
_ARITHMETIC: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
}
_SHAPE = {"n_positions": "block_size", "vocab_size": "vocab_size"} | {n: n for n in ("n_layer", "n_head", "n_embd")}
_GPT2_DEFAULTS = {"n_positions": 1024, "vocab_size": 50257, **PRESETS["gpt2"]}
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # GPT-2 computes x @ W
_MASKS = (".attn.bias", ".attn.masked_bias")  # constants that old files hold
_OTHER_FORMATS = (".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".onnx", ".gguf")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with `argv` (without the program's name) and returns its exit code."""
    parser = argparse.ArgumentParser("python -m mingpt.interop", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    for name, source in {"import": "SOURCE", "export": "SNAPSHOT"}.items():
        command = commands.add_parser(name, allow_abbrev=False)
        command.add_argument("source", metavar=source)
        command.add_argument("--out", required=True, metavar="FOLDER")
    arguments = parser.parse_args(argv)
    run = import_gpt2 if arguments.command == "import" else export_gpt2
    try:
        for line in run(arguments.source, arguments.out):
            print(line)
        return 0
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError) as error:
        print(f"mingpt.interop: {redact(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ValueError | FileNotFoundError) else 1


def import_gpt2(source: str, out: str) -> list[str]:
    """Makes the folder `out` with one snapshot, of step 0; returns what to tell the user.

    Weights keep their dtype. Memory: the image once; the source is mapped. Raises ValueError where it is no GPT-2 of
    ours, OSError where it cannot be read or written.
    """
    with new_folder(out) as folder:
        home, tensors = read_weights(source)
        config = read_config(home, tensors)
        tokenizer = read_tokenizer(home, config.vocab_size)
        fingerprints = {"tokenizer": tokenizer.fingerprint}
        facts: dict[str, Any] = {"val_loss": None, "world_size": 1, "fingerprints": fingerprints, "config": {}}
        metadata = {"step": 0, "samples_seen": 0, "generation": 1, "run_id": secrets.token_hex(8), **facts}
        metadata |= {"source": source, "model": asdict(config), "tokenizer": tokenizer.to_dict()}
        image = Image(metadata, to_ours(tensors, config, source))
        with torch.device("meta"):
            model = GPT(config)
        load_weights(model, image, source)  # into nothing: it names what does not fit
        data = encode(image.tensors, metadata)
        Snapshots(LocalStore(folder), image.metadata["run_id"]).save(data, step=0, generation=1, facts=facts)
    into = f"--snapshot.init_from={shlex.quote(out)}"
    return [
        f"{out}: GPT-2 of {config.num_parameters:,} parameters, {config.n_layer} layers, {config.n_head} heads, "
        f"{config.n_embd} wide, block {config.block_size}; tokenizer {tokenizer.kind}, {tokenizer.vocab_size} tokens",
        f"sample from it  python -m mingpt.sample {shlex.quote(out)}",
        f"train on        python train_gpt.py configs/finetune_gpt2.yaml {into}"
        if tokenizer.kind == "gpt2"
        else f"train on        {into}, the same model.* and a data.path with the same {tokenizer.kind} tokenizer",
    ]


def export_gpt2(source: str, out: str) -> list[str]:
    """Makes the folder `out` with config.json, model.safetensors and the tokenizer's files; what to tell the user.

    A model without biases gets zeros, the padding of the vocabulary is left out. Memory: the weights once, the image is
    mapped. Raises as `find_image` does, and ValueError where the model is not a GPT of ours.
    """
    with new_folder(out) as folder:
        place, image = find_image(source)
        if image.metadata.get("model") is None or image.metadata.get("tokenizer") is None:
            raise ValueError(f"{place} holds the user's own model, no GPT")
        config = GPTConfig(**image.metadata["model"])
        with torch.device("meta"):
            model, complete = GPT(config), model_tensors(GPT(replace(config, bias=True)))
        load_weights(model, image, place)  # into nothing: it names what does not fit
        tensors = {}
        for name, expected in complete.items():
            tensor = image.tensors.get(f"model.{name}", torch.zeros(()).expand(expected.shape))
            tensor = tensor[: config.vocab_size] if name.endswith("wte.weight") else tensor
            tensors[name] = tensor.T if name.endswith(_TRANSPOSED) else tensor
        tokenizer = tokenizer_from_dict(image.metadata["tokenizer"])
        description = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **{theirs: getattr(config, ours) for theirs, ours in _SHAPE.items()},
            **{key: values[0] for key, values in _ARITHMETIC.items() if values[0] is not None},
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
            **dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.end_of_text),
            "tie_word_embeddings": True,
        }
        for file, content in {"config.json": description, **tokenizer_files(tokenizer)}.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=1, ensure_ascii=False)
            storage.replace_file(folder / file, [text.encode()])
        storage.replace_file(folder / "model.safetensors", [pack(tensors, {"format": "pt"}).numpy().data])
    return [f"{out}: transformers.AutoModelForCausalLM.from_pretrained({out!r}) opens it; tokenizer {tokenizer.kind}"]


@contextmanager
def new_folder(out: str) -> Iterator[Path]:
    """A folder to fill, which gets the name `out` once all is in it; where that fails nothing is left.

    Raises ValueError where `out` is remote or there already.
    """
    if storage.is_remote(out):
        raise ValueError(f"--out={out} is remote; write into a local folder, then copy it")
    path = storage.local_path(out).resolve()
    if path.exists():
        raise ValueError(f"--out={out} is there already; give a new name, or remove it")
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):  # by who was killed: a living one holds its lock
        with suppress(BlockingIOError), storage.lock(left / ".lock", patience=0):
            shutil.rmtree(left)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    try:
        with storage.lock(temporary / ".lock"):
            yield temporary
            (temporary / ".lock").unlink()
            os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    storage.sync_folder(path.parent)


# Weights


def read_weights(source: str) -> tuple[str, dict[str, Tensor]]:
    """The folder of `source`, where its other files are, and its tensors by their names there, views of the file."""
    if source.endswith(_OTHER_FORMATS):
        raise ValueError(f"{source} is not read: {_CONVERT}")
    if source.endswith((".safetensors", ".safetensors.index.json")):
        home, _, name = source.rpartition("/") if "/" in source else (".", "", source)
        names = [name]
    else:
        home, names = source, ["model.safetensors", "model.safetensors.index.json"]
    name = next((name for name in names if _exists(_join(home, name))), "")
    if not name:
        if any(_exists(_join(home, other)) for other in ("pytorch_model.bin", "pytorch_model.bin.index.json")):
            raise ValueError(f"{source} holds pytorch_model.bin only, which is not read: {_CONVERT}")
        raise FileNotFoundError(
            f"{source!r} has no {names[0]}: name a folder that has, a .safetensors file, or a hub's hf://OWNER/NAME"
        )
    shards = [name]
    if name.endswith(".json"):
        weight_map = _read_json(_join(home, name)).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{_join(home, name)} has no weight_map: it is no index of shards")
        shards = sorted({str(shard) for shard in weight_map.values()})
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        tensors |= unpack(_mapped(_join(home, shard)), _join(home, shard))[1]
    return home, tensors


_CONVERT = (
    "only safetensors are, as pickles can execute anything; with transformers, "
    "GPT2LMHeadModel.from_pretrained(OLD).save_pretrained(NEW) makes a folder of them"
)


def to_ours(tensors: dict[str, Tensor], config: GPTConfig, source: str) -> dict[str, Tensor]:
    """An image's tensors: GPT-2's with our names and orientation, the vocabulary padded. Whether they fit is not seen.

    Raises ValueError where the head is not tied to the token table, or the table has another size.
    """
    named = {name.removeprefix("transformer."): t for name, t in tensors.items() if not name.endswith(_MASKS)}
    table, head = named.get("wte.weight"), named.pop("lm_head.weight", None)
    if table is not None:
        if head is not None and not torch.equal(head, table):
            raise ValueError(f"{source}: lm_head.weight differs from wte.weight; only a tied head can be imported")
        if len(table) != config.vocab_size:
            raise ValueError(f"{source}: wte.weight has {len(table)} rows, but vocab_size={config.vocab_size}")
        named["wte.weight"] = F.pad(table, (0, 0, 0, config.padded_vocab_size - config.vocab_size))
    return {f"model.transformer.{name}": t.mT if name.endswith(_TRANSPOSED) else t for name, t in named.items()}


def read_config(home: str, tensors: dict[str, Tensor]) -> GPTConfig:
    """The shape that config.json in `home` tells or, without one, that of the GPT-2 whose sizes the tensors have.

    Raises ValueError, by name, for another architecture, or for a setting that changes what is computed.
    """
    where = _join(home, "config.json")
    if not _exists(where):
        sizes = {name.removeprefix("transformer."): tensor.size(0) for name, tensor in tensors.items() if tensor.dim()}
        found = {"n_layer": sum(name.endswith(".ln_1.weight") for name in sizes), "n_embd": sizes.get("ln_f.weight")}
        for name, shape in PRESETS.items():
            if name.startswith("gpt2") and found.items() <= shape.items():
                return GPTConfig(sizes.get("wte.weight", 0), sizes.get("wpe.weight", 0), **shape)  # type: ignore[arg-type]
        raise ValueError(f"{where} is missing, and the weights have none of GPT-2's four sizes; put it there")
    theirs = _read_json(where)
    if theirs.get("model_type") != "gpt2":
        raise ValueError(f"{where}: model_type={theirs.get('model_type')!r}; only 'gpt2' can be imported")
    n_inner = theirs.get("n_inner")
    for key, allowed in _ARITHMETIC.items():
        if theirs.get(key, allowed[0]) not in allowed:
            raise ValueError(f"{where}: {key}={theirs[key]!r}; mingpt computes with {allowed[0]!r} only")
    numbers: dict[str, Any] = {ours: theirs.get(name, _GPT2_DEFAULTS[name]) for name, ours in _SHAPE.items()}
    for name, number in {**numbers, **({} if n_inner is None else {"n_inner": n_inner})}.items():
        if type(number) is not int:
            raise ValueError(f"{where}: {name}={number!r} is no whole number")
    if n_inner not in (None, 4 * numbers["n_embd"]):
        raise ValueError(f"{where}: n_inner={n_inner}; mingpt has 4 * n_embd = {4 * numbers['n_embd']} only")
    if theirs.get("tie_word_embeddings") is False and "lm_head.weight" not in tensors:
        raise ValueError(f"{where}: tie_word_embeddings=False; only a head tied to wte.weight can be imported")
    try:
        return GPTConfig(**numbers, dropout=theirs.get("resid_pdrop", 0.1))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error


# Tokenizers


def read_tokenizer(home: str, vocab_size: int) -> Tokenizer:
    """The tokenizer whose files are in `home`; without any GPT-2's own, if the model has as many tokens.

    Raises ValueError where it is not one that ours can be.
    """
    where, merges_file = _join(home, "vocab.json"), _join(home, "merges.txt")
    if _exists(where) and _exists(merges_file):
        lines = storage.read_bytes(merges_file).decode("utf-8", "replace").splitlines()
        merges = [line for line in lines if line.strip() and not line.startswith("#version")]
        tokenizer: Tokenizer = _bpe(_read_json(where), merges, where)
    elif _exists(where := _join(home, "tokenizer.json")):
        match _read_json(where):
            case {"normalizer": None, "pre_tokenizer": {"type": "ByteLevel"}, "model": {"type": "BPE", **model}}:
                tokenizer = _bpe(model.get("vocab"), model.get("merges"), where)
            case {"normalizer": None, "model": {"type": "WordLevel", "vocab": dict(vocab)}}:
                tokenizer = CharTokenizer("".join(vocab))
                if vocab != {char: i for i, char in enumerate(tokenizer.chars)}:
                    raise ValueError(f"{where}: its ids are not characters in their order")
            case _:
                raise ValueError(f"{where} is not GPT-2's kind of tokenizer (byte pair encoding of bytes)")
    elif vocab_size < _GPT2_DEFAULTS["vocab_size"]:
        raise ValueError(
            f"{home} has no vocab.json and merges.txt, and vocab_size={vocab_size} is not GPT-2's; add them"
        )
    else:
        return BPETokenizer.gpt2()
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(f"{where} has {tokenizer.vocab_size} tokens, but the model vocab_size={vocab_size}")
    return tokenizer


def _bpe(vocab: Any, merges: Any, where: str) -> BPETokenizer:
    """Of a vocabulary and its merges ("a b" or ["a", "b"]), written in the characters that stand for bytes."""
    try:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
        texts: list[str] = sorted(vocab, key=vocab.__getitem__)
        # Ours merge in the order of the ids: that must be what the merges say.
        ordered = [*texts[:256], *("".join(pair) for pair in pairs), END_OF_TEXT]
        if texts != ordered or [vocab[text] for text in texts] != list(range(len(texts))):
            raise ValueError(f"{where}: its ids are not those of the bytes, the merges in order, then {END_OF_TEXT}")
        tokens = tuple(bytes(map(_BYTES.__getitem__, text)) for text in texts[:-1])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: its vocabulary cannot be read ({brief(error)})") from error
    tokenizer = BPETokenizer("gpt2", tokens)
    return tokenizer if tokenizer.fingerprint == GPT2_FINGERPRINT else BPETokenizer("bpe", tokens)


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, Any]:
    """The files, by name, from which transformers makes the same tokenizer."""
    if isinstance(tokenizer, CharTokenizer):
        model = {"type": "WordLevel", "vocab": {char: i for i, char in enumerate(tokenizer.chars)}, "unk_token": ""}
        split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
        whole: dict[str, Any] = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": split,
                 "post_processor": None, "decoder": {"type": "Fuse"}, "model": model}  # fmt: skip
        return {"tokenizer.json": whole, "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"}}
    texts = ["".join(map(_CHARS.__getitem__, token)) for token in tokenizer.tokens]
    merges = [" ".join("".join(map(_CHARS.__getitem__, half)) for half in pair) for pair in _merges(tokenizer.tokens)]
    return {
        "vocab.json": {text: i for i, text in enumerate([*texts, END_OF_TEXT])},
        "merges.txt": "\n".join(["#version: 0.2", *merges, ""]),
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False},
    }


def _merges(tokens: Sequence[bytes]) -> Iterator[list[bytes]]:
    """The pair that each token of more than one byte was merged from: what the merges before it leave of its bytes."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    for rank, token in enumerate(tokens):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            best, i = min((ranks.get(a + b, rank), i) for i, (a, b) in enumerate(pairwise(parts)))
            if best >= rank:
                raise ValueError(f"the token {token!r} is not made of two earlier ones; such a tokenizer has no merges")
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            yield parts


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in GPT-2's files; those that are none start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(0x100) if byte not in printable)
    replaced = {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return [replaced.get(byte, chr(byte)) for byte in range(0x100)]


_CHARS = _byte_characters()
_BYTES = {char: byte for byte, char in enumerate(_CHARS)}


# Files


def _join(home: str, name: str) -> str:
    return f"{home.rstrip('/')}/{name}"


def _exists(uri: str) -> bool:
    try:
        storage.open_read(uri).close()
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False


def _read_json(uri: str) -> dict[str, Any]:
    try:
        content = json.loads(storage.read_bytes(uri))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{uri} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{uri} is no JSON object")
    return content


def _mapped(uri: str) -> Tensor:
    """The bytes of a file (uint8), mapped; what is remote is copied to a temporary file, which the mapping keeps."""
    with tempfile.NamedTemporaryFile() as copy:
        path = storage.local_path(uri)
        if storage.is_remote(uri):
            path = Path(copy.name)
            with storage.open_read(uri) as file:
                shutil.copyfileobj(file, copy, 1 << 20)
            copy.flush()
        size = path.stat().st_size
        return torch.from_file(str(path), size=size, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


if __name__ == "__main__":
    sys.exit(main())
