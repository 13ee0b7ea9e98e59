"""Scripts on the toy model of fake_model_server: every step is noted as a request of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from radixfleet.lang import choices

if TYPE_CHECKING:
    from tests.radixfleet.fake_model_server import FakeServer


class Refused(Exception):
    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status
        self.words = words


class FakeScript:
    """Steps of a script, run on the toy model."""

    def __init__(self, fake: FakeServer, body: dict[str, Any], note: Callable[[dict[str, Any]], None]) -> None:
        self._fake = fake
        self._body = body
        self._note = note
        self._parts = list(body["prompt_parts"])
        self._texts: list[str] = []

    def events(self) -> Iterator[dict[str, Any]]:
        for step in self._body["steps"]:
            if "gen" in step:
                for event in self._generate(step["gen"]):
                    yield event
                if (event.get("meta_info") or {}).get("finish_reason", {}).get("type") == "abort":
                    break
            elif "select" in step:
                yield self._select(step["select"])
            else:
                text = self._texts[step["again"]] if "again" in step else step["text"]
                self._parts.append({"text": text, "literal": step.get("literal", False)})
        yield {"meta_info": {"parts": len(self._texts)}}

    def _generate(self, gen: dict[str, Any]) -> Iterator[dict[str, Any]]:
        plain = all("text" in part and not part.get("literal") for part in self._parts)
        prompt = "".join(part["text"] for part in self._parts) if plain and not self._body.get("templated") else None
        told = {"text": prompt} if prompt else {"input_ids": self._fake.ids_of(self._parts)}
        wish = {"rid": self._body["rid"], "return_prompt_token_ids": True, "stream": self._body["deltas"], "step": True}
        body = {**told, **gen, **wish}
        answer = self._run(body)
        number = len(self._texts)
        if self._fake.broken_stream:
            yield {"part": number, "name": None, "delta": answer["text"][:3]}
            raise Refused(503, "the worker was lost")
        if self._body.get("deltas"):
            shown = ""
            for count in range(1, len(answer["output_ids"]) + 1):
                text = self._fake.decode(answer["output_ids"][:count])[: len(answer["text"])]
                if text != shown:
                    yield {"part": number, "name": None, "delta": text[len(shown) :]}
                shown = text
        self._texts.append(answer["text"])
        self._parts = [{"ids": answer["prompt_token_ids"]}, *self._continued(answer)]
        yield {"part": number, "name": None, **answer}

    def _select(self, select: dict[str, Any]) -> dict[str, Any]:
        fake, literal = self._fake, select.get("literal", False)
        lists = [fake.ids_of([*self._parts, {"text": text, "literal": literal}]) for text in select["choices"]]
        start = 0
        for column in zip(fake.ids_of(self._parts), *lists, strict=False):
            if len(set(column)) > 1:
                break
            start += 1
        params = {"max_new_tokens": 0, "temperature": 0.0}
        wish = {"input_ids": lists, "sampling_params": params, "return_logprob": True, "logprob_start_len": start}
        answers = self._run({**wish, "step": True})
        rows = [answer["meta_info"]["input_token_logprobs"] for answer in answers]
        means = [sum(row[0] for row in one) / len(one) for one in rows]
        method = getattr(choices, select["method"])
        found = method(choices=select["choices"], normalized_prompt_logprobs=means, input_token_logprobs=rows)
        place, text = select["choices"].index(found.decision), found.decision
        meta = {**answers[place]["meta_info"], "normalized_prompt_logprobs": means, "input_token_logprobs": rows}
        meta |= found.meta_info
        self._texts.append(text)
        self._parts = [{"ids": lists[place]}]
        head = {"part": len(self._texts) - 1, "name": None, "text": text, "output_ids": []}
        return {**head, "prompt_token_ids": lists[place], "meta_info": meta}

    def _run(self, body: dict[str, Any]) -> Any:
        fake = self._fake
        self._note(body)
        for text, (status, words) in fake.refuse.items():
            if any(text in prompt for prompt in fake.prompts_of(body)):
                raise Refused(status, words)
        with fake.lock:
            fake.running += 1
            fake.most_running = max(fake.most_running, fake.running)
        try:
            return fake.generate(body)
        finally:
            with fake.lock:
                fake.running -= 1

    def _continued(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        ids, text, matched = answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"].get("matched")
        if isinstance(matched, str):
            end = next(end for end in range(len(ids), -1, -1) if text.startswith(self._fake.decode(ids[:end])))
            rest = text[len(self._fake.decode(ids[:end])) :]
            return [{"ids": ids[:end]}, *([{"text": rest, "literal": True}] if rest else [])]
        return [{"ids": ids[:-1] if matched is not None and ids[-1:] == [matched] else ids}]
