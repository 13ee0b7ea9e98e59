"""RuntimeEndpoint: a RadixFleet server behind its HTTP API, as a backend for programs.

Prompts go out as ids wherever ids are known, so what a model generated is never tokenised again.
Leaves connections to http and tokenising to tokens.
"""

from __future__ import annotations

import functools
import ssl
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from radixfleet.backend import scripts
from radixfleet.backend.base import Answer, CutPart, News, OptionScores, Prompt, Step, TextPart
from radixfleet.backend.errors import BackendError
from radixfleet.backend.http import HttpServer
from radixfleet.backend.sampling import Sampling
from radixfleet.backend.tokens import Ids, ServerTokenizer, Tokens, portions

DEFAULT_TIMEOUT_S = 600.0
_MOST_OPTIONS_AT_ONCE = 256
_PIN_S = 3600.0
_ONLY_PREFILL = {"max_new_tokens": 0, "temperature": 0.0}


class RuntimeEndpoint:
    """Thread-safe; connects when first used. `timeout`: seconds without a byte before a request is given up.

    `verify` is a CA file or False, as for other HTTP clients. The chat template is always the model's own.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: bool | str | ssl.SSLContext | None = None,
        chat_template_name: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if chat_template_name is not None:
            warnings.warn("chat_template_name has no effect: the model's own template is used", stacklevel=2)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.base_url = base_url.rstrip("/")
        self._http = HttpServer(base_url, headers, timeout, verify)
        self._tokens = Tokens(self._http)
        self._rendered: dict[tuple[tuple[str, ...], tuple[str, ...], bool], str] = {}
        self._abilities: scripts.Abilities | None = None
        self._asking = threading.Lock()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connections. Also done when the endpoint is no longer used."""
        self._http.close()

    def generate(self, prompt: Prompt, sampling: Sampling, tag: str) -> Answer:
        body = self._body(prompt, sampling, tag)
        answers = self._http.post("/generate", body)
        first, *others = answers if isinstance(answers, list) else [answers]
        known = _known_ids(body)
        return replace(self._whole(first, known), others=tuple(self._whole(other, known) for other in others))

    def stream(self, prompt: Prompt, sampling: Sampling, tag: str) -> Iterator[Answer]:
        body = {**self._body(prompt, replace(sampling, n=None), tag), "stream": True}
        known = _known_ids(body)
        so_far: dict[str, Any] = {"text": "", "output_ids": [], "meta_info": {}}
        for event in self._http.events("/generate", body):
            so_far = _joined(so_far, event)
            if so_far["meta_info"].get("finish_reason") is None:
                yield Answer(so_far["text"], so_far["meta_info"])
        if so_far["meta_info"].get("finish_reason") is None:
            raise BackendError(f"{self.base_url} ended its stream before the answer was complete")
        yield self._whole(so_far, known)

    def abort(self, tag: str) -> None:
        self._http.post("/abort_request", {"rid": tag})

    def pick(self, prompt: Prompt, options: Sequence[str]) -> int | None:
        """Nothing to say: options are scored."""
        return None

    def score(self, prompt: Prompt, options: Sequence[str], *, batched: bool = True) -> list[OptionScores]:
        """Score the tokens in which the options differ from the bare prompt.

        The text before an option and the option are tokenised together, as the model would have met them: "is " and
        "Paris" make the token " Paris". All options are scored from the same position.
        """
        literal = prompt.open_role is not None
        extended = [replace(prompt, parts=(*prompt.parts, TextPart(option, literal))) for option in options]
        bare, *whole = self._tokens.of_prompts([prompt, *extended])
        start = _shared_length([bare, *whole])
        answers = self._scores(whole, start, _MOST_OPTIONS_AT_ONCE if batched else 1)
        return [
            OptionScores(ids, ids[start:], _rows(answer, ids, start), answer["meta_info"])
            for ids, answer in zip(whole, answers, strict=True)
        ]

    def score_alone(self, scores: Sequence[OptionScores]) -> list[list[float | None]]:
        opening = self._tokens.of_texts([""], opening=True)[0]
        lists = [opening + score.ids for score in scores]
        answers = self._scores(lists, 0)
        return [
            [row[0] for row in _rows(answer, ids, 0)][len(opening) :]
            for ids, answer in zip(lists, answers, strict=True)
        ]

    wants_guesses = False  # a script saves the same requests and guesses nothing

    @property
    def has_scripts(self) -> bool:
        return self._learnt().scripts

    def script(self, prompt: Prompt, steps: Sequence[Step], tag: str, *, deltas: bool) -> Iterator[News]:
        body = scripts.body(prompt, steps, tag, deltas=deltas)
        return scripts.news(self._http.events("/script", body), self._part)

    def prefill(self, prompt: Prompt) -> Ids | None:
        body = {**self._prompt_fields(prompt), "sampling_params": _ONLY_PREFILL, "return_prompt_token_ids": True}
        return _prompt_ids(self._http.post("/generate", body), _known_ids(body))

    def pin(self, prompt: Prompt, name: str) -> None:
        body = {**self._prompt_fields(prompt), "sampling_params": _ONLY_PREFILL}
        if self._learnt().parts:
            body |= {"pin": name, "pin_seconds": _PIN_S}
        self._http.post("/generate", body)

    def unpin(self, name: str) -> None:
        if self._learnt().parts:
            self._http.post("/unpin", {"pin": name})

    def render(self, roles: tuple[str, ...], contents: tuple[str, ...], generation_prompt: bool) -> str | None:
        key = (roles, contents, generation_prompt)
        with self._lock:
            known = self._rendered.get(key)
        if known is not None:
            return known
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        body = {"messages": messages, "add_generation_prompt": generation_prompt}
        text = str(self._http.post("/apply_chat_template", body)["text"])
        with self._lock:
            self._rendered[key] = text
        return text

    def clip(self, text: str, max_tokens: int) -> str:
        return self._tokens.clip(text, max_tokens)

    def flush_cache(self) -> None:
        self._http.post("/flush_cache")

    def get_server_info(self) -> dict[str, Any]:
        info: dict[str, Any] = self._http.get("/get_server_info")
        return info

    def get_tokenizer(self) -> ServerTokenizer:
        """`encode` and `decode` as the model does them."""
        return ServerTokenizer(self._tokens)

    def get_model_name(self) -> str:
        return str(self._http.get("/get_model_info")["model_path"])

    def request(self, path: str, body: dict[str, Any]) -> Any:
        """Any other call of the server's API, as JSON."""
        return self._http.post(path, body)

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Any other call that streams."""
        return self._http.events(path, body)

    def _prompt_fields(self, prompt: Prompt) -> dict[str, Any]:
        plain = all(isinstance(part, TextPart) and not part.literal for part in prompt.parts)
        if plain and not prompt.templated and prompt.text:
            return {"text": prompt.text}
        if self._learnt().parts:
            return scripts.prompt_fields(prompt)
        return {"input_ids": list(self._tokens.of_prompt(prompt))}

    def _learnt(self) -> scripts.Abilities:
        """What the server can do; asked once."""
        with self._asking:
            if self._abilities is None:
                self._abilities = scripts.abilities(self._http)
            return self._abilities

    def _body(self, prompt: Prompt, sampling: Sampling, tag: str) -> dict[str, Any]:
        return {
            **self._prompt_fields(prompt),
            "rid": tag,
            "sampling_params": sampling.wire(),
            "return_prompt_token_ids": True,
            **sampling.score_wire(),
        }

    def _whole(self, answer: dict[str, Any], known: Ids | None) -> Answer:
        """An answer with the ids a continuation starts from: without what ended it."""
        text, meta = answer["text"], answer["meta_info"]
        ids = tuple(answer.get("output_ids") or ())
        finish = meta.get("finish_reason") or {}
        if finish.get("type") == "abort":
            raise BackendError(finish.get("message") or "The request was aborted.", finish.get("status_code"))
        matched = finish.get("matched")
        told = _prompt_ids(answer, known)
        if isinstance(matched, str):
            cut = CutPart(text, functools.cache(functools.partial(self._tokens.cut, ids, text, matched)))
            return Answer(text, meta, told, cut=cut)
        if matched is not None and ids[-1:] == (matched,):
            ids = ids[:-1]
        return Answer(text, meta, told, ids)

    def _part(self, event: dict[str, Any]) -> Answer:
        """A part of a script as an answer; a select's winner ends the ids of its prompt."""
        return self._whole(event, None)

    def _scores(self, lists: Sequence[Ids], start: int, at_once: int = _MOST_OPTIONS_AT_ONCE) -> list[dict[str, Any]]:
        wishes = {"sampling_params": _ONLY_PREFILL, "return_logprob": True, "logprob_start_len": start}
        answers: list[dict[str, Any]] = []
        for some in portions(lists, at_once):
            answers += self._http.post("/generate", {"input_ids": [list(ids) for ids in some], **wishes})
        return answers


