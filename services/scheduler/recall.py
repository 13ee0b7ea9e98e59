"""Prompts that are known to their last token: whose hidden state a worker keeps, and leases that may rely on it.

    prompt, the first time    [page][page][ab|...]    computed to b, whose hidden state is kept with b's page
    the same prompt again     [page][page][ab|...]    that page and its state are copied; nothing is computed

Leaves the states to the workers, the books of pages to the pool.
"""

from __future__ import annotations

from services.scheduler.radix_tree import Lease, Match, RadixTree
from services.scheduler.request import Request
from services.scheduler.worker import Worker


def match(tree: RadixTree, worker: Worker, request: Request) -> Match:
    """The longest prefix that may count there; all known tokens only where the last one's state may be kept."""
    limit = request.known if serves(worker, request) else request.match_limit()
    return tree.match(request.namespace, request.tokens(0, limit))


def acquire(tree: RadixTree, found: Match, worker: Worker, request: Request) -> Lease:
    """A lease of what was found, less the last known token where it has to be computed."""
    lease = tree.acquire(found, worker.key)
    if leased(lease) < request.known or _is_kept(lease, worker):
        return lease
    tree.release(lease)
    return tree.acquire(tree.match(request.namespace, request.tokens(0, request.match_limit())), worker.key)


def leased(lease: Lease) -> int:
    """Tokens that need not be computed, those to be copied too."""
    return lease.num_tokens + lease.copy_tokens


def keep(worker: Worker, request: Request, end: int, page_size: int) -> None:
    """The state behind the token before position `end` is kept, by a command that has left."""
    page, offset = divmod(end - 1, page_size)
    worker.pool.hidden[request.pages[page]] = offset + 1


def serves(worker: Worker, request: Request) -> bool:
    """Whether the state behind the last known token is kept there, and all that the first sample needs."""
    return worker.keeps_hidden and request.max_tokens > 0 and request.prompt_scores_missing >= request.prompt_length


def _is_kept(lease: Lease, worker: Worker) -> bool:
    if lease.copy_tokens:
        return worker.pool.hidden.get(lease.copy_source) == lease.copy_tokens
    return bool(lease.pages) and worker.pool.hidden.get(lease.pages[-1]) == lease.page_size
