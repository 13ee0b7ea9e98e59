"""What must be true between any two turns; asked after every turn in tests and when idle in production."""

from __future__ import annotations

from collections import Counter

from services.scheduler.fleet import Fleet
from services.scheduler.lifecycle import Lifecycle
from services.scheduler.radix_tree import RadixTree
from services.scheduler.request import Request, State
from services.scheduler.worker import Worker


def check(tree: RadixTree, fleet: Fleet, lifecycle: Lifecycle) -> None:
    """AssertionError naming what is wrong."""
    tree.check()
    check_books(tree, fleet, lifecycle)


def check_books(tree: RadixTree, fleet: Fleet, lifecycle: Lifecycle) -> None:
    """The same without the inside of the tree."""
    for worker in fleet:
        lifecycle.seats.reclaim(worker)
        _check_pages(tree, worker)
        _check_seats(worker)
    _check_rows(fleet, lifecycle)
    _check_states(fleet, lifecycle)


def _check_pages(tree: RadixTree, worker: Worker) -> None:
    """Free + held by the tree + held by requests + in quarantine = all, each once."""
    free = [page for page in range(worker.pool.num_pages) if worker.pool.is_free(page)]
    owners = Counter(free)
    owners.update(tree.pages_of(worker.key))
    for request in worker.running.values():
        owners.update(request.own)
    for pages in worker.quarantine.values():
        owners.update(pages)
    worker.pool.check()
    wrong = {page: owners[page] for page in range(worker.pool.num_pages) if owners[page] != 1}
    assert not wrong, f"{worker.key}: pages with another number of holders than one: {dict(list(wrong.items())[:8])}"
    assert len(owners) == worker.pool.num_pages, f"{worker.key}: pages outside the pool"
    for tier in worker.tiers.values():
        held = list(tree.pages_of(tier.key))
        assert len(held) == len(set(held)) == tier.pool.num_pages - tier.pool.free, f"{tier.key}: pages are lost"
        assert not any(tier.pool.is_free(page) for page in held), f"{tier.key}: a page is held and free"


def _check_seats(worker: Worker) -> None:
    slots = [*worker.free_slots, *worker.running]
    assert sorted(slots) == list(range(worker.hello.max_slots)), f"{worker.key}: a slot is lost or taken twice"
    assert len(worker.running) <= worker.seats, f"{worker.key}: more requests than seats"
    for slot, request in worker.running.items():
        _check_seated(worker, slot, request)
    prefilling = {r.request_id for r in worker.running.values() if r.dispatched < r.prefill_end}
    assert prefilling == {r.request_id for r in worker.prefilling}, f"{worker.key}: wrong list of prefills"


def _check_seated(worker: Worker, slot: int, request: Request) -> None:
    name = f"{worker.key}: {request.request_id}"
    lease = request.lease
    assert request.worker is worker and request.slot == slot, f"{name} sits elsewhere"  # noqa: PT018
    assert request.state is State.RUNNING, f"{name} sits but is {request.state}"
    assert lease is not None, f"{name} has no lease"
    assert request.dispatched <= request.capacity, f"{name} writes beyond its pages"
    assert len(set(request.pages)) == len(request.pages), f"{name} has a page twice"
    assert request.own <= set(request.pages), f"{name} owns pages it does not use"


def _check_rows(fleet: Fleet, lifecycle: Lifecycle) -> None:
    rows = Counter(id(request) for worker in fleet for step in worker.inflight for request in step.rows())
    for request in lifecycle.requests.values():
        found = rows[id(request)]
        assert request.inflight_rows == found, f"{request.request_id}: {request.inflight_rows} rows, found {found}"


def _check_states(fleet: Fleet, lifecycle: Lifecycle) -> None:
    running = [request for worker in fleet for request in worker.running.values()]
    assert lifecycle.num_running == len(running), "the number of running requests is wrong"
    by_state = Counter(request.state for request in lifecycle.requests.values())
    assert by_state[State.RUNNING] == len(running), "a running request has no seat"
    assert by_state[State.WAITING] == len(lifecycle.waiting), "a waiting request is not in the queue"
    assert by_state[State.SUSPENDED] == len(lifecycle.suspended), "a suspended request is lost"
    assert by_state[State.COMPILING] == len(lifecycle.compiling), "a compiling request is lost"
    tokens = sum(request.known for request in lifecycle.waiting)
    assert tokens == lifecycle.waiting.tokens, "the number of waiting tokens is wrong"
    for request in lifecycle.requests.values():
        assert request.live == (request.finish is None), f"{request.request_id}: state and finish differ"
