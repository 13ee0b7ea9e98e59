"""200 streams at once while every kind of service is killed and frozen, in every phase: the answers stay the same.

    python scripts/chaos.py [--minutes 5] [--streams 200] [--workers 3] [--model PATH] [--write docs/chaos.md]

Greedy, seeded, constrained, n = 2, stop strings held back for long, clients that leave. Answers are compared in fp32
with those of the undisturbed server. A kill waits for a moment in which it does damage; the report says which kind
of service was hit in which phase. Ends with 1 if an answer differed, a page was lost, something was left behind, or a
kind was never hit in one of the phases. The seed repeats a run's choices.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from radixfleet.local_server import LocalServer  # noqa: E402
from radixfleet.models import resolve  # noqa: E402
from scripts.soak import RETRY_STATUS, outcome, settled  # noqa: E402
from shared.transport import PeerBusy  # noqa: E402
from tests.fakes import FakeFrontend  # noqa: E402
from tests.gpu_worker.tiny_models import save_model  # noqa: E402
from tests.system.processes import descendants  # noqa: E402
from tests.system.prompts import long_prompt  # noqa: E402

SERVICES = ("gpu_worker", "detokenizer", "tokenizer", "scheduler")
PHASES = ("mid-prefill", "masked decode", "transfer", "stop string held back")
FAMILIES = 16
PATIENCE_S = 12.0
READY_S = 90.0
TINY = {
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "head_dim": 64,
}
CHOICES = r"(yes|no|perhaps)(, (yes|no|perhaps)){4,9}\."


@dataclass(eq=False)
class Case:
    """A request with one right answer. `held` is the text a client has while a stop string may still come."""

    kind: str
    body: dict[str, Any]
    expected: Any = None
    held: str = "\0"


@dataclass
class Tally:
    answers: collections.Counter[str] = field(default_factory=collections.Counter)
    left: int = 0
    again: collections.Counter[str] = field(default_factory=collections.Counter)
    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    landed: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Live:
    case: Case
    text: str = ""


class Chaos:
    def __init__(self, server: LocalServer, options: argparse.Namespace) -> None:
        self.server = server
        self.options = options
        self.tally = Tally()
        self.live: dict[str, Live] = {}
        self.cases: list[Case] = []
        self._count = 0
        self._front: FakeFrontend | None = None

    # Requests

    def _params(self, rng: random.Random, **more: Any) -> dict[str, Any]:
        return {"max_new_tokens": rng.randint(12, 28), "ignore_eos": True, "temperature": 0, **more}

    async def prepare(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        """The undisturbed answers."""
        for family in range(FAMILIES):
            text = f"Story number {family}: {long_prompt(200)} Part {family}:"
            seeded = {"temperature": 0.8, "top_k": 40, "seed": 100 + family}
            constrained = {"regex": CHOICES, "ignore_eos": False, "max_new_tokens": 48}
            ways = [
                Case("greedy", {"text": text, "sampling_params": self._params(rng)}),
                Case("n = 2", {"text": text, "sampling_params": self._params(rng, **{**seeded, "n": 2})}),
                Case("constrained", {"text": text, "sampling_params": self._params(rng, **constrained)}),
                Case("seeded", {"text": text, "sampling_params": self._params(rng, **seeded)}),
                Case("constrained", {"text": text, "sampling_params": self._params(rng, **{**constrained, **seeded})}),
                Case("greedy", {"text": text + " and", "sampling_params": self._params(rng, frequency_penalty=0.5)}),
            ]
            self.cases += ways[family % 2 :: 2]
        await self._ask_all(client)
        for case in [case for case in self.cases if case.kind == "greedy"]:
            self.cases.append(self._held_back(case))
        await self._ask_all(client)

    async def _ask_all(self, client: httpx.AsyncClient) -> None:
        async def ask(case: Case) -> None:
            response = await client.post("/generate", json=case.body)
            response.raise_for_status()
            case.expected = outcome(response.json())

        for start in range(0, len(self.cases), 8):
            await asyncio.gather(*(ask(case) for case in self.cases[start : start + 8] if case.expected is None))

    @staticmethod
    def _held_back(case: Case) -> Case:
        """The same request with a stop string that begins early in its answer, goes on for long and never ends."""
        text = case.expected[0][0]
        cut = len(text) // 5
        params = {**case.body["sampling_params"], "stop": [text[cut : 4 * len(text) // 5] + "\0"]}
        return Case("stop string", {**case.body, "sampling_params": params}, held=text[:cut])

    async def customer(self, client: httpx.AsyncClient, rng: random.Random, end: float) -> None:
        while time.monotonic() < end:
            case = rng.choice(self.cases)
            leaves = rng.random() < 0.1
            try:
                got = await self._answer(client, case, rng.randint(1, 5) if leaves else 0, rng.random() < 0.5)
            except Exception as error:
                self.tally.wrong.append(f"{case.kind}: {error!r}")
                continue
            if leaves:
                self.tally.left += 1
            elif got != case.expected:
                self.tally.wrong.append(f"{case.kind}: got {got} expected {case.expected}")
            else:
                self.tally.answers[case.kind] += 1

    async def _answer(self, client: httpx.AsyncClient, case: Case, leave_after: int, stream: bool) -> Any:
        """The outcome, asked for again where the door was closed or the connection died with its tokenizer."""
        while True:
            self._count += 1
            rid = f"c{self._count}"
            try:
                if case.kind == "n = 2" or not (stream or leave_after or case.kind == "stop string"):
                    response = await client.post("/generate", json=case.body)
                    if response.status_code not in RETRY_STATUS:
                        response.raise_for_status()
                        return outcome(response.json())
                    self.tally.again["503 or 429"] += 1
                else:
                    self.live[rid] = Live(case)
                    last = await self._stream(client, rid, leave_after)
                    if last is not None:
                        return outcome(last)
            except (httpx.TransportError, ConnectionError):
                self.tally.again["connection lost"] += 1
            finally:
                self.live.pop(rid, None)
            await asyncio.sleep(0.5)

    async def _stream(self, client: httpx.AsyncClient, rid: str, leave_after: int) -> Any:
        live = self.live[rid]
        last: dict[str, Any] = {}
        async with client.stream("POST", "/generate", json={**live.case.body, "rid": rid, "stream": True}) as response:
            if response.status_code in RETRY_STATUS:
                self.tally.again["503 or 429"] += 1
                return None
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                last = json.loads(line[6:])
                if "error" in last:
                    raise RuntimeError(f"{rid}: {last['error']}")
                live.text = last["text"]
                leave_after -= 1
                if not leave_after:
                    return last
        if not last or last["meta_info"]["finish_reason"] is None:
            raise ConnectionError("the stream ended before its answer")
        return last

    # Kills

    async def reaper(self, rng: random.Random, end: float) -> None:
        while end - time.monotonic() > 15:
            missing = [s for s in SERVICES if any(not self.tally.landed[s, p] for p in PHASES)]
            service = rng.choice(missing or SERVICES)
            await self._strike(service, rng, freeze=rng.random() < 0.25)
            await self._until_ready()
            await asyncio.sleep(rng.uniform(2, 5))

    async def _strike(self, service: str, rng: random.Random, *, freeze: bool) -> None:
        """Wait for a phase that is still missing, then kill."""
        missing = {phase for phase in PHASES if not self.tally.landed[service, phase]}
        until = time.monotonic() + PATIENCE_S
        while True:
            victim, phases = await self._look(service, rng)
            if victim and (phases & missing or not missing or time.monotonic() > until):
                break
            if time.monotonic() > 2 * PATIENCE_S + until:
                return
            await asyncio.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGSTOP if freeze else signal.SIGKILL)
            self.tally.kills[f"{'SIGSTOP' if freeze else 'SIGKILL'} {service}"] += 1
            for phase in phases:
                self.tally.landed[service, phase] += 1

    async def _look(self, service: str, rng: random.Random) -> tuple[int, set[str]]:
        """A victim and the phases of what it has in work; for all but workers that is everything."""
        pids = {p: c for p, c in descendants(self.server.process.pid).items() if f"services.{service}" in c}
        pids = {p: c for p, c in pids.items() if "constraint" not in c}
        if not pids:
            return 0, set()
        victim = rng.choice(sorted(pids))
        name = _service_id(victim) if service == "gpu_worker" else ""
        try:
            requests, workers = await asyncio.wait_for(self._picture(), 3)
        except (TimeoutError, OSError):
            return victim, set()
        phases = set()
        for row in requests:
            if row["state"] != "running" or name not in ("", row["worker"]):
                continue
            live = self.live.get(row["request_id"])
            if not row["output_tokens"]:
                phases.add("mid-prefill")
            elif live is not None and live.case.kind == "constrained":
                phases.add("masked decode")
            if live is not None and live.text == live.case.held:
                phases.add("stop string held back")
        if any(row["transfers"] for row in workers if name in ("", row["worker_id"])):
            phases.add("transfer")
        return victim, phases

    async def _picture(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """What the scheduler says of every request and worker. Raises OSError while it cannot be asked."""
        if self._front is None:
            self._front = FakeFrontend(f"ipc://{_run_folder(self.server)}/tokenizer.sock", "chaos", time.time_ns())
        try:
            await self._front.greeted.wait()
            requests = json.loads((await self._front.operate("requests")).body)["requests"]
            return requests, json.loads((await self._front.operate("workers")).body)["workers"]
        except (PeerBusy, TimeoutError, asyncio.CancelledError) as error:
            front, self._front = self._front, None
            await front.close()
            raise OSError("the scheduler does not answer") from error

    async def _until_ready(self) -> None:
        until = time.monotonic() + READY_S
        async with httpx.AsyncClient(base_url=self.server.url, timeout=5) as client:
            while time.monotonic() < until:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get("/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.3)
        self.tally.wrong.append(f"not ready within {READY_S:g} s")

    async def run(self) -> list[str]:
        rng = random.Random(self.options.seed)
        problems: list[str] = []
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=300, limits=limits) as client:
            await self.prepare(client, rng)
            print(f"{len(self.cases)} cases, {self.options.streams} streams", flush=True)
            files = _open_files(self.server.process.pid)
            end = time.monotonic() + 60 * self.options.minutes
            seeds = [rng.getrandbits(32) for _ in range(self.options.streams)]
            await asyncio.gather(
                self.reaper(random.Random(rng.getrandbits(32)), end),
                *(self.customer(client, random.Random(seed), end) for seed in seeds),
            )
            await self._until_ready()
            await settled(client, problems)
            if self._front is not None:
                await self._front.close()
        if _open_files(self.server.process.pid) > files + 8:
            problems.append(f"the launcher has {_open_files(self.server.process.pid)} open files, had {files}")
        for service in SERVICES:
            for phase in PHASES:
                if not self.tally.landed[service, phase]:
                    problems.append(f"{service} was never hit in: {phase}")
        return problems


def _service_id(pid: int) -> str:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RADIXFLEET_SERVICE_ID="):
                return entry.split(b"=", 1)[1].decode()
    return "?"


def _run_folder(server: LocalServer) -> str:
    for pid, command in descendants(server.process.pid).items():
        if "services." in command:
            with contextlib.suppress(OSError):
                for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    if entry.startswith(b"RADIXFLEET_RUN_DIR="):
                        return entry.split(b"=", 1)[1].decode()
    raise OSError("no run folder")


def _open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def report(options: argparse.Namespace, tally: Tally, problems: list[str]) -> str:
    command = f"--minutes {options.minutes:g} --seed {options.seed} --streams {options.streams}"
    command += f" --workers {options.workers}"
    command += f" --model {options.model}" if options.model else " --tiny" if options.tiny else ""
    lines = [
        "# Last chaos run\n",
        f"`python scripts/chaos.py {command}` on {time.strftime('%Y-%m-%d')}, {platform.machine()},"
        f" {os.cpu_count()} cores\n",
        "| | |\n|---|---|",
        *(f"| answers compared, {kind} | {count} |" for kind, count in sorted(tally.answers.items())),
        f"| clients that left in mid-stream | {tally.left} |",
        *(f"| asked again: {why} | {count} |" for why, count in sorted(tally.again.items())),
        *(f"| {kind} | {count} |" for kind, count in sorted(tally.kills.items())),
        f"| answers that differed or failed | {len(tally.wrong)} |",
        f"| other problems | {len(problems)} |\n",
        f"| kills that landed in | {' | '.join(PHASES)} |\n|---|{'---|' * len(PHASES)}",
        *(f"| {s} | {' | '.join(str(tally.landed[s, p]) for p in PHASES)} |" for s in SERVICES),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--model", default="", help="as for serve --model-path; default: the small model")
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers: for a busy machine")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    flags = ["--dtype", "float32", "--max-total-tokens", "6144", "--workers", str(options.workers)]
    flags += ["--log-level", "warning", "--frozen-timeout", "20", "--worker-grace", "180", "--drain-timeout", "60"]
    with contextlib.ExitStack() as stack:
        if options.model:
            flags += ["--model-path", options.model]
        elif options.tiny:
            flags += ["--model-path", str(tiny_model(Path(stack.enter_context(tempfile.TemporaryDirectory()))))]
        return trial(LocalServer(*flags, log_file=Path(os.environ.get("CHAOS_LOG", os.devnull))), options)


def tiny_model(folder: Path) -> Path:
    """Random weights behind the small model's tokenizer."""
    small = resolve(None)
    for file in small.iterdir():
        if "token" in file.name or file.name in ("vocab.json", "merges.txt", "generation_config.json"):
            shutil.copy(file, folder)
    save_model("llama", folder, **TINY)
    return folder


def trial(server: LocalServer, options: argparse.Namespace) -> int:
    with server:
        chaos = Chaos(server, options)
        problems = asyncio.run(chaos.run())
        children = descendants(server.process.pid)
        if server.stop() != 0:
            problems.append("the server did not end with 0")
    problems += [f"left behind: {command}" for pid, command in children.items() if Path(f"/proc/{pid}").exists()]
    text = report(options, chaos.tally, problems)
    print(text)
    for line in (*chaos.tally.wrong, *problems):
        print(line[:600])
    if options.write:
        options.write.write_text(text)
    return 1 if chaos.tally.wrong or problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
