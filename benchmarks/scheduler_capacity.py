"""How many tokens per second one scheduler core carries: the real scheduler process between simulated peers.

    python benchmarks/scheduler_capacity.py [--workers 8] [--rows 64] [--step-ms 4] [--seconds 20]

The scheduler is started as in production: real sockets, radix tree, pages, the edge to a detokenizer. Workers run in
one process and frontend and detokenizer in another; they compute nothing: a worker answers each step after
`--step-ms` with ready-made tokens. Prompts share system prefixes and differ behind them. The scheduler's CPU time is
read from the operating system, so a busy machine slows the run down but does not change what a token costs.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import uvloop  # noqa: E402

from shared import ints  # noqa: E402
from shared.messages.control import Heartbeat, Hello, Ping, Pong  # noqa: E402
from shared.messages.edges import ToDetokenizer, ToTokenizer, ToWorker  # noqa: E402
from shared.messages.request import GenerateRequest, SamplingParams, StreamAck, SystemStatus  # noqa: E402
from shared.messages.step import StepCommand, StepResult, WorkerHello, WorkerWelcome  # noqa: E402
from shared.messages.stream import StreamOpen, TokenChunks  # noqa: E402
from shared.transport import Client, Frames  # noqa: E402

VOCAB = 32_000
POOL_TOKENS = 400_000
PROFILED = """
import cProfile, time
from services.scheduler.__main__ import main
profile = cProfile.Profile(time.thread_time)
profile.runcall(main)
profile.dump_stats({path!r})
"""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class Worker:
    """Answers every command `step_s` after the one before, as a device would."""

    def __init__(self, endpoint: str, index: int, args: argparse.Namespace) -> None:
        self._step_s = args.step_ms / 1e3
        self._hello = WorkerHello(
            worker_id=f"w{index}",
            incarnation=1,
            model="none",
            model_digest="none",
            page_size=16,
            num_pages=POOL_TOKENS // 16,
            max_slots=args.rows,
            max_batched_tokens=args.step_tokens,
            max_context=32_768,
            max_inflight_steps=2,
            vocab_size=VOCAB,
            device="none",
            kv_dtype="none",
            kv_layout="none",
            kv_bytes_per_page=0,
        )
        self._loop = asyncio.get_running_loop()
        self._queue: deque[StepCommand] = deque()
        self._epoch = -1
        self._tokens = ints.pack(random.Random(index).choices(range(VOCAB), k=4096))
        self.client: Client[Any] = Client(endpoint, f"w{index}/1", ToWorker, self._receive)

    def beat(self) -> None:
        if self._epoch < 0:
            self.client.try_send(self._hello)
        self.client.try_send(Heartbeat(self._hello.worker_id, 1))

    def _receive(self, message: Any, frames: Frames) -> None:
        if isinstance(message, StepCommand):
            self._queue.append(message)
            if len(self._queue) == 1:
                self._loop.call_later(self._step_s, self._finish)
        elif isinstance(message, WorkerWelcome):
            self._epoch = message.epoch
        elif isinstance(message, Ping):
            self.client.try_send(Pong(message.nonce))

    def _finish(self) -> None:
        command = self._queue.popleft()
        if self._queue:
            self._loop.call_later(self._step_s, self._finish)
        samples = len(command.decode_slots) // 4 + sum(row.sample for row in command.prefills)
        start = 4 * (command.step_id % 997)
        tokens = self._tokens[start : start + 4 * samples]
        self.client.send(StepResult(command.step_id, self._epoch, 1, tokens))


class Load:
    """Frontend and detokenizer in one: keeps so many requests alive, and counts what comes back."""

    def __init__(self, folder: str, args: argparse.Namespace) -> None:
        self._args = args
        self._random = random.Random(0)
        draw = self._random.choices
        self._prefixes = [draw(range(VOCAB), k=args.prefix) for _ in range(args.prefixes)]
        self._live = 0
        self._count = 0
        self._chunks_handled = 0
        self.tokens = 0
        self.finished = 0
        self.rejected = 0
        self.status: SystemStatus | None = None
        self.frontend: Client[Any] = Client(f"ipc://{folder}/t", "t/1", ToTokenizer, self._from_scheduler)
        self.detokenizer: Client[Any] = Client(f"ipc://{folder}/d", "d/1", ToDetokenizer, self._stream)

    def beat(self) -> None:
        self.frontend.try_send(Hello("tokenizer", "t", 1))
        self.detokenizer.try_send(Hello("detokenizer", "d", 1, "ipc://none"))
        self.detokenizer.try_send(Heartbeat("d", 1, gauges={"chunks_handled": float(self._chunks_handled)}))

    def fill(self) -> None:
        while self._live < self._args.workers * self._args.rows * self._args.pressure:
            self._submit()

    def _submit(self) -> None:
        own = self._random.choices(range(VOCAB), k=self._random.randint(16, 96))
        prompt = ints.pack(self._random.choice(self._prefixes) + own)
        length = self._random.randint(self._args.output // 2, self._args.output * 3 // 2)
        self._count += 1
        self._live += 1
        params = SamplingParams(max_tokens=length, temperature=0.7, stop_token_ids=(VOCAB + 1, VOCAB + 2))
        self.frontend.send(GenerateRequest(f"{self._count:032x}", "t/1", prompt, params))

    def _from_scheduler(self, message: Any, frames: Frames) -> None:
        if isinstance(message, SystemStatus):
            self.status = message
        elif isinstance(message, Ping):
            self.frontend.try_send(Pong(message.nonce))

    def _stream(self, message: Any, frames: Frames) -> None:
        if isinstance(message, TokenChunks):
            self._chunks_handled += 1
            done = []
            for chunk in message.chunks:
                self.tokens += len(chunk.token_ids) // 4
                if chunk.finish is not None:
                    done.append(chunk.request_id)
            if done:
                self.frontend.send(StreamAck(tuple(done)))
                self.finished += len(done)
                self._live -= len(done)
                self.fill()
        elif isinstance(message, StreamOpen):
            pass
        elif isinstance(message, Ping):
            self.detokenizer.try_send(Pong(message.nonce))


def run_workers(folder: str, args: argparse.Namespace) -> None:
    async def live() -> None:
        workers = [Worker(f"ipc://{folder}/w", index, args) for index in range(args.workers)]
        while True:
            for worker in workers:
                worker.beat()
            await asyncio.sleep(0.5)

    uvloop.run(live())


def run_load(folder: str, args: argparse.Namespace, results: Connection) -> None:
    async def live() -> None:
        load = Load(folder, args)
        beating = asyncio.create_task(beat(load))
        while load.status is None or len(load.status.workers) < args.workers or not load.status.ready:
            await asyncio.sleep(0.1)
        load.fill()
        await asyncio.sleep(args.warm_up)
        pid = args.scheduler_pid
        tokens, cpu, finished, started = load.tokens, cpu_seconds(pid), load.finished, time.monotonic()
        counters = dict(load.status.counters)
        await asyncio.sleep(args.seconds)
        seconds = time.monotonic() - started
        last = load.status.counters
        results.send(
            {
                "tokens": load.tokens - tokens,
                "cpu": cpu_seconds(pid) - cpu,
                "seconds": seconds,
                "finished": load.finished - finished,
                "steps": last["steps"] - counters["steps"],
                "hits": last["cache_hit_tokens"] - counters["cache_hit_tokens"],
                "misses": last["cache_miss_tokens"] - counters["cache_miss_tokens"],
                "errors": last["internal_errors"] + last["requests_failed"] + last["workers_lost"],
                "running": load.status.num_running,
                "waiting": load.status.num_waiting,
            }
        )
        beating.cancel()

    uvloop.run(live())


async def beat(load: Load) -> None:
    while True:
        load.beat()
        await asyncio.sleep(0.5)


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def report(result: dict[str, float], args: argparse.Namespace) -> None:
    tokens, cpu = result["tokens"], result["cpu"]
    prompt = result["hits"] + result["misses"]
    print(f"workers x rows            {args.workers} x {args.rows}, {args.step_ms} ms per step, run-ahead 2")
    print(f"output tokens             {tokens:.0f} in {result['seconds']:.1f} s = {tokens / result['seconds']:,.0f}/s")
    print(f"requests finished         {result['finished']:.0f}, steps {result['steps']:.0f}")
    print(f"prompt tokens             {prompt:.0f}, of these cached {result['hits'] / max(prompt, 1):.1%}")
    print(f"running / waiting at end  {result['running']:.0f} / {result['waiting']:.0f}")
    print(f"scheduler CPU             {cpu:.2f} s = {cpu / result['seconds']:.0%} of one core")
    print(f"scheduler CPU per token   {cpu / tokens * 1e6:.2f} us")
    print(f"one core carries          {tokens / cpu:,.0f} tokens/s")
    print(f"errors                    {result['errors']:.0f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=4.0)
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warm-up", type=float, default=5.0)
    parser.add_argument("--prefixes", type=int, default=16, help="different system prompts")
    parser.add_argument("--prefix", type=int, default=512, help="tokens of one")
    parser.add_argument("--output", type=int, default=128, help="mean tokens of an answer")
    parser.add_argument("--pressure", type=float, default=1.1, help="live requests over seats")
    parser.add_argument("--profile", default="", help="write a profile of the scheduler's CPU time there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="radixfleet-") as folder:
        command = [sys.executable, "-m", "services.scheduler"]
        if args.profile:
            command = [sys.executable, "-c", PROFILED.format(path=args.profile)]
        flags = [f"--tokenizer-bind=ipc://{folder}/t", f"--detokenizer-bind=ipc://{folder}/d"]
        flags += [f"--worker-bind=ipc://{folder}/w", "--log-level=warning", "--drain-timeout=0.1"]
        scheduler = subprocess.Popen([*command, *flags], cwd=ROOT)
        args.scheduler_pid = scheduler.pid
        receiver, sender = multiprocessing.Pipe(duplex=False)
        workers = multiprocessing.Process(target=run_workers, args=(folder, args), daemon=True)
        load = multiprocessing.Process(target=run_load, args=(folder, args, sender), daemon=True)
        workers.start()
        load.start()
        if not receiver.poll(args.seconds + args.warm_up + 60):
            print("no result", file=sys.stderr)
            return 1
        report(receiver.recv(), args)
        for process in (workers, load):
            process.terminate()
            process.join(5)
        scheduler.terminate()
        scheduler.wait(30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
