"""OpenAI: programs on any server that speaks OpenAI's API, over chat or plain completions.

Such servers take and give text only, so nothing is known about ids. Leaves connections to http.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from radixfleet.backend.base import Answer, Message, News, OptionScores, Prompt, Step
from radixfleet.backend.errors import BackendError, Unsupported
from radixfleet.backend.http import HttpServer
from radixfleet.backend.sampling import Sampling

OPENAI_URL = "https://api.openai.com/v1"
DEFAULT_TIMEOUT_S = 600.0
_TEXT_MODELS = ("gpt-3.5-turbo-instruct", "davinci-002", "babbage-002")
_CHARS_PER_TOKEN = 4  # where no tokenizer can be asked
_NEUTRAL: dict[str, Any] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": False}
_FOREIGN = (
    "min_new_tokens",
    "stop_token_ids",
    "stop_regex",
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "regex",
    "ebnf",
    "lark",
    "structural_tag",
    "xml_schema",
)


class TokenUsage:
    """Tokens that an API has counted since the last reset(). Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        with self._lock:
            self.prompt_tokens = 0
            self.completion_tokens = 0

    def add(self, usage: Mapping[str, Any] | None) -> None:
        """What an answer says of itself, if it does."""
        with self._lock:
            self.prompt_tokens += (usage or {}).get("prompt_tokens") or 0
            self.completion_tokens += (usage or {}).get("completion_tokens") or 0


