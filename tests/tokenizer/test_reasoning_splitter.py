"""Reasoning and speech: any pieces give the same split; the count of tokens is exact where the end is one token."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.reasoning.splitter import Splitter
from services.tokenizer.reasoning.styles import STYLES, Style
from services.tokenizer.tools.pieces import Parsed
from services.tokenizer.tools.reader import AnswerReader, Reading

WORDS = ["<think>", "</think>", "<th", "</", ">", "a", " ", "\n", "\n\n", "Four.", "<"]


def split(pieces: list[str], *, opened: bool = False, style: Style = STYLES["qwen3"]) -> tuple[str, str]:
    thoughts: list[str] = []
    speech: list[str] = []
    splitter = Splitter(style, opened, -1, thoughts.append, speech.append)
    for piece in pieces:
        splitter.feed(piece)
    splitter.finish()
    return "".join(thoughts), "".join(speech)


@settings(max_examples=150, deadline=None)
@given(
    words=st.lists(st.sampled_from(WORDS), max_size=12),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    opened=st.booleans(),
)
def test_any_pieces_give_the_same_split(words: list[str], cuts: list[int], opened: bool) -> None:
    text = "".join(words)
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    whole = split([text], opened=opened)
    assert split([text[a:b] for a, b in itertools.pairwise(edges)], opened=opened) == whole
    assert split(list(text), opened=opened) == whole


@pytest.mark.parametrize("opened", [False, True])
def test_all_short_texts_split_alike_in_pieces(opened: bool) -> None:
    for words in itertools.product([" ", "<th", "<", "a", "</", "ink>"], repeat=4):
        text = "".join(words)
        assert split(list(text), opened=opened) == split(list(words), opened=opened) == split([text], opened=opened)


@pytest.mark.parametrize(
    ("text", "opened", "thought", "speech"),
    [
        ("<think>\n2 + 2\n</think>\n\nFour.", False, "2 + 2", "Four."),
        ("2 + 2\n</think>\n\nFour.", True, "2 + 2", "Four."),
        ("<think>2 + 2</think>Four.", True, "2 + 2", "Four."),
        ("Four.", False, "", "Four."),
        ("Four. <think>no</think>", False, "", "Four. <think>no</think>"),
        ("still at it", True, "still at it", ""),
        ("<think>\n\n</think>\n\nFour.", False, "", "Four."),
        (" \nFour.", False, "", " \nFour."),
    ],
)
def test_texts(text: str, opened: bool, thought: str, speech: str) -> None:
    assert split([text], opened=opened) == (thought, speech)


def read(reader: AnswerReader, *pieces: tuple[str, list[int]]) -> Parsed:
    parsed = Parsed(calls=[])
    for text, ids in pieces:
        for piece in reader.feed(text, ids):
            parsed.add(piece)
    for piece in reader.finish():
        parsed.add(piece)
    return parsed


def test_tokens_are_counted_to_the_end_mark() -> None:
    reader = Reading(style=STYLES["qwen3"], end_id=9).open()
    parsed = read(reader, ("<think>", [8]), ("a", [1]), ("b</think>Fo", [2, 9, 3]), ("ur.", [4]))
    assert (parsed.thought, parsed.text, reader.reasoning_tokens) == ("ab", "Four.", 4)
    reader = Reading(style=STYLES["qwen3"], end_id=9).open()
    read(reader, ("Four", [1, 2]), (".", [3]))
    assert reader.reasoning_tokens == 0


def test_reasoning_may_stay_in_the_text() -> None:
    reader = Reading(style=STYLES["qwen3"], opened=True, separate=False).open()
    parsed = read(reader, ("hm\n</think>\n\nFour.", [1]))
    assert (parsed.thought, parsed.text) == ("", "<think>\nhm\n</think>\n\nFour.")


def test_reasoning_may_come_at_once() -> None:
    reader = Reading(style=STYLES["qwen3"], opened=True, stream_thoughts=False).open()
    assert reader.feed("one ") == []
    assert reader.feed("two") == []
    [thought, *_] = reader.feed("</think>x")
    assert thought.text == "one two"  # type: ignore[union-attr]
