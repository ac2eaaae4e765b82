"""Characters to ids and back, what cannot be encoded, and the tokenizer as plain JSON."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mingpt.tokenizer import CharTokenizer, tokenizer_from_dict

examples = settings(deadline=None, max_examples=60)  # a busy machine is no failure
any_text = st.text(min_size=1)  # beyond 16 bits too


@examples
@given(st.lists(any_text, min_size=1))
def test_a_text_comes_back_from_its_ids(chunks: list[str]) -> None:
    text = "".join(chunks)
    tokenizer = CharTokenizer.from_text(chunks)
    assert tokenizer.chars == "".join(sorted(set(text)))
    assert tokenizer.encode(text).tolist() == [tokenizer.chars.index(char) for char in text]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@examples
@given(any_text)
def test_a_tokenizer_comes_back_from_json_and_pickle(text: str) -> None:
    tokenizer = CharTokenizer.from_text([text])
    assert tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict()))) == tokenizer
    assert pickle.loads(pickle.dumps(tokenizer)) == tokenizer


def test_the_fingerprint_is_that_of_the_vocabulary() -> None:
    golden = "14104a2b3d473aa9c6bcb562f48c020bd7bae98f51081ab87543ace0bb26c3e9"
    assert CharTokenizer("\nabc").fingerprint == golden
    assert CharTokenizer("\nabd").fingerprint != CharTokenizer("\nabc").fingerprint


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_ids_take_two_bytes_as_long_as_they_fit(vocab_size: int, dtype: type) -> None:
    tokenizer = CharTokenizer("".join(map(chr, range(0x10000, 0x10000 + vocab_size))))
    ids = tokenizer.encode(tokenizer.chars)
    assert ids.dtype == tokenizer.dtype == dtype
    assert ids.tolist() == list(range(vocab_size))


def test_unknown_characters_are_named_once_with_their_first_place() -> None:
    with pytest.raises(ValueError, match="not in the vocabulary") as error:
        CharTokenizer("abc").encode("ab?c日?\n")
    assert str(error.value) == (
        "not in the vocabulary of 3 characters: '?' at position 2, '日' at position 4, '\\n' at position 6; "
        "leave out or replace them, or train on a text that has them"
    )


def test_many_unknown_characters_make_no_long_line() -> None:
    with pytest.raises(ValueError, match=r"'l' at position 11 and 14 more; "):
        CharTokenizer("ab").encode("abcdefghijklmnopqrstuvwxyz")


@pytest.mark.parametrize("char", ["\x00", "a", "c", "\ud800", "😀"])
def test_a_character_beside_the_known_ones_is_unknown(char: str) -> None:
    with pytest.raises(ValueError, match="at position 0"):
        CharTokenizer("b").encode(char)


def test_ids_without_a_character_become_a_mark() -> None:
    assert CharTokenizer("ab").decode([0, 2, 63, -1, -3, 1]) == "a����b"
    assert CharTokenizer("ab").decode([]) == ""


@pytest.mark.parametrize("chars", ["", "ba", "aab", "a\ud800"])
def test_a_vocabulary_is_sorted_and_says_nothing_twice(chars: str) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.chars="):
        CharTokenizer(chars)


@pytest.mark.parametrize("description", [{}, {"kind": "char"}, {"kind": "words", "chars": "ab"}])
def test_another_kind_is_refused(description: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.kind="):
        tokenizer_from_dict(description)
