"""Deltas joined are the decoded whole, byte for byte, for any ids in any pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.detokenizer.incremental import STALL_TOKENS, ByteDecoder, WindowDecoder, make_decoder
from services.detokenizer.vocabulary import Vocabulary, load

REPLACEMENT = "\ufffd"
TEXTS = [
    "Hello, world!",
    "你好,世界。龜",
    "👨‍👩‍👧‍👦 🇩🇪 🫠",
    "한국어 العربية עברית",
    "𝒜𝓁𝑔𝑒𝒷𝓇𝒶 e\u0301",
    "a\tb\n\n  c\r\n",
    "\ufffd is a character, too",
]


def pieces(ids: list[int], cuts: list[int]) -> list[list[int]]:
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(borders)]


def decode(vocabulary: Vocabulary, ids: list[int], skip: bool = True, tail: tuple[int, ...] = ()) -> list[str]:
    decoder = make_decoder(vocabulary, tail, skip)
    return [decoder.push([i]) for i in ids]


@given(st.lists(st.integers(-1, 300), max_size=60), st.lists(st.integers(0, 60), max_size=8), st.booleans())
def test_deltas_join_to_the_whole(byte_level: Vocabulary, ids: list[int], cuts: list[int], skip: bool) -> None:
    table = byte_level.visible if skip else byte_level.pieces
    raw = b"".join(table[i] for i in ids if 0 <= i < len(table))
    decoder = make_decoder(byte_level, (), skip)
    deltas = [decoder.push(piece) for piece in pieces(ids, cuts)]
    assert "".join(deltas) == raw.decode("utf-8", "ignore")


@given(st.lists(st.integers(0, 290), max_size=60), st.booleans())
def test_table_agrees_with_the_tokenizer(byte_level: Vocabulary, ids: list[int], skip: bool) -> None:
    whole = byte_level.tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(decode(byte_level, ids, skip)) == whole.replace(REPLACEMENT, "")


@given(st.lists(st.integers(0, 290), max_size=40))
def test_no_delta_holds_a_replacement_character(byte_level: Vocabulary, ids: list[int]) -> None:
    assert not any(REPLACEMENT in delta for delta in decode(byte_level, ids))


@pytest.mark.parametrize("text", TEXTS)
def test_every_script_byte_by_byte(byte_level: Vocabulary, sentence_piece: Vocabulary, text: str) -> None:
    ids = byte_level.tokenizer.encode(text).ids
    assert "".join(decode(byte_level, ids)) == text
    bytes_as_tokens = [3 + byte for byte in text.encode()]
    assert "".join(decode(sentence_piece, bytes_as_tokens)) == text


@given(st.text(max_size=30))
def test_any_text_survives(byte_level: Vocabulary, text: str) -> None:
    assert "".join(decode(byte_level, byte_level.tokenizer.encode(text, add_special_tokens=False).ids, False)) == text


def test_an_unfinished_character_is_dropped_and_never_shown_in_half(byte_level: Vocabulary) -> None:
    ids = byte_level.tokenizer.encode("a🫠").ids
    assert "".join(decode(byte_level, ids[:-1])) == "a"


def test_a_character_that_begins_in_the_prompt_is_completed(byte_level: Vocabulary) -> None:
    ids = byte_level.tokenizer.encode("a🫠b").ids
    assert decode(byte_level, ids[3:], tail=tuple(ids[:3])) == ["", "🫠", "b"]


def test_special_tokens_are_shown_or_skipped_as_asked(byte_level: Vocabulary) -> None:
    ids = [0, *byte_level.tokenizer.encode("<tool>hi").ids, 0]
    assert "".join(decode(byte_level, ids, skip=True)) == "<tool>hi"
    assert "".join(decode(byte_level, ids, skip=False)) == "<|end|><tool>hi<|end|>"


def test_the_first_blank_goes_only_at_the_start_of_a_text(sentence_piece: Vocabulary) -> None:
    hello, world = (sentence_piece.tokenizer.token_to_id(t) for t in ("▁Hello", "▁world"))
    assert "".join(decode(sentence_piece, [hello, world])) == "Hello world"
    assert "".join(decode(sentence_piece, [world], tail=(hello,))) == " world"
    assert "".join(decode(sentence_piece, [1, hello, world])) == "Hello world"  # <s> gives no text


@given(st.lists(st.sampled_from([1, 2, 259, 260, 261, 262, 263, 264, 265, 3 + 0xE4, 3 + 0xBD, 3 + 0xA0]), max_size=30))
def test_sentence_piece_agrees_with_the_tokenizer_where_bytes_are_whole(
    sentence_piece: Vocabulary, ids: list[int]
) -> None:
    assert sentence_piece.pieces
    whole = sentence_piece.tokenizer.decode(ids, skip_special_tokens=True)
    if REPLACEMENT not in whole:
        assert "".join(decode(sentence_piece, ids)) == whole


@given(st.lists(st.integers(0, 8), max_size=40), st.lists(st.integers(1, 8), max_size=8))
def test_neighbours_matter_for_other_decoders(word_piece: Vocabulary, ids: list[int], tail: list[int]) -> None:
    assert not word_piece.pieces
    before = word_piece.tokenizer.decode(tail, skip_special_tokens=True)
    whole = word_piece.tokenizer.decode(tail + ids, skip_special_tokens=True)
    assert before + "".join(decode(word_piece, ids, tail=tuple(tail))) == whole


@given(st.lists(st.integers(0, 290), max_size=60))
def test_the_window_needs_no_table(byte_level: Vocabulary, ids: list[int]) -> None:
    """The general method on a vocabulary where the exact answer is known: valid text is never lost."""
    decoder = WindowDecoder(byte_level, (), True)
    text = "".join(decoder.push([i]) for i in ids)
    whole = byte_level.tokenizer.decode(ids, skip_special_tokens=True)
    assert REPLACEMENT not in text
    if REPLACEMENT not in whole:
        assert text == whole


def test_hostile_bytes_do_not_make_the_window_grow(byte_level: Vocabulary) -> None:
    lead = byte_level.tokenizer.token_to_id("ä")
    decoder = WindowDecoder(byte_level, (), True)
    assert decoder.push([lead] * 500) == ""
    assert len(decoder._window) <= STALL_TOKENS * 2
    assert decoder.push(byte_level.tokenizer.encode("hello").ids).endswith("hello")


def test_load_names_what_is_missing(tmp_path: object) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load(str(tmp_path))


def test_tables_are_used_for_the_usual_tokenizers(byte_level: Vocabulary, word_piece: Vocabulary) -> None:
    assert isinstance(make_decoder(byte_level, (), True), ByteDecoder)
    assert isinstance(make_decoder(word_piece, (), True), WindowDecoder)
    assert isinstance(byte_level.tokenizer, Tokenizer)
