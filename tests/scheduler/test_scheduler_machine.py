"""Random mixes of requests, aborts, losses and returns: every answer must still be exactly its prompt's.

The invariants of the scheduler run after every turn (LocalFleet switches them on), and the fake engine verifies
every page it reads.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.scheduler.request import State
from shared.messages.step import WorkerDrain, WorkerFault
from shared.messages.stream import FinishReason, StopMatched
from tests.fake_model import expected_scores, generate
from tests.local_fleet import LocalFleet, tokens
from tests.local_peers import LocalDetokenizer, LocalWorker
from tests.scheduler.guesses import let_guess

FAMILIES = [tokens(140, seed=s) for s in range(3)]
STEPS = int(os.environ.get("RADIXFLEET_MACHINE_STEPS", "40"))
EXAMPLES = int(os.environ.get("RADIXFLEET_MACHINE_EXAMPLES", "30"))


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        tokens_in_pool=st.sampled_from([208, 320, 1600]),
        depth=st.sampled_from([1, 2, 3]),
        chunk=st.sampled_from([-1, 0, 5, 16, 40]),
        slots=st.sampled_from([2, 4, 8]),
        workers=st.sampled_from([1, 1, 2, 3]),
        policy=st.sampled_from(["fcfs", "lpm"]),
        radix=st.booleans(),
        moving=st.booleans(),
        tiers=st.sampled_from([(0, 0), (0, 0), (3, 0), (40, 0), (0, 30), (6, 20)]),
        drafts=st.sampled_from([0, 0, 3, 20]),
        recalls=st.booleans(),
    )
    def start(
        self,
        page_size: int,
        tokens_in_pool: int,
        depth: int,
        chunk: int,
        slots: int,
        workers: int,
        policy: str,
        radix: bool,
        moving: bool,
        tiers: tuple[int, int],
        drafts: int,
        recalls: bool,
    ) -> None:
        self.moving, self.drafts = moving, drafts
        hello = {
            "kv_endpoints": ("ipc://kv",) if moving else (),
            "host_pages": tiers[0] if moving else 0,
            "disk_pages": tiers[1] if moving else 0,
            "max_drafts": drafts,
            "keeps_hidden": recalls,
            "page_size": page_size,
            "num_pages": tokens_in_pool // page_size,
            "max_inflight_steps": depth,
            "max_slots": slots,
            "max_batched_tokens": 48,
        }
        self.fleet = LocalFleet(
            workers=workers,
            hello=hello,
            page_size=page_size,
            chunked_prefill_size=chunk,
            schedule_policy=policy,
            disable_radix_cache=not radix,
            worker_grace=1e6,
        )
        self.detokenizers: list[LocalDetokenizer] = [self.fleet.detokenizer]
        self.sent: dict[str, dict[str, Any]] = {}
        self.aborted: set[str] = set()
        self.matched: dict[str, int] = {}
        self.next_id = 100
        let_guess(self.fleet, drafts)
        self._time_workers()
        self.fleet.turn()

    def _time_workers(self) -> None:
        """Computing takes so long that moving pages is worth it."""
        for worker in self.fleet.workers.values():
            worker.engine.ms_per_token = 5.0 if self.moving else self.drafts / 20

    # What frontends do

    @rule(
        family=st.integers(0, 2),
        shared=st.integers(1, 90),
        own=st.integers(0, 20),
        again=st.booleans(),
        max_tokens=st.sampled_from([0, 1, 2, 7, 17, 40]),
        priority=st.sampled_from([0, 0, 0, 1]),
        namespace=st.sampled_from([b"", b"", b"other"]),
        stops=st.booleans(),
        scores_from=st.sampled_from([-1, -1, -1, 0, 1, 9, 30]),
        logprobs=st.sampled_from([-1, -1, 0, 2]),
        group=st.sampled_from(["", "g"]),
    )
    def submit(
        self, family: int, shared: int, own: int, again: bool, max_tokens: int, stops: bool, **fields: Any
    ) -> None:
        prompt = FAMILIES[family][:shared] + tokens(own, seed=3 if again else self.next_id)
        self.next_id += 1
        answer = generate(prompt, max_tokens)
        stop_ids = (answer[2 * len(answer) // 3],) if stops and answer else ()
        scores_from = fields["scores_from"]
        rid = self.fleet.submit(
            prompt,
            max_tokens,
            priority=fields["priority"],
            namespace=fields["namespace"],
            stop_token_ids=stop_ids,
            prompt_logprobs_from=scores_from,
            logprobs=fields["logprobs"],
            group_id=fields["group"],
        )
        self.sent[rid] = {
            "answer": generate(prompt, max_tokens, stop_ids),
            "prompt": prompt,
            "scores_from": scores_from if scores_from < len(prompt) else -1,
            "logprobs": fields["logprobs"],
        }

    @rule(data=st.data(), family=st.integers(0, 2), shared=st.integers(20, 90), count=st.integers(2, 8))
    def burst(self, data: st.DataObject, family: int, shared: int, count: int) -> None:
        """Several at once with a common prefix, long enough to press on a small pool."""
        for _ in range(count):
            rid = self.fleet.submit(FAMILIES[family][:shared] + tokens(count, seed=self.next_id), 40)
            self.next_id += 1
            answer = generate(self.fleet.prompts[rid], 40)
            self.sent[rid] = {"answer": answer, "prompt": [], "scores_from": -1, "logprobs": -1}

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = self._live()
        if live:
            rid = data.draw(st.sampled_from(live))
            self.fleet.abort(rid)
            self.aborted.add(rid)

    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        finished = [rid for rid in self.sent if self._stream(rid) and self._stream(rid).finish is not None]
        if finished:
            rid = data.draw(st.sampled_from(finished))
            self._verify(rid)
            del self.sent[rid]
            self.fleet.acknowledge(rid)

    # What workers do

    @rule(data=st.data(), count=st.integers(10, 60))
    def work_much(self, data: st.DataObject, count: int) -> None:
        self.work(data, count)

    @rule(data=st.data(), count=st.integers(1, 6))
    def work(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            self.fleet.turn()
            if data.draw(st.booleans()):
                self.fleet.clock.advance(0.06)  # late enough for what is planned late
                self.fleet.heartbeats()
                self.fleet.turn()
            busy = [worker for worker in self.fleet.workers.values() if worker.commands]
            if busy:
                self.fleet.step(data.draw(st.sampled_from(busy)))

    @rule()
    def turn(self) -> None:
        self.fleet.turn()

    @precondition(lambda self: self.moving)
    @rule(data=st.data(), count=st.integers(1, 4))
    def transfers_go_on(self, data: st.DataObject, count: int) -> None:
        """Any side of any transfer does what it does next, well or not."""
        for _ in range(count):
            self.fleet.turn()
            workers = list(self.fleet.workers.values())
            waits = [(worker, number) for worker in workers for number in worker.receives]
            sends = [number for worker in workers for number in worker.sends]
            loads = [(worker, number) for worker in workers for number in worker.loads]
            what = data.draw(st.sampled_from([*["ready", "send", "load"] * 2, "store", "spoil", "unload", "cancels"]))
            if what == "cancels":
                self.fleet.kv_obey_cancels()
            elif what == "store":
                for worker in workers:
                    self.fleet.kv_store(worker)
            elif what in ("load", "unload") and loads:
                self.fleet.kv_load(*data.draw(st.sampled_from(loads)), spoil=what == "unload")
            elif what == "ready" and waits:
                self.fleet.kv_ready(*data.draw(st.sampled_from(waits)))
            elif what in ("send", "spoil") and sends:
                self.fleet.kv_move(data.draw(st.sampled_from(sends)), spoil=what == "spoil")

    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        worker = self._any_worker(data)
        if worker is not None:
            self.fleet.lose_worker(worker)
            self._forgive()

    @rule(data=st.data())
    def worker_faults(self, data: st.DataObject) -> None:
        worker = self._any_worker(data)
        if worker is not None:
            self.fleet.from_worker(worker, WorkerFault(worker.hello.incarnation, 0, "oom", "out of memory"))
            self.fleet.turn()
            self.fleet.lose_worker(worker)
            self._forgive()

    @rule(data=st.data())
    def worker_leaves(self, data: st.DataObject) -> None:
        worker = self._any_worker(data)
        if worker is not None:
            self.fleet.from_worker(worker, WorkerDrain(worker.hello.incarnation, 1e6))

    @precondition(lambda self: len(self.fleet.workers) < 3)
    @rule()
    def worker_joins(self) -> None:
        self.next_id += 1
        self.fleet.add_worker(f"w{self.next_id % 3}", incarnation=self.next_id)
        self._time_workers()
        self.fleet.turn()
        self.fleet.workers = {
            key: worker for key, worker in self.fleet.workers.items() if worker.reset is None and worker.drain is None
        }
        self._forgive()

    # What detokenizers do

    @rule(data=st.data())
    def detokenizer_dies(self, data: st.DataObject) -> None:
        if self.detokenizers:
            lost = data.draw(st.sampled_from(self.detokenizers))
            self.detokenizers.remove(lost)
            del self.fleet.detokenizer_edge.peers[lost.key.encode()]
            if data.draw(st.booleans()):
                self.fleet.scheduler.disconnected(self.fleet.core.probe_detokenizers)

    @precondition(lambda self: len(self.detokenizers) < 2)
    @rule()
    def detokenizer_joins(self) -> None:
        self.next_id += 1
        self.detokenizers.append(self.fleet.add_detokenizer(f"d{self.next_id}/{self.next_id}"))

    @rule(data=st.data())
    def stop_string_matches(self, data: st.DataObject) -> None:
        candidates = [rid for rid in self._live() if self._stream(rid) and self._stream(rid).tokens]
        if not candidates:
            return
        rid = data.draw(st.sampled_from(candidates))
        detokenizer = next(d for d in self.detokenizers if d.streams.get(rid) is self._stream(rid))
        cut = data.draw(st.integers(1, len(self._stream(rid).tokens)))
        self.fleet.from_detokenizer(detokenizer, StopMatched(rid, cut, "stop"))
        self.fleet.turn()
        finish = self.fleet.request(rid).finish
        if finish is not None and finish.matched_string:
            self.matched[rid] = cut

    @rule(really=st.sampled_from([False] * 7 + [True]))
    def tokenizer_begins_a_new_life(self, really: bool) -> None:
        """Whoever was connected to the old one is gone, so its requests end; rare, since it ends everything."""
        if not really:
            return
        self.fleet.turn()
        lost = self._live()
        self.next_id += 1
        self.fleet.tokenizer = self.fleet.add_tokenizer(f"t/{self.next_id}")
        self.fleet.turn()
        requests = self.fleet.core.lifecycle.requests
        assert not any(requests[rid].live for rid in lost if rid in requests)
        self.sent.clear()

    # What operators do

    @rule(name=st.sampled_from(["flush_cache", "pause", "continue", "requests", "workers", "tree"]))
    def operate(self, name: str) -> None:
        done = self.fleet.operate(name)
        assert done.ok or name == "flush_cache"

    @rule(seconds=st.sampled_from([0.3, 1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.fleet.clock.advance(seconds)
        self.fleet.heartbeats()
        self.fleet.turn()

    # What must be true in the end

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        fleet = self.fleet
        fleet.operate("continue")
        if all(worker.draining for worker in fleet.core.fleet):
            fleet.add_worker("last", incarnation=10_000)
        if not self.detokenizers:
            self.detokenizer_joins()
        fleet.scheduler.disconnected(fleet.core.probe_detokenizers)
        fleet.run()
        fleet.run()
        fleet.run()
        for rid in self.sent:
            self._verify(rid)
        assert fleet.core.lifecycle.num_live == 0
        for worker in fleet.core.fleet:
            free = worker.pool.free + fleet.core.tree.evictable_pages(worker.key)
            assert free == worker.pool.num_pages, "pages are lost"
        assert fleet.core.metrics.counters["internal_errors"] == 0
        assert not fleet.core.migration.transfers

    def _verify(self, rid: str) -> None:
        expected = self.sent[rid]
        request = self.fleet.request(rid)
        stream = self._stream(rid)
        answer = expected["answer"]
        if rid in self.matched:
            assert request.output.tolist() == answer[: self.matched[rid]]
            return
        assert stream is not None, f"{rid} has no stream"
        assert stream.finish is not None, f"{rid} has not ended: {request.state}"
        if stream.finish.reason is FinishReason.ABORT:
            assert rid in self.aborted
            assert stream.tokens == answer[: len(stream.tokens)]
            return
        assert stream.finish.reason is not FinishReason.ERROR, f"{rid}: {stream.finish}"
        assert stream.tokens == answer, f"{rid}: {stream.tokens} instead of {answer}"
        prompt = expected["prompt"]
        if expected["logprobs"] >= 0 and answer:
            whole = prompt + answer
            assert stream.logprobs.tolist() == expected_scores(whole, len(prompt), len(whole)), f"{rid}: wrong scores"
        if expected["scores_from"] >= 0:
            assert stream.prompt_scores is not None, f"{rid}: no prompt scores"
            assert stream.prompt_scores.count == len(prompt) - expected["scores_from"]

    def _live(self) -> list[str]:
        requests = self.fleet.core.lifecycle.requests
        return [rid for rid in self.sent if rid in requests and requests[rid].state is not State.FINISHED]

    def _stream(self, rid: str) -> Any:
        """The record of the detokenizer that has the request now; a lost one does not count."""
        request = self.fleet.core.lifecycle.requests.get(rid)
        if request is None or request.detokenizer is None:
            return None
        for detokenizer in self.detokenizers:
            if detokenizer.key == request.detokenizer.key:
                return detokenizer.streams.get(rid)
        return None

    def _any_worker(self, data: st.DataObject) -> LocalWorker | None:
        workers = [w for w in self.fleet.workers.values() if w.key.encode() in self.fleet.worker_edge.peers]
        return data.draw(st.sampled_from(workers)) if workers else None

    def _forgive(self) -> None:
        """Workers die of themselves here: no request is to blame."""
        self.fleet.turn()
        for request in self.fleet.core.lifecycle.requests.values():
            request.faults = 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
