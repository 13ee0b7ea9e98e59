"""The five workloads of load.py. Leaves sending and measuring to it.

w1  conversations of 10 rounds, 8 at once: 50 new tokens and 50 answered ones a round, the history resent each time
w2  64 chats, 16 at once, 32 tokens each: four in five share a system prompt of 512 tokens and the question
w3  decoding: prompts of 64 tokens, answers of 128, by 1, 8 and 32 streams
w4  a prompt of 512, 2048 or 4096 tokens for one token, and the same again: cold and warm time to first token
w5  32 chats, 8 at once: what a sentence says of a person as a JSON object by a schema
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

from benchmarks.load import PERSON, Answer, percentile, summary

if TYPE_CHECKING:
    from benchmarks.load import Client

Json = dict[str, Any]
ROUNDS, TURN, W2_REQUESTS, W2_PREFIX, W3_PROMPT, W3_ANSWER = 10, 50, 64, 512, 64, 128
W4_LENGTHS, W4_PROMPTS = (512, 2048, 4096), 3
NAMES = "Ada Boris Carla Dmitri Elena Farid Greta Hiroshi Ines Jamal Kira Liang Mateo Noor Oskar Paula".split()
CITIES = (
    "Athens Bergen Cologne Dakar Geneva Hanoi Istanbul Jakarta Kyoto Leeds Manila Naples Osaka Porto Riga Turin".split()
)


class Words:
    """Texts of an exact number of tokens, from words that are one token each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        marked = (word[1:] for word in tokenizer.get_vocab() if word[:1] in ("\u0120", "\u2581"))
        self._words = sorted(word for word in marked if re.fullmatch(r"[a-z]{3,9}", word))

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, tokens: int, rng: random.Random) -> str:
        words = rng.choices(self._words, k=tokens)
        while (missing := tokens - self.count(" " + " ".join(words))) != 0:  # few words melt together
            words = [*words, *rng.choices(self._words, k=missing)] if missing > 0 else words[:missing]
        return " " + " ".join(words)


@dataclass(frozen=True)
class Plan:
    """What a workload's requests are drawn from."""

    words: Words
    seed: str
    scale: float

    def scaled(self, number: int) -> int:
        return max(1, round(number * self.scale))

    def rng(self) -> random.Random:
        return random.Random(self.seed)


async def at_once(jobs: Sequence[Callable[[], Awaitable[Answer]]], number: int) -> list[Answer]:
    """Runs the jobs in order, at most `number` of them at a time."""
    room = asyncio.Semaphore(number)

    async def one(job: Callable[[], Awaitable[Answer]]) -> Answer:
        async with room:
            return await job()

    return list(await asyncio.gather(*map(one, jobs)))


async def conversations(client: Client, plan: Plan) -> AsyncIterator[Json]:
    rng = plan.rng()
    questions = [[plan.words.text(TURN, rng).strip() for _ in range(ROUNDS)] for _ in range(plan.scaled(8))]

    async def talk(turns: list[str]) -> list[Answer]:
        messages = [{"role": "system", "content": "You are a helpful assistant."}]
        answers: list[Answer] = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            answers.append(await client.chat(messages, TURN, exact=True))
            messages.append({"role": "assistant", "content": answers[-1].text})
        return answers

    talks = await asyncio.gather(*map(talk, questions))
    last = 1e3 * percentile([answers[-1].ttft for answers in talks], 50)
    yield {**summary("w1", [answer for answers in talks for answer in answers]), "last_ttft_p50_ms": round(last, 3)}


async def shared_prefix(client: Client, plan: Plan) -> AsyncIterator[Json]:
    rng = plan.rng()
    system, question = plan.words.text(W2_PREFIX, rng).strip(), plan.words.text(TURN, rng).strip()

    def prompt(index: int) -> list[Json]:
        mine = (system, question)
        if index % 5 == 4:
            mine = (plan.words.text(W2_PREFIX, rng).strip(), plan.words.text(TURN, rng).strip())
        return [{"role": role, "content": text} for role, text in zip(("system", "user"), mine, strict=True)]

    prompts = [prompt(index) for index in range(plan.scaled(W2_REQUESTS))]
    jobs = [lambda messages=messages: client.chat(messages, 32, exact=True) for messages in prompts]
    yield summary("w2", await at_once(jobs, 16))


async def decoding(client: Client, plan: Plan) -> AsyncIterator[Json]:
    rng = plan.rng()
    for streams, requests in ((1, 8), (8, 32), (32, 32)):
        prompts = [plan.words.text(W3_PROMPT, rng) for _ in range(max(streams, plan.scaled(requests)))]
        jobs = [lambda prompt=prompt: client.complete(prompt, W3_ANSWER, exact=True) for prompt in prompts]
        yield summary(f"w3.{streams}", await at_once(jobs, streams))


async def long_prompts(client: Client, plan: Plan) -> AsyncIterator[Json]:
    rng = plan.rng()
    for length in W4_LENGTHS:
        prompts = [plan.words.text(length, rng) for _ in range(W4_PROMPTS)]
        for kind in ("cold", "warm"):
            answers = [await client.complete(prompt, 1, exact=True) for prompt in prompts]
            yield summary(f"w4.{length}.{kind}", answers)


async def structured(client: Client, plan: Plan) -> AsyncIterator[Json]:
    rng = plan.rng()
    questions = [_sentence(rng) for _ in range(plan.scaled(32))]
    jobs = [
        lambda text=text: client.chat([{"role": "user", "content": text}], 100, fields=client.dialect.person)
        for text in questions
    ]
    answers = await at_once(jobs, 8)
    yield {**summary("w5", answers), "valid": sum(map(_is_person, answers))}


def _sentence(rng: random.Random) -> str:
    name, city, age = rng.choice(NAMES), rng.choice(CITIES), rng.randint(18, 90)
    wish = 'Answer with nothing but a JSON object that has the keys "name" (a string), "age" (an integer) and "city".'
    return f"{name}, aged {age}, lives in {city}. {wish}"


def _is_person(answer: Answer) -> bool:
    try:
        return bool(Draft202012Validator(PERSON).is_valid(json.loads(answer.text)))
    except ValueError:
        return False


WORKLOADS: dict[str, Callable[[Client, Plan], AsyncIterator[Json]]] = {
    "w1": conversations,
    "w2": shared_prefix,
    "w3": decoding,
    "w4": long_prompts,
    "w5": structured,
}
