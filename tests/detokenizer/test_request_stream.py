"""One request from ids to text: ends, trimming, counting, duplicates, and starting again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.detokenizer.request_stream import MissingTokens, RequestStream
from services.detokenizer.vocabulary import Vocabulary
from shared import ints
from shared.messages.stream import Finish, FinishReason, Scores, StreamOpen, TextChunk, TokenChunk

LENGTH = Finish(FinishReason.LENGTH)


def opening(**fields: object) -> StreamOpen:
    return StreamOpen("r", "f/1", **fields)  # type: ignore[arg-type]


def encode(vocabulary: Vocabulary, text: str) -> list[int]:
    return vocabulary.tokenizer.encode(text, add_special_tokens=False).ids


def chunk(offset: int, ids: list[int], finish: Finish | None = None, **fields: object) -> TokenChunk:
    return TokenChunk("r", offset, ints.pack(ids), finish, **fields)  # type: ignore[arg-type]


def feed(stream: RequestStream, ids: list[int], sizes: list[int], finish: Finish | None = LENGTH) -> list[TextChunk]:
    """Feed in pieces of these sizes until the stream ends."""
    out: list[TextChunk] = []
    offset = 0
    sizes = [*sizes, len(ids)]
    while offset < len(ids) or not out:
        size = min(sizes.pop(0) or 1, len(ids) - offset)
        last = offset + size == len(ids)
        text = stream.feed(chunk(offset, ids[offset : offset + size], finish if last else None))
        assert text is not None
        out.append(text)
        offset += size
        if text.finish is not None:
            break
    return out


def test_text_ids_and_counts_add_up(byte_level: Vocabulary) -> None:
    ids = encode(byte_level, "hello 你")
    out = feed(RequestStream(opening(), byte_level), ids, [1] * 50)
    assert "".join(c.text for c in out) == "hello 你"
    assert b"".join(c.token_ids for c in out) == ints.pack(ids)
    assert [c.offset for c in out] == list(range(len(ids)))
    assert out[-1].num_output_tokens == len(ids)
    assert out[-1].finish == LENGTH


def test_a_stop_string_ends_the_stream_in_the_middle_of_a_chunk(byte_level: Vocabulary) -> None:
    ids = encode(byte_level, "alpha beta gamma")
    end = len("alpha beta")
    stream = RequestStream(opening(stop_strings=("beta",)), byte_level)
    scores = Scores(len(ids), ints.pack(range(len(ids))), ints.pack(range(2 * len(ids))))
    out = stream.feed(chunk(0, ids, scores=scores, cached_tokens=7, retractions=2))
    assert out is not None
    assert out.text == "alpha "
    assert out.finish == Finish(FinishReason.STOP, matched_string="beta")
    assert out.token_ids == ints.pack(ids[:end])
    assert out.num_output_tokens == end
    assert out.scores == Scores(end, ints.pack(range(end)), ints.pack(range(2 * end)))
    assert (out.cached_tokens, out.retractions) == (7, 2)


def test_no_stop_trim_keeps_the_stop(byte_level: Vocabulary) -> None:
    ids = encode(byte_level, "alpha beta gamma")
    out = feed(RequestStream(opening(stop_strings=("beta",), no_stop_trim=True), byte_level), ids, [3, 4])
    assert "".join(c.text for c in out) == "alpha beta"


@pytest.mark.parametrize(
    ("trim", "skip", "expected"), [(True, True, "hi"), (False, True, "hi"), (False, False, "hi<|end|>")]
)
def test_a_stop_token_is_trimmed_and_special_tokens_are_skipped(
    byte_level: Vocabulary, trim: bool, skip: bool, expected: str
) -> None:
    ids = [*encode(byte_level, "hi"), 0]
    stream = RequestStream(opening(no_stop_trim=not trim, skip_special_tokens=skip), byte_level)
    out = feed(stream, ids, [1, 1, 1], Finish(FinishReason.STOP, matched_token=0))
    assert "".join(c.text for c in out) == expected
    assert out[-1].num_output_tokens == 3
    assert out[-1].token_ids == ints.pack([0])


def test_an_ordinary_stop_token_gives_no_text_unless_kept(byte_level: Vocabulary) -> None:
    ids = encode(byte_level, "ab")
    finish = Finish(FinishReason.STOP, matched_token=ids[-1])
    assert "".join(c.text for c in feed(RequestStream(opening(), byte_level), ids, [1], finish)) == "a"
    kept = feed(RequestStream(opening(no_stop_trim=True), byte_level), ids, [1], finish)
    assert "".join(c.text for c in kept) == "ab"


def test_held_back_text_is_shown_at_the_end(byte_level: Vocabulary) -> None:
    ids = encode(byte_level, "abc")
    stream = RequestStream(opening(stop_strings=("bcd",)), byte_level)
    first = stream.feed(chunk(0, ids))
    assert first is not None
    assert first.text == "a"
    last = stream.feed(chunk(3, [], Finish(FinishReason.ABORT, message="gone")))
    assert last is not None
    assert (last.text, last.num_output_tokens) == ("bc", 3)


def test_duplicates_are_dropped_and_gaps_are_errors(byte_level: Vocabulary) -> None:
    ids = encode(byte_level, "abcdef")
    stream = RequestStream(opening(), byte_level)
    stream.feed(chunk(0, ids[:3]))
    assert stream.feed(chunk(0, ids[:2])) is None
    overlap = stream.feed(chunk(1, ids[1:5], scores=Scores(4, ints.pack([1, 2, 3, 4]))))
    assert overlap is not None
    assert (overlap.text, overlap.offset, overlap.scores) == ("de", 3, Scores(2, ints.pack([3, 4])))
    with pytest.raises(MissingTokens):
        stream.feed(chunk(6, ids[:1]))
    final = stream.feed(chunk(2, ids[2:4], LENGTH))
    assert final is not None
    assert (final.text, final.finish, final.num_output_tokens) == ("", LENGTH, 5)


def test_prefill_only_ends_with_an_empty_chunk(byte_level: Vocabulary) -> None:
    out = RequestStream(opening(), byte_level).feed(chunk(0, [], LENGTH, prompt_scores=Scores(2)))
    assert out == TextChunk("r", 0, b"", "", LENGTH, prompt_scores=Scores(2))


random_ids = st.lists(st.integers(0, 290), max_size=40)
random_stops = st.lists(st.sampled_from(["he", "hello", "lo", "a", "你", "<tool>", "zz"]), max_size=3).map(tuple)


@given(random_ids, random_stops, st.lists(st.integers(1, 5), max_size=40), st.booleans(), st.integers(0, 40))
def test_the_result_depends_on_the_ids_alone(
    byte_level: Vocabulary, ids: list[int], stops: tuple[str, ...], sizes: list[int], keep: bool, lost_at: int
) -> None:
    """In one piece, in any pieces, and reopened in between: same text, same end, and no character taken back."""
    fields = {"stop_strings": stops, "no_stop_trim": keep}
    whole = feed(RequestStream(opening(**fields), byte_level), ids, [len(ids)])[-1]
    parts = feed(RequestStream(opening(**fields), byte_level), ids, list(sizes))
    assert "".join(c.text for c in parts) == whole.text
    assert b"".join(c.token_ids for c in parts) == whole.token_ids
    assert (parts[-1].finish, parts[-1].num_output_tokens) == (whole.finish, whole.num_output_tokens)

    have = ids[:lost_at]
    shown = "".join(c.text for c in parts if c.offset + ints.count(c.token_ids) <= len(have))
    again = RequestStream(opening(output_ids=ints.pack(have), **fields), byte_level)
    first = again.reopen(opening(output_ids=ints.pack(have), **fields))
    assert first.reopened
    assert first.offset == 0
    text = first.text
    if first.finish is None:
        rest = again.feed(chunk(len(have), ids[len(have) :], LENGTH))
        assert rest is not None
        text += rest.text
        assert (rest.finish, rest.num_output_tokens) == (whole.finish, whole.num_output_tokens)
    assert text == whole.text
    assert text.startswith(shown)


def test_reopening_a_finished_request_tells_its_end(byte_level: Vocabulary) -> None:
    ids = [*encode(byte_level, "hi"), 0]
    finish = Finish(FinishReason.STOP, matched_token=0)
    message = opening(output_ids=ints.pack(ids), finish=finish, cached_tokens=5, scores=Scores(3, ints.pack([1, 2, 3])))
    out = RequestStream(message, byte_level).reopen(message)
    assert out == TextChunk(
        "r", 0, ints.pack(ids), "hi", finish, 3, 5, Scores(3, ints.pack([1, 2, 3])), None, 0, reopened=True
    )
