"""The state machine: lives of requests on several workers, tree and pools against a naive model after every step.

Works the pages as the scheduler does: match, acquire, copy, write, extend, release, evict.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.radix_tree import Match, RadixTree
from shared.ints import pack
from tests.scheduler.radix_model import Key, ModelLease, ModelRequest, ModelWorker, Tokens

# Few tokens, so that texts meet often; they share low bytes, so that a comparison of bytes ends inside a token.
ALPHABET = (1, 257)
GREEDY = 0  # a generated token that follows from the text, so that requests side by side write the same
MAX_REQUESTS = 5
NAMESPACES = (b"", b"tenant")

token = st.sampled_from(ALPHABET)
output = st.lists(st.sampled_from((*ALPHABET, GREEDY, GREEDY)), max_size=6).map(tuple)
short_text = st.lists(token, max_size=3).map(tuple)
text = st.just(()) | short_text | st.lists(token, min_size=4, max_size=12).map(tuple)
which = st.integers(0, 1 << 16)
cuts = st.integers(0, 3) | which


def greedy(tokens: Tokens) -> int:
    return ALPHABET[len(tokens) % 3 % 2]


class TreeLife(RuleBasedStateMachine):
    @initialize(page_size=st.integers(1, 6), workers=st.integers(2, 3), pages=st.integers(6, 40))
    def begin(self, page_size: int, workers: int, pages: int) -> None:
        self.tree = RadixTree(page_size)
        # Nodes of at most three pages: long texts are chains, as they are beyond 4,096 tokens.
        self.tree._store.max_node_pages = 3
        self.size, self.num_pages = page_size, pages
        self.workers: dict[str, ModelWorker] = {}
        self.requests: list[ModelRequest] = []
        self.texts: list[Tokens] = [()]
        self.stale: list[Match] = []
        self.incarnation = self.now = 0
        for _ in range(workers):
            self.join()

    def join(self) -> None:
        self.incarnation += 1
        worker = f"w/{self.incarnation}"
        self.tree.add_worker(worker)
        self.workers[worker] = ModelWorker(self.size, self.num_pages)

    def pick_worker(self, number: int) -> str:
        return list(self.workers)[number % len(self.workers)]

    def pick_request(self, number: int) -> ModelRequest:
        return self.requests[number % len(self.requests)]

    def compose(self, number: int, cut: int, more: Tokens) -> Tokens:
        """The start of an earlier text and something new."""
        known = self.texts[number % len(self.texts)]
        text = known[: len(known) - cut % (len(known) + 1)] + more
        self.texts.append(text)
        return text

    # -- the pages, as the scheduler handles them --

    def allocate(self, worker: str) -> int | None:
        model = self.workers[worker]
        if not model.pool.free:
            expected = model.evict(1)
            evicted = self.tree.evict(worker, 1)
            assert set(evicted) == expected
            model.pool.release(evicted)
        pages = model.pool.allocate(1)
        if pages is None:
            return None
        model.contents[pages[0]] = []
        return pages[0]

    def drain_freed(self, worker: str) -> None:
        model = self.workers[worker]
        freed = self.tree.take_freed(worker)
        model.forget_redundant(freed)
        model.pool.release(freed)

    def compare(self, namespace: bytes, tokens: Tokens) -> Match:
        match = self.tree.match(namespace, pack(tokens))
        for worker, model in self.workers.items():
            num_tokens, num_pages, _ = model.longest(namespace, tokens)
            hit = match.hits.get(worker)
            assert (hit is not None) == (num_tokens > 0), worker
            if hit:
                assert (hit.num_tokens, hit.num_pages) == (num_tokens, num_pages), worker
            assert match.num_tokens(worker) == num_tokens
        assert set(match.hits) <= set(self.workers)
        return match

    def open(self, match: Match, worker: str, namespace: bytes, prompt: Tokens) -> None:
        """Acquire, copy the page where the match ended in one, and stand ready to write."""
        if len(self.requests) == MAX_REQUESTS:
            self.end(self.requests.pop(0), publish=True)
        model = self.workers[worker]
        limit = prompt[:-1]
        num_tokens, num_pages, sources = model.longest(namespace, limit)
        lease = self.tree.acquire(match, worker)
        assert (lease.num_pages, lease.num_tokens) == (num_pages, num_pages * self.size)
        assert lease.copy_tokens == num_tokens - lease.num_tokens
        held = ModelLease((namespace, prompt[: lease.num_tokens]))
        model.leases.append(held)
        request = ModelRequest(
            worker, namespace, limit[: lease.num_tokens], prompt, list(lease.pages), set(), lease, held
        )
        self.requests.append(request)
        self.check_pages(model, request.namespace, request.tokens, request.table)
        if lease.copy_tokens:
            assert lease.copy_source in sources
            held.pinned = lease.copy_source
            self.copy_page(request, limit[:num_tokens])
        else:
            assert lease.copy_source == -1

    def copy_page(self, request: ModelRequest, tokens: Tokens) -> None:
        lease, model = request.lease, self.workers[request.worker]
        content = model.contents[lease.copy_source][: lease.copy_tokens]
        target = self.allocate(request.worker)
        if target is None:
            self.tree.forget_copy(lease)
            assert (lease.copy_source, lease.copy_tokens) == (-1, 0)
            request.model_lease.pinned = -1
            return
        assert target != lease.copy_source, "the page to copy was evicted"
        model.contents[target] = list(content)
        request.table.append(target)
        request.own.add(target)
        request.tokens = tokens
        self.check_pages(model, request.namespace, request.tokens, request.table)

    @staticmethod
    def check_pages(model: ModelWorker, namespace: bytes, tokens: Tokens, pages: list[int]) -> None:
        written = [entry for page in pages for entry in model.contents[page]]
        expected: list[Key] = [(namespace, tokens[: end + 1]) for end in range(len(tokens))]
        assert written[: len(expected)] == expected, "a page holds other tokens than it should"

    # -- rules --

    @rule(number=which, cut=cuts, more=text, namespace=st.sampled_from(NAMESPACES))
    def match(self, number: int, cut: int, more: Tokens, namespace: bytes) -> None:
        self.compare(namespace, self.compose(number, cut, more))

    @rule(number=which, cut=cuts, more=text, namespace=st.sampled_from((b"", b"", b"tenant")), worker=which)
    def admit(self, number: int, cut: int, more: Tokens, namespace: bytes, worker: int) -> None:
        prompt = self.compose(number, cut, more)
        self.open(self.compare(namespace, prompt[:-1]), self.pick_worker(worker), namespace, prompt)

    @precondition(lambda self: self.requests)
    @rule(number=which, more=short_text, share=st.booleans(), turns=st.lists(st.booleans(), max_size=6))
    def fork(self, number: int, more: Tokens, share: bool, turns: list[bool]) -> None:
        """A request beside a running one, with its text; by turns they write, each into its own pages, and publish."""
        other = self.pick_request(number)
        if other.worker not in self.workers:
            return
        if share:
            self.extend(other, 0)
        prompt = other.tokens + more
        self.open(self.compare(other.namespace, prompt[:-1]), other.worker, other.namespace, prompt)
        for turn in turns:
            request = self.requests[-1] if turn else other
            if request in self.requests:
                self.write_tokens(request, (GREEDY,))
                self.extend(request, 0)

    @rule(number=which, cut=cuts, more=text, worker=which, generated=output)
    def serve(self, number: int, cut: int, more: Tokens, worker: int, generated: Tokens) -> None:
        """A whole life in one step."""
        prompt = self.compose(number, cut, more)
        self.open(self.compare(b"", prompt[:-1]), self.pick_worker(worker), b"", prompt)
        request = self.requests[-1]
        missing = max(0, len(prompt) - len(request.tokens))
        self.write_tokens(request, (GREEDY,) * missing + generated)
        self.end(self.requests.pop(), publish=True)

    @rule(number=which, cut=cuts, more=text)
    def match_early(self, number: int, cut: int, more: Tokens) -> None:
        self.stale.append(self.compare(b"", self.compose(number, cut, more)))

    @precondition(lambda self: self.stale)
    @rule(worker=which)
    def admit_late(self, worker: int) -> None:
        """Acquire on a match that may be outdated."""
        match = self.stale.pop(0)
        tokens = tuple(memoryview(match.tokens).cast("i"))
        self.open(match, self.pick_worker(worker), match.namespace, (*tokens, 1))

    @precondition(lambda self: self.requests)
    @rule(number=which, generated=output)
    def write(self, number: int, generated: Tokens) -> None:
        request = self.pick_request(number)
        if request.worker in self.workers:
            self.write_tokens(request, generated)

    @precondition(lambda self: self.requests)
    @rule(number=which, outputs=st.lists(output, min_size=1, max_size=4))
    def decode(self, number: int, outputs: list[Tokens]) -> None:
        """Write and publish by turns."""
        request = self.pick_request(number)
        for generated in outputs:
            if request.worker in self.workers:
                self.write_tokens(request, generated)
                self.extend(request, 0)

    def write_tokens(self, request: ModelRequest, generated: Tokens) -> None:
        """Prefill what is left of the prompt, token by token, then generate; ends early where no page is left."""
        model = self.workers[request.worker]
        for token in generated:
            done = len(request.tokens)
            if done == len(request.table) * self.size:
                page = self.allocate(request.worker)
                if page is None:
                    return
                request.table.append(page)
                request.own.add(page)
            following = request.prompt[done] if done < len(request.prompt) else token or greedy(request.tokens)
            request.tokens += (following,)
            page = request.table[done // self.size]
            assert page in request.own or page == request.lease.tail_page, "a request writes into a shared page"
            model.contents[page].append((request.namespace, request.tokens))
        self.texts.append(request.tokens)

    @rule(number=which, cut=cuts, worker=which)
    def touch(self, number: int, cut: int, worker: int) -> None:
        """A request that ends before it writes anything."""
        prompt = self.compose(number, cut, ())
        self.open(self.compare(b"", prompt[:-1]), self.pick_worker(worker), b"", prompt)
        self.end(self.requests.pop(), publish=False)

    @precondition(lambda self: self.requests)
    @rule(number=which, hold_back=st.sampled_from((0, 0, 0, 1, 2, 5)))
    def publish(self, number: int, hold_back: int) -> None:
        self.extend(self.pick_request(number), hold_back)

    def extend(self, request: ModelRequest, hold_back: int) -> None:
        lease, held = request.lease, request.model_lease
        tokens = request.tokens[lease.num_tokens :]
        tokens = tokens[: max(0, len(tokens) - hold_back)]
        first = lease.num_pages
        pages = request.table[first : first + -(-len(tokens) // self.size)]
        before = lease.num_tokens
        refused = self.tree.extend(lease, pack(tokens), pages)
        model = self.workers.get(request.worker)
        if model is None:
            assert (refused, lease.void) == (pages, True)
            return
        assert refused == model.extend(held, tokens, pages)
        request.own.update(refused)
        request.own.difference_update(set(pages) - set(refused))
        assert lease.num_tokens == len(held.key[1]) == before + len(tokens) // self.size * self.size
        assert lease.tail_tokens == (len(held.tail[1]) - lease.num_tokens if held.tail else 0)
        assert lease.tail_page == (model.pages[held.tail] if held.tail else -1)
        self.check_pages(model, request.namespace, request.tokens[: lease.num_tokens], list(lease.pages))
        self.drain_freed(request.worker)

    @precondition(lambda self: self.requests)
    @rule(number=which, publish=st.booleans())
    def finish(self, number: int, publish: bool) -> None:
        self.end(self.requests.pop(number % len(self.requests)), publish)

    def end(self, request: ModelRequest, publish: bool) -> None:
        if publish:
            self.extend(request, 0)
        self.tree.release(request.lease)
        self.tree.release(request.lease)
        model = self.workers.get(request.worker)
        if model is not None:
            self.now += 1
            model.release(request.model_lease, self.now)
            self.drain_freed(request.worker)
            model.pool.release(request.own)

    @precondition(lambda self: self.requests)
    @rule(number=which)
    def forget_copy(self, number: int) -> None:
        request = self.pick_request(number)
        self.tree.forget_copy(request.lease)
        request.model_lease.pinned = -1

    @rule(worker=which, count=st.integers(0, 6))
    def evict(self, worker: int, count: int) -> None:
        name = self.pick_worker(worker)
        model = self.workers[name]
        expected = model.evict(count)
        evicted = self.tree.evict(name, count)
        assert len(evicted) == len(expected)
        assert set(evicted) == expected
        model.pool.release(evicted)

    @rule(worker=which)
    def clear(self, worker: int) -> None:
        name = self.pick_worker(worker)
        model = self.workers[name]
        expected = model.evict(self.num_pages)
        cleared = self.tree.clear(name)
        assert set(cleared) == expected
        assert self.tree.evictable_pages(name) == 0
        model.pool.release(cleared)

    @rule(worker=which, sure=st.integers(0, 9))
    def lose_worker(self, worker: int, sure: int) -> None:
        if sure:
            return
        name = self.pick_worker(worker)
        del self.workers[name]
        self.tree.drop_worker(name)
        self.tree.drop_worker(name)
        assert self.tree.take_freed(name) == []
        self.join()

    # -- what always holds --

    @invariant()
    def tree_is_sound(self) -> None:
        if hasattr(self, "tree"):
            self.tree.check()

    @invariant()
    def every_page_is_somebodys(self) -> None:
        for name, model in getattr(self, "workers", {}).items():
            model.pool.check()
            held = sorted(self.tree.pages_of(name))
            assert held == sorted(model.pages.values()), "the tree holds other pages than the model"
            own = [page for request in self.requests if request.worker == name for page in request.own]
            free = [page for page in range(self.num_pages) if model.pool.is_free(page)]
            assert sorted(held + own + free) == list(range(self.num_pages)), "a page is lost or twice somebody's"
            assert self.tree.cached_pages(name) == len(held)
            assert self.tree.evictable_pages(name) == model.evictable()

    @invariant()
    def contents_are_right(self) -> None:
        for model in getattr(self, "workers", {}).values():
            for (namespace, tokens), page in model.pages.items():
                first = (len(tokens) - 1) // self.size * self.size
                expected = [(namespace, tokens[: end + 1]) for end in range(first, len(tokens))]
                assert model.contents[page][: len(expected)] == expected

    def teardown(self) -> None:
        for request in getattr(self, "requests", []):
            self.tree.release(request.lease)
        for name in getattr(self, "workers", {}):
            self.tree.clear(name)
            assert self.tree.cached_pages(name) == 0
        if hasattr(self, "tree"):
            self.tree.check()
            assert self.tree.num_nodes == 0
            assert not self.tree._store.roots
