"""Text to ids and back; a tokenizer can be written down whole, so that a snapshot needs no file beside it."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

_NAMED = 10  # unknown characters told one by one in an error


@dataclass(frozen=True)
class CharTokenizer:
    """One id per character: the position of the character in `chars`, which are sorted by code point.

    Raises ValueError if `chars` is empty, unsorted, names a character twice, or holds half of a surrogate pair, which
    is no character and which JSON would join to its neighbour.
    """

    chars: str
    kind: ClassVar[str] = "char"

    def __post_init__(self) -> None:
        halves = any("\ud800" <= char <= "\udfff" for char in self.chars)
        if halves or not self.chars or self.chars != "".join(sorted(set(self.chars))):
            raise ValueError(
                f"tokenizer.chars={self.chars[:40]!r}: expected at least one character, sorted, each once, and no half "
                "of a surrogate pair; make it with CharTokenizer.from_text"
            )

    @classmethod
    def from_text(cls, chunks: Iterable[str]) -> "CharTokenizer":
        """The vocabulary of a text that may come in pieces; about 1 MB of memory for a text of any size."""
        seen = np.zeros(0x110000, dtype=bool)
        for chunk in chunks:
            seen[_code_points(chunk)] = True
        return cls(_text(np.flatnonzero(seen)))

    @property
    def vocab_size(self) -> int:
        return len(self.chars)

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The narrowest type that holds every id: uint16 or uint32, little-endian on any machine."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of `to_dict()` as JSON."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode("ascii")).hexdigest()

    @cached_property
    def _codes(self) -> NDArray[np.uint32]:
        return _code_points(self.chars)

    @cached_property
    def _ids(self) -> NDArray[np.uint32]:
        """The id of each code point up to one beyond the last known one; `vocab_size` for those that have none."""
        ids = np.full(int(self._codes[-1]) + 2, self.vocab_size, dtype=np.uint32)
        ids[self._codes] = np.arange(self.vocab_size, dtype=np.uint32)
        return ids

    def encode(self, text: str) -> NDArray[np.unsignedinteger]:
        """The ids of `text`, shape (len(text),), type `dtype`.

        Raises ValueError that names each character without an id, where it first stands, and what to do.
        """
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

    def to_dict(self) -> dict[str, Any]:
        """What `tokenizer_from_dict` needs, as plain JSON."""
        return {"kind": self.kind, "chars": self.chars}


Tokenizer = CharTokenizer


def tokenizer_from_dict(description: dict[str, Any]) -> Tokenizer:
    """The tokenizer whose `to_dict()` this is. Raises ValueError for another kind or a missing part."""
    match description:
        case {"kind": "char", "chars": str(chars)}:
            return CharTokenizer(chars)
    kind = description.get("kind")
    raise ValueError(f"tokenizer.kind={kind!r} is not known or lacks a part; this version reads 'char' with chars")


def _code_points(text: str) -> NDArray[np.uint32]:
    # "surrogatepass": half a pair (a broken prompt) must reach the error that names it, not a codec's.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _text(codes: NDArray[Any]) -> str:
    return codes.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")
