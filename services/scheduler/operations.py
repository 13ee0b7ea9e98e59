"""What an operator may ask for, one method each. Leaves authorisation to the tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from services.scheduler.lifecycle import abort
from services.scheduler.request import Request, State
from shared.messages.request import Operation, OperationDone

if TYPE_CHECKING:
    from services.scheduler.core import Core

MAX_LISTED = 1000
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


class Operations:
    def __init__(self, core: Core) -> None:
        self.paused = False
        self._core = core
        self._tree = core.tree
        self._fleet = core.fleet
        self._lifecycle = core.lifecycle
        self._handlers: dict[str, Callable[[Operation], OperationDone]] = {
            "flush_cache": self._flush_cache,
            "abort_all": self._abort_all,
            "pause": self._pause,
            "continue": self._continue,
            "drain_worker": self._drain_worker,
            "tree": self._report_tree,
            "requests": self._report_requests,
            "workers": self._report_workers,
            "set_log_level": self._set_log_level,
            "unpin": self._unpin,
        }

    def run(self, operation: Operation) -> OperationDone:
        return self._handlers[operation.name](operation)

    def _flush_cache(self, operation: Operation) -> OperationDone:
        busy = self._lifecycle.num_live
        if busy:  # steps of ended requests may still be in flight: they come before whatever uses their pages
            return OperationDone(operation.nonce, False, f"{busy} requests are running or waiting")
        pages = 0
        self._core.pins.clear()
        self._core.drafting.forget()
        self._core.migration.cancel_all("the cache is flushed")
        for worker in self._fleet:
            freed = self._tree.clear(worker.key)
            worker.pool.release(freed)
            pages += len(freed)
            self._core.tiers.clear(worker)
        return OperationDone(operation.nonce, True, f"{pages} pages freed")

    def _abort_all(self, operation: Operation) -> OperationDone:
        tenant = operation.tenant
        live = [
            request
            for request in self._lifecycle.requests.values()
            if request.live and (not tenant or request.message.tenant == tenant)
        ]
        for request in live:
            self._lifecycle.finish(request, abort(operation.argument or "aborted by the operator"))
        return OperationDone(operation.nonce, True, f"{len(live)} requests aborted")

    def _pause(self, operation: Operation) -> OperationDone:
        """`abort` ends all requests, `retract` takes their seats and pages away, `in_place` (or nothing) keeps them."""
        mode = operation.argument or "in_place"
        if mode not in ("abort", "retract", "in_place"):
            return OperationDone(operation.nonce, False, "the mode is one of abort, retract, in_place")
        self.paused = True
        if mode == "abort":
            self._abort_all(Operation(operation.nonce, "abort_all", "generation was paused"))
        elif mode == "retract":
            for worker in self._fleet:
                for request in list(worker.running.values()):
                    self._lifecycle.suspend(request)
        return OperationDone(operation.nonce, True, "no steps are dispatched until continue")

    def _continue(self, operation: Operation) -> OperationDone:
        self.paused = False
        return OperationDone(operation.nonce, True)

    def _drain_worker(self, operation: Operation) -> OperationDone:
        for worker in self._fleet:
            if worker.worker_id == operation.argument:
                self._core.drain_worker(worker, self._core.config.drain_timeout)
                return OperationDone(operation.nonce, True, "draining")
        return OperationDone(operation.nonce, False, f"no worker {operation.argument!r}")

    def _set_log_level(self, operation: Operation) -> OperationDone:
        level = _LEVELS.get(operation.argument)
        if level is None:
            return OperationDone(operation.nonce, False, f"the level is one of {', '.join(_LEVELS)}")
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
        logging.getLogger().setLevel(level)
        return OperationDone(operation.nonce, True)

    def _unpin(self, operation: Operation) -> OperationDone:
        found = self._core.pins.drop(operation.argument)
        return OperationDone(operation.nonce, True, "" if found else "no such pin")

    # Reports

    def _report_tree(self, operation: Operation) -> OperationDone:
        workers = [
            {
                "worker": worker.key,
                "cached_pages": self._tree.cached_pages(worker.key),
                "evictable_pages": self._tree.evictable_pages(worker.key),
                "free_pages": worker.pool.free,
                "num_pages": worker.hello.num_pages,
            }
            for worker in self._fleet
        ]
        body = {"page_size": self._tree.page_size, "nodes": self._tree.num_nodes, "workers": workers}
        return _report(operation, body)

    def _report_requests(self, operation: Operation) -> OperationDone:
        now = self._core.clock.now()
        live = (request for request in self._lifecycle.requests.values() if request.live)
        rows = [_describe(request, now) for request in islice(live, MAX_LISTED)]
        return _report(operation, {"total": self._lifecycle.num_live, "requests": rows})

    def _report_workers(self, operation: Operation) -> OperationDone:
        now = self._core.clock.now()
        rows = [
            {
                **msgspec.structs.asdict(worker.status(now, self._tree.evictable_pages(worker.key))),
                "key": worker.key,
                "next_step_id": worker.next_step_id,
                "run_ahead": worker.depth,
                "step_tokens": worker.step_tokens,
            }
            for worker in islice(self._fleet, MAX_LISTED)
        ]
        return _report(operation, {"workers": rows})


def _describe(request: Request, now: float) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "state": (State.TRANSFERRING if request.transfer is not None else request.state).value,
        "age_s": round(now - request.arrival, 3),
        "prompt_tokens": request.prompt_length,
        "output_tokens": len(request.output),
        "max_tokens": request.max_tokens,
        "cached_tokens": request.cached_tokens,
        "retractions": request.retractions,
        "worker": request.worker.worker_id if request.worker else "",
        "slot": request.slot,
        "pages": len(request.pages),
        "priority": request.message.priority,
        "group": request.message.group_id,
        "frontend": request.frontend.decode(errors="replace"),
    }


def _report(operation: Operation, body: dict[str, Any]) -> OperationDone:
    return OperationDone(operation.nonce, True, body=msgspec.json.encode(body))
