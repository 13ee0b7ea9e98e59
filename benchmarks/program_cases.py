"""Programs for benchmarks/programs.py: one for each optimisation of the compiler, and the same logic with openai.

Leaves measuring to programs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from radixfleet import function, gen, select

RULES = (
    "You answer questions about cities, briefly and politely. You never invent what you do not know, "
    "you name no sources, and you write in complete sentences. Every answer has at most twelve words. "
)
TOPICS = ["traffic", "history", "food", "weather", "people", "money", "sports", "music"]
LONG = RULES * 4  # about 150 tokens
Item = dict[str, str]


def items(count: int) -> list[Item]:
    """Few contexts, more questions, some items twice; neighbours never share their context."""
    return [
        {"context": f"report {i % 4} about a city on a river", "question": f"What about district {i % 12}?"}
        for i in range(count)
    ]


def long_items(count: int) -> list[Item]:
    """Contexts that do not fit a small cache together."""
    return [{"context": f"Report {i % 8}. {RULES * 3}", "question": f"Question {i}?"} for i in range(count)]


def slow_fact(place: str) -> str:
    """Stands for an API that takes its time."""
    time.sleep(0.5)
    return f"{place} has many bridges"


@function
def qa(s: Any, context: str, question: str) -> None:
    s += RULES
    s += "Context: " + context + "\n"
    s += "Q: " + question + "\nA:" + gen("answer", max_tokens=8, stop="\n")


@function
def judged(s: Any, context: str, question: str) -> None:
    s += RULES + "Context: " + context + "\nQ: " + question + "\nThe topic is "
    s += select("topic", TOPICS)


@function
def tips(s: Any, context: str, question: str) -> None:
    s += RULES + "Context: " + context + "\n" + question + "\n"
    forks = s.fork(4)
    forks += lambda i: f"Tip {i + 1}:" + gen("tip", max_tokens=12, ignore_eos=True)
    forks.join()


@function
def called(s: Any, context: str, question: str) -> None:
    place = gen("place", max_tokens=2)
    s += RULES + f"The place is {place}. Context: " + context + " " + LONG + question
    s += gen("fact", api_url=slow_fact, params={"place": place}) + gen("answer", max_tokens=4)


@function
def steps(s: Any, context: str, question: str) -> None:
    s += RULES + "Context: " + context + "\nQ: " + question + "\nFirst thought:" + gen("first", max_tokens=8)
    s += "\nSecond thought:" + gen("second", max_tokens=8)
    s += "\nThe topic is " + select("topic", TOPICS)
    s += "\nSo in short:" + gen("answer", max_tokens=8)


@function
def beside(s: Any, context: str, question: str) -> None:
    """Between two items other work fills the cache."""
    s += LONG + "Context: " + context + "\nQ: " + question + "\nA:" + gen("answer", max_tokens=4)
    s += gen("noise", api_url=Noise.make)


@function
def reports(s: Any, context: str, question: str) -> None:
    s += context + question + gen("answer", max_tokens=4)


class Noise:
    """Prompts of somebody else on the same server, each a new one."""

    url = ""
    made = 0

    @classmethod
    def make(cls) -> str:
        for _ in range(2):
            cls.made += 1
            text = " ".join(f"{cls.made} {word}" for word in (RULES * 5).split())
            body = {"text": text, "sampling_params": {"max_new_tokens": 1}}
            httpx.post(f"{cls.url}/generate", json=body, timeout=600).raise_for_status()
        return "."


@dataclass(frozen=True)
class Case:
    """An optimisation, the program in which it shows, and the count that it moves."""

    optimisation: str
    program: Any
    count: str
    items: Callable[[int], list[Item]] = items
    share_of_items: float = 1.0
    threads: int = 0  # 0: as many as there are items
    small: bool = False  # on a server whose cache holds little


CASES = (
    Case("prefix", beside, "computed", share_of_items=0.25, threads=1, small=True),
    Case("share", qa, "prompts"),
    Case("concurrent", tips, "steps", share_of_items=0.25, threads=1),
    Case("merge", qa, "prompts"),
    Case("tail", called, "hit rate", share_of_items=0.25, threads=1),
    Case("order", reports, "computed", items=long_items, threads=2, small=True),
    Case("select", judged, "HTTP"),
    Case("script", steps, "HTTP"),
)
WHOLE = {"qa": qa, "steps": steps, "fork": tips, "call": called}


class Plain:
    """The logic of WHOLE, written with the plain openai client."""

    def __init__(self, url: str) -> None:
        from openai import OpenAI

        self._client = OpenAI(base_url=f"{url}/v1", api_key="none")

    def run(self, name: str, work: list[Item]) -> None:
        """All items at once, as a batch of the language runs."""
        logic = {"qa": self._qa, "steps": self._steps, "fork": self._tips, "call": self._called}[name]
        with ThreadPoolExecutor(len(work)) as pool:
            list(pool.map(logic, work))

    def _ask(self, prompt: str, max_tokens: int, **wishes: Any) -> str:
        answer = self._client.completions.create(
            model="default", prompt=prompt, max_tokens=max_tokens, temperature=0, timeout=600, **wishes
        )
        return answer.choices[0].text

    def _qa(self, item: Item) -> None:
        self._ask(f"{RULES}Context: {item['context']}\nQ: {item['question']}\nA:", 8, stop="\n")

    def _steps(self, item: Item) -> None:
        text = f"{RULES}Context: {item['context']}\nQ: {item['question']}\nFirst thought:"
        text += self._ask(text, 8) + "\nSecond thought:"
        text += self._ask(text, 8) + "\nThe topic is "
        text += self._ask(text, 4, extra_body={"structured_outputs": {"choice": TOPICS}}) + "\nSo in short:"
        self._ask(text, 8)

    def _tips(self, item: Item) -> None:
        text = f"{RULES}Context: {item['context']}\n{item['question']}\n"
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda i: self._ask(f"{text}Tip {i + 1}:", 12, extra_body={"ignore_eos": True}), range(4)))

    def _called(self, item: Item) -> None:
        text = f"{RULES}The place is "
        place = self._ask(text, 2)
        text += f"{place}. Context: {item['context']} {LONG}{item['question']}{slow_fact(place)}"
        self._ask(text, 4)