def _known_ids(body: dict[str, Any]) -> Ids | None:
    ids = body.get("input_ids")
    return tuple(ids) if ids is not None else None


def _prompt_ids(answer: dict[str, Any], known: Ids | None) -> Ids | None:
    if known is not None:
        return known
    told = answer.get("prompt_token_ids")
    return tuple(told) if told is not None else None


def _joined(so_far: dict[str, Any], event: dict[str, Any]) -> dict[str, Any]:
    """Servers stream all so far or only what is new; the count of tokens in `meta_info` is always of all."""
    ids, meta = event.get("output_ids") or [], event["meta_info"]
    if len(ids) == meta.get("completion_tokens", len(ids)):
        return {**so_far, **event}
    return {
        **so_far,
        **event,
        "text": so_far["text"] + event["text"],
        "output_ids": so_far["output_ids"] + ids,
        "meta_info": {**so_far["meta_info"], **meta},
    }


def _shared_length(lists: Sequence[Ids]) -> int:
    shared = 0
    for column in zip(*lists, strict=False):
        if len(set(column)) > 1:
            break
        shared += 1
    return shared


def _rows(answer: dict[str, Any], ids: Ids, start: int) -> tuple[tuple[float | None, int, str | None], ...]:
    rows = answer["meta_info"]["input_token_logprobs"]
    if len(rows) != len(ids) - start:
        raise BackendError(f"{len(ids) - start} tokens were to be scored, the server scored {len(rows)}")
    return tuple((row[0], row[1], row[2] if len(row) > 2 else None) for row in rows)
