"""Requests whose constraint is being compiled: they hold no seat and no place in the queue. Leaves how to the compiler.

arrival --take--> COMPILING --admit--> WAITING, behind whoever came meanwhile
                      \\-----refuse--> (gone): it was never let in
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

import msgspec
import structlog

from services.scheduler.constraint.compiler import Compiler, load
from services.scheduler.constraint.completion import TokenOrder
from services.scheduler.constraint.errors import CompilerBusy, ConstraintError
from services.scheduler.constraint.process import ProcessGone
from services.scheduler.constraint.protocol import Verdict
from services.scheduler.constraint.vocabulary import VocabularyError
from services.scheduler.frontends import Frontends
from services.scheduler.guide import Guide
from services.scheduler.lifecycle import Lifecycle, error
from services.scheduler.masking import WORD_BITS, Post
from services.scheduler.metrics import Metrics
from services.scheduler.request import Request
from shared.messages.request import RejectCode, RequestRejected
from shared.messages.stream import Finish

log = structlog.get_logger(__name__)

RETRY_AFTER_S = 1.0
UNAVAILABLE = "constraints are not available:"


class Compiling:
    """`admitted(request)` is called for each one that now waits for a seat.

    `vocab_size()` is that of the workers; 0 as long as there is none.
    """

    def __init__(
        self,
        model_path: str,
        lifecycle: Lifecycle,
        frontends: Frontends,
        metrics: Metrics,
        post: Post,
        admitted: Callable[[Request], None],
        vocab_size: Callable[[], int],
    ) -> None:
        self._model_path = model_path
        self._lifecycle = lifecycle
        self._frontends = frontends
        self._metrics = metrics
        self._post = post
        self._admitted = admitted
        self._vocab_size = vocab_size
        self._starting: asyncio.Task[Compiler | str] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Load the model's tokens, before anybody relies on the loop; the compiling processes start beside it."""
        if not self._model_path:
            return
        order: TokenOrder | str
        try:
            order = await load(self._model_path)
        except (VocabularyError, OSError, ValueError) as failure:
            order = self._give_up(failure)
        self._starting = asyncio.create_task(self._start(order))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        starting = self._starting
        if starting is None:
            return
        if not starting.done():
            starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            compiler = await starting
            if isinstance(compiler, Compiler):
                await compiler.close()

    def take(self, request: Request) -> None:
        """It waits here until its constraint is compiled; ending it cancels that."""
        self._metrics.count("constrained_requests")
        task = asyncio.create_task(self._compile(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._lifecycle.compile(request, lambda: None if task.done() else _cancel(task))

    def counters(self) -> dict[str, float]:
        """What the compiler has done so far, and what it holds; nothing where it has not started."""
        starting = self._starting
        if starting is None or not starting.done() or starting.cancelled() or starting.exception() is not None:
            return {}
        compiler = starting.result()
        if isinstance(compiler, str):
            return {}
        stats = compiler.stats
        return {
            "grammar_cache_hits": stats.hits,
            "grammars_compiled": stats.compiled,
            "grammars_refused": stats.refused,
            "compiles_killed": stats.killed,
            "grammar_cache_bytes": compiler.cache.bytes,
        }

    def check(self, request: Request, finish: Finish) -> None:
        """End it with the verdict on its text."""
        task = asyncio.create_task(self._check(request, finish))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, order: TokenOrder | str) -> Compiler | str:
        """The compiler, or why there is none."""
        if isinstance(order, str):
            return order
        try:
            return await Compiler.start(self._model_path, order=order)
        except (ProcessGone, OSError) as failure:
            return self._give_up(failure)

    def _give_up(self, failure: Exception) -> str:
        log.warning("no constraints", reason=str(failure))
        return f"the model's tokenizer cannot be used: {failure}"

    async def _compile(self, request: Request) -> None:
        try:
            guide, opening = await self._guide(request)
        except ConstraintError as bad:
            field = request.message.constraint.field if request.message.constraint else ""
            self._post(partial(self._refuse, request, "bad_constraint", bad.told(field)))
        except CompilerBusy as busy:
            self._post(partial(self._refuse, request, "queue_full", str(busy)))
        except Exception:
            log.exception("constraint could not be compiled", request_id=request.request_id)
            self._post(partial(self._lifecycle.finish, request, error("internal error")))
        else:
            self._post(partial(self._admit, request, guide, opening))

    async def _guide(self, request: Request) -> tuple[Guide, tuple[int, ...]]:
        """What leads it, and the tokens that its text begins with."""
        message = request.message
        constraint = message.constraint
        assert constraint is not None
        assert self._starting is not None
        compiler = await asyncio.shield(self._starting)
        if isinstance(compiler, str):
            raise ConstraintError(constraint.kind, f"{UNAVAILABLE} {compiler}")
        words, vocab_size = compiler.vocabulary.words, self._vocab_size()
        if vocab_size and words > -(-vocab_size // WORD_BITS):
            raise ConstraintError(constraint.kind, f"{UNAVAILABLE} the tokenizer has more tokens than the model")
        grammar = await compiler.compile(constraint)
        state = grammar.state(
            request.max_tokens,
            complete_within_budget=constraint.complete_within_budget,
            jump_forward=constraint.jump_forward,
            thinking_end=message.thinking_end_id,
            refuse_small_budget=constraint.refuse_small_budget,
        )
        guide = Guide(state, compiler.vocabulary.eos_ids[0], best_effort=constraint.best_effort)
        return guide, grammar.opening if constraint.jump_forward and state.begun else ()

    async def _check(self, request: Request, finish: Finish) -> None:
        verdict = Verdict(False, "the check could not be finished", known=False)
        try:
            verdict = await self._verdict(request, finish)
        except Exception:
            log.exception("text could not be checked", request_id=request.request_id)
        word = "unknown" if not verdict.known else "conforms" if verdict.valid else "violates"
        judged = msgspec.structs.replace(finish, verdict=word, violation=verdict.reason)
        self._post(partial(self._lifecycle.finish, request, judged))

    async def _verdict(self, request: Request, finish: Finish) -> Verdict:
        constraint = request.message.constraint
        assert constraint is not None
        assert self._starting is not None
        compiler = await asyncio.shield(self._starting)
        assert isinstance(compiler, Compiler)
        ids = request.output.tolist()
        if ids and ids[-1] == finish.matched_token:
            ids.pop()
        thinking_end = request.message.thinking_end_id
        if thinking_end >= 0:  # only what follows the thinking part is the answer
            ids = ids[ids.index(thinking_end) + 1 :] if thinking_end in ids else []
        return await compiler.check(constraint, compiler.vocabulary.decode(ids).decode("utf-8", "replace"))

    def _admit(self, request: Request, guide: Guide, opening: tuple[int, ...]) -> None:
        if request.live:
            request.guide = guide
            self._metrics.count("forced_tokens", guide.write_opening(request, opening))
            self._lifecycle.admit(request)
            self._admitted(request)

    def _refuse(self, request: Request, code: RejectCode, detail: str) -> None:
        if request.live:
            self._metrics.count("requests_rejected")
            self._lifecycle.dismiss(request)
            retry_after = RETRY_AFTER_S if code == "queue_full" else 0.0
            self._frontends.send(request.frontend, RequestRejected(request.request_id, code, detail, retry_after))


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