class OpenAI:
    """Thread-safe. The key comes from OPENAI_API_KEY unless given, the address from OPENAI_BASE_URL.

    On Azure `base_url` is the deployment's address and `api_version` its version.
    """

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: Any = None,
        is_azure: bool = False,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        api_version: str | None = None,
        organization: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if chat_template is not None:
            warnings.warn("chat_template has no effect: the server applies the model's own", stacklevel=2)
        self.model_name = model_name
        self.is_chat_model = model_name not in _TEXT_MODELS if is_chat_model is None else is_chat_model
        key = api_key or os.environ.get("AZURE_OPENAI_API_KEY" if is_azure else "OPENAI_API_KEY", "")
        headers = {"api-key": key} if is_azure else {"authorization": f"Bearer {key}"} if key else {}
        if organization:
            headers["openai-organization"] = organization
        address = base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
        self._official = is_azure or address == OPENAI_URL
        self._suffix = f"?api-version={api_version}" if api_version else ""
        self._http = HttpServer(address, headers, timeout)
        self.token_usage = TokenUsage()

    def close(self) -> None:
        self._http.close()

    def generate(self, prompt: Prompt, sampling: Sampling, tag: str) -> Answer:
        answer = self._post(self._body(prompt, sampling))
        first, *others = [self._answer(choice, answer.get("usage")) for choice in answer["choices"]]
        return replace(first, others=tuple(others))

    def stream(self, prompt: Prompt, sampling: Sampling, tag: str) -> Iterator[Answer]:
        body = {**self._body(prompt, replace(sampling, n=1)), "stream": True}
        text, finish = "", None
        for event in self._http.events(self._path, body):
            for choice in event.get("choices", ()):
                text += (choice["delta"].get("content") if self.is_chat_model else choice["text"]) or ""
                finish = choice.get("finish_reason") or finish
                yield Answer(text)
        if finish is None:
            raise BackendError(f"{self._http.base_url} ended its stream before the answer was complete")
        yield Answer(text, {"finish_reason": {"type": finish}})

    has_scripts = False
    wants_guesses = True

    def script(self, prompt: Prompt, steps: Sequence[Step], tag: str, *, deltas: bool) -> Iterator[News]:
        raise Unsupported("OpenAI's API has no scripts")

    def abort(self, tag: str) -> None:
        """Such requests have no names; the connection ends with them."""

    def pick(self, prompt: Prompt, options: Sequence[str]) -> int | None:
        """A chat model says which option it would write, held to the list by a schema."""
        if not self.is_chat_model:
            return None
        schema = {
            "type": "object",
            "properties": {"choice": {"type": "string", "enum": list(options)}},
            "required": ["choice"],
            "additionalProperties": False,
        }
        sampling = Sampling(temperature=0.0, json_schema=json.dumps(schema, ensure_ascii=False))
        text = self._answer(self._post(self._body(prompt, sampling))["choices"][0], None).text
        try:
            return list(options).index(json.loads(text)["choice"])
        except (ValueError, KeyError, TypeError):
            raise BackendError(f"the model answered none of the options: {text[:200]!r}") from None

    def score(self, prompt: Prompt, options: Sequence[str], *, batched: bool = True) -> list[OptionScores]:
        """Needs a server whose completions echo log-probabilities of the prompt."""
        texts = [prompt.text + option for option in options]
        size = len(texts) if batched else 1
        scores: list[OptionScores] = []
        for first in range(0, len(texts), size):
            body = {"model": self.model_name, "prompt": texts[first : first + size], "max_tokens": 0, "echo": True}
            answer = self._post({**body, "logprobs": 1, "temperature": 0})
            scores += [_echoed(choice, len(prompt.text)) for choice in answer["choices"]]
        return scores

    def score_alone(self, scores: Sequence[OptionScores]) -> list[list[float | None]]:
        raise Unsupported("options cannot be scored without their prompt over OpenAI's API")

    def prefill(self, prompt: Prompt) -> tuple[int, ...] | None:
        """There is no such request; these servers cache on their own."""
        return None

    def pin(self, prompt: Prompt, name: str) -> None:
        """These servers keep what they like."""

    def unpin(self, name: str) -> None:
        """There is nothing to end."""

    def render(self, roles: tuple[str, ...], contents: tuple[str, ...], generation_prompt: bool) -> str | None:
        """The server applies the template itself."""
        if not self.is_chat_model:
            raise Unsupported(f"{self.model_name} completes text and has no chat template; write the turns as text")
        return None

    def clip(self, text: str, max_tokens: int) -> str:
        """By characters: no tokenizer can be asked."""
        return text[: max_tokens * _CHARS_PER_TOKEN]

    def flush_cache(self) -> None:
        raise Unsupported("OpenAI's API cannot flush a cache")

    def get_server_info(self) -> dict[str, Any]:
        info: dict[str, Any] = self._http.get(f"/models/{self.model_name}{self._suffix}")
        return info

    @property
    def _path(self) -> str:
        return ("/chat/completions" if self.is_chat_model else "/completions") + self._suffix

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._http.post(self._path, body)
        self.token_usage.add(answer.get("usage"))
        return answer

    def _body(self, prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
        _refuse_foreign(sampling)
        body: dict[str, Any] = {"model": self.model_name}
        names = ("n", "temperature", "top_p", "frequency_penalty", "presence_penalty")
        body |= {name: getattr(sampling, name) for name in names if getattr(sampling, name) is not None}
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.sampling_seed is not None:
            body["seed"] = sampling.sampling_seed
        if sampling.logit_bias:
            body["logit_bias"] = dict(sampling.logit_bias)
        if sampling.max_new_tokens is not None:
            newer = self.is_chat_model and self._official
            body["max_completion_tokens" if newer else "max_tokens"] = sampling.max_new_tokens
        if sampling.json_schema is not None:
            body["response_format"] = _schema_format(sampling.json_schema)
        if self.is_chat_model:
            return {**body, "messages": [vars(message) for message in _messages(prompt)]}
        return {**body, "prompt": prompt.text}

    def _answer(self, choice: dict[str, Any], usage: dict[str, Any] | None) -> Answer:
        text = (choice["message"].get("content") if self.is_chat_model else choice["text"]) or ""
        meta: dict[str, Any] = {"finish_reason": {"type": choice.get("finish_reason")}}
        meta |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens") if usage and name in usage}
        return Answer(text, meta)


def _messages(prompt: Prompt) -> list[Message]:
    """What a chat model is asked. Raises Unsupported in the middle of a turn."""
    if not prompt.messages:
        return [Message("user", prompt.text)]
    if prompt.open_role == "assistant":
        *before, last = prompt.messages
        if last.content:
            raise Unsupported(
                "OpenAI's chat API cannot continue a turn that has begun; give each generation a turn of its own"
            )
        return before
    return list(prompt.messages)


def _refuse_foreign(sampling: Sampling) -> None:
    for name in _FOREIGN:
        value = getattr(sampling, name)
        if value is not None and value != _NEUTRAL.get(name):
            raise Unsupported(f"OpenAI's API has no {name}")


def _schema_format(schema: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": json.loads(schema)}}


def _echoed(choice: dict[str, Any], prompt_chars: int) -> OptionScores:
    """Scores of the tokens that reach beyond the prompt's text."""
    found = choice["logprobs"]
    ends = [*found["text_offset"][1:], len(choice["text"])]
    rows = [
        (logprob, -1, token)
        for logprob, token, end in zip(found["token_logprobs"], found["tokens"], ends, strict=True)
        if end > prompt_chars
    ]
    return OptionScores(None, (), tuple(rows))
