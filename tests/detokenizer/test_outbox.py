"""Text that cannot leave is merged, in order, and leaves as soon as it can."""

from __future__ import annotations

import pytest

from services.detokenizer import scores
from services.detokenizer.outbox import FLUSH_TOKENS, FORGET_S, Outbox, merge
from shared import ints
from shared.clock import ManualClock
from shared.messages.stream import Finish, FinishReason, Scores, TextChunk, TextChunks
from shared.transport import PeerBusy, PeerGone

DONE = Finish(FinishReason.LENGTH)


class Wire:
    """Takes messages, or refuses them as told."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, TextChunks]] = []
        self.refuse: dict[bytes, type[Exception]] = {}

    def send(self, frontend: bytes, message: TextChunks) -> None:
        if frontend in self.refuse:
            raise self.refuse[frontend]
        self.sent.append((frontend, message))

    def chunks(self, frontend: bytes = b"f") -> list[TextChunk]:
        return [chunk for name, message in self.sent if name == frontend for chunk in message.chunks]


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def outbox(wire: Wire, clock: ManualClock) -> Outbox:
    return Outbox(wire.send, clock)


def text(request: str, offset: int, words: str, finish: Finish | None = None, **fields: object) -> TextChunk:
    ids = ints.pack(range(offset, offset + len(words)))
    return TextChunk(request, offset, ids, words, finish, offset + len(words), **fields)  # type: ignore[arg-type]


def test_one_message_per_frontend_and_flush(outbox: Outbox, wire: Wire) -> None:
    for name in (b"f", b"g"):
        for request in ("a", "b"):
            outbox.put(name, text(request, 0, "x"), stream=True)
    outbox.flush()
    assert [(name, len(message.chunks)) for name, message in wire.sent] == [(b"f", 2), (b"g", 2)]
    outbox.flush()
    assert len(wire.sent) == 2


@pytest.mark.parametrize("reason", [PeerBusy, PeerGone])
def test_refused_text_is_merged_and_sent_later(outbox: Outbox, wire: Wire, reason: type[Exception]) -> None:
    wire.refuse[b"f"] = reason
    for n in range(500):
        outbox.put(b"f", text("a", n, "x"), stream=True)
        outbox.put(b"g", text("b", n, "y"), stream=True)
        outbox.flush()
    assert outbox.pending == 1
    assert len(wire.chunks(b"g")) == 500  # nobody waits for a slow neighbour
    wire.refuse.clear()
    outbox.retry(b"f")
    outbox.put(b"f", text("a", 500, "z", DONE), stream=True)
    outbox.flush()
    merged, last = wire.chunks()
    assert merged.text == "x" * 500
    assert ints.unpack(merged.token_ids).tolist() == list(range(500))
    assert (last.text, last.finish) == ("z", DONE)
    assert outbox.pending == 0


def test_text_that_is_not_streamed_comes_in_large_pieces(outbox: Outbox, wire: Wire) -> None:
    total = FLUSH_TOKENS * 2 + 5
    for n in range(total):
        outbox.put(b"f", text("a", n, "x", DONE if n == total - 1 else None), stream=False)
        outbox.flush()
    assert [len(chunk.text) for chunk in wire.chunks()] == [FLUSH_TOKENS, FLUSH_TOKENS, 5]


def test_a_reopened_chunk_replaces_what_waits(outbox: Outbox, wire: Wire) -> None:
    wire.refuse[b"f"] = PeerBusy
    outbox.put(b"f", text("a", 3, "old"), stream=True)
    outbox.flush()
    outbox.put(b"f", text("a", 0, "all of it", reopened=True), stream=True)
    outbox.put(b"f", text("a", 9, "!"), stream=True)
    wire.refuse.clear()
    outbox.retry()
    assert [(c.text, c.reopened, c.offset) for c in wire.chunks()] == [("all of it!", True, 0)]


def test_held_text_is_dropped_when_streams_begin_again(outbox: Outbox, wire: Wire) -> None:
    wire.refuse[b"g"] = PeerBusy
    outbox.put(b"f", text("a", 0, "old"), stream=False)
    outbox.put(b"g", text("b", 0, "sent later"), stream=True)
    outbox.flush()
    outbox.drop_held()
    outbox.put(b"f", text("a", 0, "all", DONE, reopened=True), stream=False)
    wire.refuse.clear()
    outbox.flush()
    outbox.retry()
    assert [chunk.text for chunk in wire.chunks()] == ["all"]
    assert [chunk.text for chunk in wire.chunks(b"g")] == ["sent later"]


def test_a_frontend_that_stays_away_is_forgotten(outbox: Outbox, wire: Wire, clock: ManualClock) -> None:
    wire.refuse[b"f"] = PeerGone
    outbox.put(b"f", text("a", 0, "x"), stream=True)
    outbox.flush()
    clock.advance(FORGET_S - 1)
    outbox.retry()
    assert outbox.pending == 1
    clock.advance(2)
    outbox.retry()
    assert outbox.pending == 0


def test_a_new_epoch_forgets_everything(outbox: Outbox, wire: Wire) -> None:
    wire.refuse[b"f"] = PeerBusy
    outbox.put(b"f", text("a", 0, "x"), stream=True)
    outbox.flush()
    outbox.clear(7)
    wire.refuse.clear()
    outbox.retry()
    assert wire.sent == []
    outbox.put(b"f", text("b", 0, "y"), stream=True)
    outbox.flush()
    assert wire.sent[0][1].epoch == 7


def test_merge_joins_every_column() -> None:
    prompt = Scores(1, ints.pack([9]))
    older = text("a", 0, "ab", scores=Scores(2, ints.pack([1, 2]), ints.pack([1, 1, 2, 2])), prompt_scores=prompt)
    newer = text("a", 2, "c", DONE, scores=Scores(1, ints.pack([3]), ints.pack([3, 3])), retractions=1)
    both = merge(older, newer)
    assert both == text(
        "a",
        0,
        "abc",
        DONE,
        scores=Scores(3, ints.pack([1, 2, 3]), ints.pack([1, 1, 2, 2, 3, 3])),
        prompt_scores=prompt,
        retractions=1,
    )
    assert scores.cut(both.scores, 2, 3) == newer.scores
    assert scores.cut(both.scores, 3, 3) == Scores(0)
