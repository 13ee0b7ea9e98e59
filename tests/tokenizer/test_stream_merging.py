"""Streams: whatever is repeated, merged or reopened, the reader sees every token and every character once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.errors import ApiError, unavailable
from services.tokenizer.output import Output
from services.tokenizer.streams import Group, Stream, StreamTable
from shared import ints
from shared.messages.request import GenerateRequest, SamplingParams
from shared.messages.stream import Finish, FinishReason, TextChunk
from tests.tokenizer.fake_backend import scores_of

LETTERS = "abcdefghij"


def make_group(*request_ids: str, names: tuple[str, ...] = (), **sampling: Any) -> Group:
    group = Group()
    for request_id in request_ids:
        group.add(GenerateRequest(request_id, "f", ints.pack([1]), SamplingParams(**sampling)), names)
    return group


def chunk(first: int, last: int, lag: int = 0, **fields: Any) -> TextChunk:
    """Tokens first..last-1; token i is the letter i, and the text lags `lag` letters behind."""
    text = "".join(LETTERS[i] for i in range(max(first - lag, 0), max(last - lag, 0)))
    scores = scores_of([(-float(i), []) for i in range(first, last)])
    values = {"text": text, "scores": scores, "num_output_tokens": last, **fields}
    return TextChunk("r", first, ints.pack(range(first, last)), **values)


def drain(stream: Stream) -> Output:
    return stream.take() or Output()


@settings(max_examples=300, deadline=None)
@given(data=st.data(), lag=st.integers(0, 2))
def test_every_token_once(data: st.DataObject, lag: int) -> None:
    """Chunks, repeats of old ones, and reopenings with more than we have, in any mixture."""
    [stream] = make_group("r", logprobs=0).streams
    have = 0
    seen = Output()
    for _ in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(["next", "repeat", "reopen", "take"]))
        if kind == "take":
            seen.join(drain(stream))
        elif kind == "next" and have < len(LETTERS):
            last = data.draw(st.integers(have + 1, len(LETTERS)))
            stream.accept(chunk(have, last, lag))
            have = last
        elif kind == "repeat" and have:
            first = data.draw(st.integers(0, have - 1))
            stream.accept(chunk(first, data.draw(st.integers(first + 1, have)), lag))
        elif kind == "reopen":
            last = data.draw(st.integers(have, len(LETTERS)))
            stream.accept(chunk(0, last, lag, reopened=True))
            have = last
    stream.accept(TextChunk("r", have, b"", LETTERS[max(have - lag, 0) : have], Finish(FinishReason.STOP), have))
    seen.join(drain(stream))
    assert seen.token_ids.tolist() == list(range(have))
    assert seen.text == LETTERS[:have]
    assert seen.scores.logprobs.tolist() == [-float(i) for i in range(have)]
    assert seen.num_output_tokens == have
    assert seen.finish is not None
    assert ints.unpack(stream.resumed(2).output_ids).tolist() == list(range(have))


def test_a_gap_ends_the_stream() -> None:
    [stream] = make_group("r").streams
    stream.accept(chunk(0, 2))
    stream.accept(chunk(3, 4))
    assert stream.done
    assert stream.error is not None
    assert stream.error.status == 500
    assert drain(stream).token_ids.tolist() == [0, 1]


def test_nothing_after_the_end() -> None:
    [stream] = make_group("r").streams
    stream.accept(chunk(0, 2, finish=Finish(FinishReason.LENGTH)))
    stream.accept(chunk(2, 4))
    stream.fail(unavailable("late"))
    assert stream.error is None
    assert drain(stream).token_ids.tolist() == [0, 1]


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    [stream] = make_group("r").streams
    stream.accept(chunk(0, 1))  # a forced token that came before the admission
    stream.accept(chunk(1, 2, cached_tokens=4))
    stream.resumed(2)  # a new scheduler admits prompt and output
    stream.accept(chunk(2, 3, cached_tokens=90))
    assert drain(stream).cached_tokens == 4


@pytest.mark.parametrize(("reason", "status"), [(FinishReason.ERROR, 0), (FinishReason.ABORT, 503)])
def test_failures_of_the_scheduler(reason: FinishReason, status: int) -> None:
    [stream] = make_group("r").streams
    stream.accept(chunk(0, 1, finish=Finish(reason, message="why", status=status)))
    assert stream.error is not None
    assert (stream.error.status, stream.error.message) == (status or 500, "why")


async def test_a_group_wakes_its_reader_once_per_turn() -> None:
    group = make_group("r", "s")
    for position in range(3):
        group.streams[0].accept(chunk(position, position + 1))
    await group.wait()
    assert list(group.take_ready()) == [group.streams[0]]
    assert drain(group.streams[0]).text == "abc"
    assert not group.has_news


def test_names_are_taken_once() -> None:
    table = StreamTable()
    first = make_group("a.1", "a.2", names=("a", "cmpl-a"))
    table.add(first)
    for clash in (make_group("a"), make_group("b", names=("cmpl-a",)), make_group("a.2")):
        with pytest.raises(ApiError) as caught:
            table.add(clash)
        assert caught.value.code == "duplicate_id"
        assert table.discard(clash) == []
    assert table.discard(first) == first.streams
    assert table.discard(first) == []
    assert len(table) == 0
    table.add(make_group("c", names=("a", "cmpl-a")))
