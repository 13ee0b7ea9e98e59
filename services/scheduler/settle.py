"""What the result of a step means for its requests: tokens, ends, errors, scores. Leaves credits to the fleet."""

from __future__ import annotations

from itertools import islice, takewhile

import structlog

from services.scheduler.guide import Guide
from services.scheduler.inflight import InflightStep
from services.scheduler.lifecycle import Lifecycle, error
from services.scheduler.masking import Masking
from services.scheduler.metrics import Metrics
from services.scheduler.outbox import Outbox
from services.scheduler.request import Request, State
from services.scheduler.seats import Seats
from services.scheduler.worker import Worker
from shared import ints
from shared.messages.step import StepResult
from shared.messages.stream import Finish, FinishReason

log = structlog.get_logger(__name__)


class Settler:
    """Results are settled by position: row i of the result is row i of the step, whoever sits in its slot now."""

    def __init__(self, seats: Seats, lifecycle: Lifecycle, outbox: Outbox, masking: Masking, metrics: Metrics) -> None:
        self._seats = seats
        self._lifecycle = lifecycle
        self._outbox = outbox
        self._masking = masking
        self._metrics = metrics
        self._page_size = seats.tree.page_size

    def settle(self, worker: Worker, step: InflightStep, result: StepResult) -> None:
        tokens = ints.unpack(result.token_ids)
        if result.errors:
            self._end_failed_rows(step, result)
        if result.scores or result.prompt_scores:
            self._keep_scores(step, result)
        if step.masked:
            self._metrics.mask_wait.observe(result.mask_wait_ms / 1e3)
        num_decode = len(step.decode)
        self._append(step.decode, tokens[:num_decode].tolist())
        self._settle_chunks(worker, step, tokens[num_decode:].tolist())
        sampled = sum(token >= 0 for token in tokens)
        worker.pace.observe(result.forward_ms, sampled)
        worker.decoded_tokens += sampled
        self._metrics.count("decode_tokens", sampled)

    def _append(self, rows: list[Request], tokens: list[int]) -> None:
        """One sampled token for each row. The hot loop: a plain token costs an append and two comparisons."""
        touched = self._outbox.touched
        for request, token in zip(rows, tokens, strict=True):
            request.inflight_rows -= 1
            if request.finish is not None:
                continue
            if token < 0:
                if request.guide is not None and request.guide.ending:
                    continue
                self._lifecycle.finish(request, error("the worker skipped a row of a live request"))
                continue
            output = request.output
            output.append(token)
            if request.foresight is not None:
                request.foresight.learn((token,))
                if request.ahead is not None:
                    self._meet(request)
            if not request.dirty:
                request.dirty = True
                touched.append(request)
            if token in request.stops or len(output) >= request.check_at:
                self._look_at(request, token)

    def _look_at(self, request: Request, token: int) -> None:
        """The token may end the request, fill a page, or be one that a suspended request waits for."""
        if request.guide is not None:
            self._follow(request, request.guide, token)
            return
        if self._ends(request, token):
            return
        count = len(request.output)
        if request.state is State.RUNNING:
            written = request.prompt_length + count - 1  # the new token has no KV yet
            over = written % self._page_size
            self._seats.store(request, written - over)
            request.check_at = min(count + self._page_size - over, request.max_tokens)
        else:
            self._lifecycle.settled(request)

    def _ends(self, request: Request, token: int) -> bool:
        """End a request without a constraint where its last token does."""
        count = len(request.output)
        if token in request.stops and count > request.min_tokens:
            self._lifecycle.finish(request, Finish(FinishReason.STOP, matched_token=token))
        elif count >= request.max_tokens:
            self._lifecycle.finish(request, Finish(FinishReason.LENGTH))
        return request.finish is not None

    def _settle_drafts(self, worker: Worker, request: Request, tokens: list[int]) -> None:
        """A row with guesses: the samples up to the first one that was not guessed."""
        request.inflight_rows -= 1
        if request.finish is not None:
            return
        kept = list(takewhile(_is_token, tokens))
        guide = request.guide
        if guide is not None and guide.ending:
            return
        if not kept:
            self._lifecycle.finish(request, error("the worker skipped a row of a live request"))
            return
        self._metrics.count("accepted_draft_tokens", len(kept) - 1)
        self._outbox.touch(request)
        if guide is not None:
            self._follow_guesses(worker, request, guide, kept)
            return
        if request.foresight is not None:
            request.foresight.learn(kept)
        for token in kept:
            request.output.append(token)
            if self._ends(request, token):
                return
        if request.worker is worker:
            self._meet(request)
            worker.decoding = None
        self._look_at(request, kept[-1])

    @staticmethod
    def _meet(request: Request) -> None:
        """A row's samples are known: its next one, where it is in flight, is what was expected, or a decode row."""
        ahead, request.ahead = request.ahead, None
        if ahead is not None:
            ahead.failed = request.known - 1 != ahead.start or request.output[-1] != ahead.token
            if not ahead.failed:
                return
        request.guessed = b""
        request.dispatched = request.known - 1 + request.inflight_rows  # the wrong guesses will be written over

    def _follow_guesses(self, worker: Worker, request: Request, guide: Guide, kept: list[int]) -> None:
        """Samples of a row with guesses, each under its mask. With the last useful one the text is complete, or cut."""
        useful = kept[: guide.useful]
        for index, token in enumerate(useful):
            guide.count_spared(spared=index > 0)
            request.output.append(token)
            if self._masking.stops(request, token):
                return
        guide.go_on(request, len(useful) - 1)
        more = len(kept) > len(useful)
        if more and not guide.cut:
            self._masking.end(request, Finish(FinishReason.STOP, matched_token=guide.eos_id))
            return
        if more and request.worker is worker:
            self._lifecycle.suspend(request)  # the worker has gone on without a mask
        elif request.worker is worker:
            request.dispatched = guide.sample_at = request.known - 1  # the wrong guesses will be written over
            worker.decoding = None
            self._seats.store(request, request.dispatched - request.dispatched % self._page_size)
        if len(request.output) >= request.max_tokens:
            self._masking.judge(request)
        elif request.state is not State.RUNNING:
            self._lifecycle.settled(request)

    def _follow(self, request: Request, guide: Guide, token: int) -> None:
        """A token under a constraint: what it forces is output too. The state hears of all of it with the next mask."""
        output = request.output
        if guide.ending:
            output.pop()  # of a row that was on its way when forced tokens used up the budget
            return
        forced = guide.take_forced()
        if forced and token != forced[0]:
            self._lifecycle.finish(request, error("the worker sampled a token that its mask forbids"))
            return
        guide.count_spared(spared=bool(forced))
        if request.state is State.RUNNING:
            written = request.prompt_length + len(output) - 1  # the new token has no KV yet
            self._seats.store(request, written - written % self._page_size)
        if self._masking.stops(request, token):
            return
        self._metrics.count("forced_tokens", max(len(forced) - 1, 0))
        for known in forced[1:]:
            output.append(known)
            if self._masking.stops(request, known):
                return
        if len(output) >= request.max_tokens:
            self._masking.judge(request)
        elif request.state is not State.RUNNING:
            self._lifecycle.settled(request)

    def _settle_chunks(self, worker: Worker, step: InflightStep, tokens: list[int]) -> None:
        sampled = iter(tokens)
        for chunk in step.chunks:
            request = chunk.request
            if chunk.drafts:
                self._metrics.count("draft_tokens", chunk.drafts if chunk.size > 1 else 0)
                self._settle_drafts(worker, request, list(islice(sampled, chunk.num_samples)))
                continue
            if chunk.sample:
                self._append([request], [next(sampled)])
                continue
            request.inflight_rows -= 1
            if request.finish is not None:
                continue
            if request.max_tokens == 0 and chunk.end == request.prompt_length:
                self._lifecycle.finish(request, Finish(FinishReason.LENGTH))
            else:
                self._lifecycle.settled(request)

    def _end_failed_rows(self, step: InflightStep, result: StepResult) -> None:
        by_slot = {chunk.slot: chunk.request for chunk in step.chunks}
        by_slot.update(zip(ints.unpack(step.decode_slots), step.decode, strict=True))
        for failure in result.errors:
            request = by_slot.get(failure.slot)
            if request is not None:
                log.warning("row failed", request_id=request.request_id, detail=failure.detail)
                self._lifecycle.finish(request, error(failure.detail))

    def _keep_scores(self, step: InflightStep, result: StepResult) -> None:
        rows = [*step.decode, *(chunk.request for chunk in step.chunks for _ in range(chunk.num_samples))]
        for row_scores in result.scores:
            request = rows[row_scores.row]
            if request.finish is None:
                request.scores.add(row_scores.scores)
        for row_scores in result.prompt_scores:
            request = step.chunks[row_scores.row].request
            if request.finish is None:
                request.prompt_scores.add(row_scores.scores)


def _is_token(token: int) -> bool:
    return token >= 0
