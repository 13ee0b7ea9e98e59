"""Load on any server with the OpenAI API: five workloads, one JSON line each.

    python benchmarks/load.py --url http://127.0.0.1:30000 --model NAME --tokenizer FOLDER --dialect radixfleet
        [--workloads w1,w2,w3,w4,w5] [--repeats 2] [--scale 1.0] [--out FILE]

`ttft`: from the request to the first piece with text. `out_tok`: what the server's usage says, else the tokenizer's
count of the answer. `wall_s`: from the first request to the last answer. Prompts hang on the seed and the repeat alone:
every server gets the same ones, and no repeat finds its prompts in the cache of another. Leaves what the workloads are
to workloads.py, starting servers to peers.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp
from tokenizers import Tokenizer

Json = dict[str, Any]

ATTEMPTS = 3

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
_SCHEMA = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
}


@dataclass(frozen=True)
class Dialect:
    """What servers say differently: fields for exactly n tokens, and for an answer that is a PERSON.

    `keeps`: whether it keeps connections open; one that closes them while the next request is written gets new ones.
    """

    exact: Callable[[int], Json]
    person: Json = field(default_factory=lambda: _SCHEMA)
    keeps: bool = True


DIALECTS = {
    "radixfleet": Dialect(lambda n: {"ignore_eos": True, "min_tokens": n}),
    "vllm": Dialect(lambda n: {"ignore_eos": True, "min_tokens": n}),
    "llamacpp": Dialect(lambda _: {"ignore_eos": True, "cache_prompt": True}, keeps=False),
    "openvino": Dialect(lambda _: {"ignore_eos": True}),
}


@dataclass
class Answer:
    """One request's outcome; times are perf_counter seconds."""

    started: float
    pieces: list[str] = field(default_factory=list)
    stamps: list[float] = field(default_factory=list)  # of the pieces with text
    ended: float = 0.0
    out_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ttft(self) -> float:
        return (self.stamps[0] if self.stamps else self.ended) - self.started

    @property
    def seconds(self) -> float:
        return self.ended - self.started


class Client:
    """Streams completions and chats; a context manager."""

    def __init__(self, url: str, model: str, dialect: Dialect, count: Callable[[str], int]) -> None:
        self._url, self._model, self.dialect, self._count = url.rstrip("/"), model, dialect, count
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        # Some servers drop idle connections after seconds; ours are dropped before.
        if self.dialect.keeps:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1.5)
        else:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=900))
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        assert self._session is not None
        await self._session.close()

    async def chat(
        self, messages: list[Json], tokens: int, *, exact: bool = False, fields: Json | None = None
    ) -> Answer:
        return await self._ask("/v1/chat/completions", {"messages": messages, **(fields or {})}, tokens, exact)

    async def complete(self, prompt: str, tokens: int, *, exact: bool = False) -> Answer:
        return await self._ask("/v1/completions", {"prompt": prompt}, tokens, exact)

    async def _ask(self, path: str, fields: Json, tokens: int, exact: bool) -> Answer:
        body = {
            "model": self._model,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
            **(self.dialect.exact(tokens) if exact else {}),
        }
        answer = Answer(time.perf_counter())
        try:
            await self._attempts(path, body, answer)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.perf_counter()
        answer.out_tokens = answer.out_tokens or self._count(answer.text)
        if not answer.out_tokens and not answer.error:
            answer.error = "an empty answer"
        return answer

    async def _attempts(self, path: str, body: Json, answer: Answer) -> None:
        """A kept connection may have been closed by the server just now; its time counts."""
        for attempt in range(ATTEMPTS):
            try:
                return await self._stream(path, body, answer)
            except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
                if answer.pieces or attempt + 1 == ATTEMPTS:
                    raise

    async def _stream(self, path: str, body: Json, answer: Answer) -> None:
        assert self._session is not None
        async with self._session.post(self._url + path, json=body) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return
            async for line in response.content:
                if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                    _take(json.loads(line[5:]), answer)


def _take(event: Json, answer: Answer) -> None:
    now = time.perf_counter()
    if event.get("error"):
        answer.error = str(event["error"])
    usage = event.get("usage") or {}
    answer.out_tokens = usage.get("completion_tokens") or answer.out_tokens
    answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or answer.cached_tokens
    for choice in event.get("choices") or ():
        piece = choice.get("text") or (choice.get("delta") or {}).get("content")
        if piece:
            answer.pieces.append(piece)
            answer.stamps.append(now)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the ranks; 0 of nothing."""
    if not values:
        return 0.0
    ordered, at = sorted(values), (len(values) - 1) * percent / 100
    low = ordered[int(at)]
    return low + (ordered[min(int(at) + 1, len(ordered) - 1)] - low) * (at - int(at))


def summary(name: str, answers: list[Answer]) -> Json:
    """One line of results; milliseconds where the name says so."""
    good = [answer for answer in answers if not answer.error]
    wall = max(answer.ended for answer in answers) - min(answer.started for answer in answers)
    tokens = sum(answer.out_tokens for answer in good)
    gaps = [b - a for answer in good for a, b in zip(answer.stamps, answer.stamps[1:], strict=False)]
    line: Json = {"workload": name, "requests": len(answers), "errors": len(answers) - len(good)}
    line |= {"wall_s": wall, "out_tok": tokens, "out_tok_s": tokens / wall}
    line["cached_tok"] = sum(answer.cached_tokens for answer in good)
    for label, values in (("ttft", [a.ttft for a in good]), ("itl", gaps), ("latency", [a.seconds for a in good])):
        for percent in (50, 95):
            line[f"{label}_p{percent}_ms"] = 1e3 * percentile(values, percent)
    if len(good) < len(answers):
        line["first_error"] = next(answer.error for answer in answers if answer.error)
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in line.items()}


async def run(
    url: str,
    model: str,
    tokenizer: Path,
    dialect: str,
    *,
    workloads: Sequence[str],
    repeats: int = 1,
    seed: int = 1,
    scale: float = 1.0,
    say: Callable[[Json], None] = lambda _: None,
) -> list[Json]:
    """All lines of `repeats` runs of the named workloads."""
    from benchmarks.workloads import WORKLOADS, Plan, Words

    words = Words(Tokenizer.from_file(str(tokenizer / "tokenizer.json")))
    lines = []
    async with Client(url, model, DIALECTS[dialect], words.count) as client:
        for repeat in range(repeats):
            for name in workloads:
                async for line in WORKLOADS[name](client, Plan(words, f"{seed}:{repeat}:{name}", scale)):
                    lines.append({"repeat": repeat, **line})
                    say(lines[-1])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--dialect", choices=tuple(DIALECTS), default="radixfleet")
    parser.add_argument("--workloads", default="w1,w2,w3,w4,w5")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of requests and conversations")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    def say(line: Json) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(text + "\n")

    wished = options.workloads.split(",")
    common = {"workloads": wished, "repeats": options.repeats, "seed": options.seed, "scale": options.scale, "say": say}
    lines = asyncio.run(run(options.url, options.model, options.tokenizer, options.dialect, **common))
    raise SystemExit(1 if any(line["errors"] for line in lines) else 0)


if __name__ == "__main__":
    main()
