"""Renders a model's chat template in the jinja environment that Hugging Face templates are written for.

Leaves tokenisation to text. Templates come from model folders: the sandbox is immutable, and time and
size of a rendering are bounded. Environment and globals follow transformers' documented template contract.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDER_SECONDS = 5.0
MAX_TEMPLATE_CHARS = 1 << 20
_CONTINUE_MARK = "\U000f0fce "  # its blank shows whether the template trims contents
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class TemplateFailure(Exception):
    """The template refused the conversation; the text is for the client."""


class TooMuchText(TemplateFailure):
    """The conversation became longer than it may."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks training spans; here it only shows what it holds."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateDict:
    """`dict(...)` for templates without the type's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)` that refuses names reaching into Python itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that `namespace(self=...)` is an ordinary name
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace attribute {name!r} is not allowed in a chat template")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _Namespace
    return environment


class ChatTemplate:
    """One compiled template. Raises ValueError where the source is no template."""

    def __init__(self, source: str, tokens: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        """`tokens` are the named special tokens templates may print: bos_token, eos_token, ..."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ValueError(f"chat template of {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are allowed")
        self._tokens = dict(tokens)
        self._clock = clock
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            self.knows_developer = "developer" in source
            names = environment.parse(source).find_all(jinja2.nodes.Name)
            self.knows_tools = any(name.name == "tools" and name.ctx == "load" for name in names)
        except jinja2.TemplateError as error:
            raise ValueError(f"bad chat template: {error}") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        extra: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        max_chars: int,
    ) -> str:
        """The prompt text. Raises TemplateFailure with the template's own words."""
        if continue_final_message:
            last = dict(messages[-1])
            last["content"] = last["content"] + _CONTINUE_MARK
            messages = [*messages[:-1], last]
        values = {
            **self._tokens,
            **extra,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render_bounded(values, max_chars)
        return _cut_at_mark(text) if continue_final_message else text

    def _render_bounded(self, values: dict[str, Any], max_chars: int) -> str:
        deadline = self._clock() + MAX_RENDER_SECONDS
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(values):
                pieces.append(piece)
                size += len(piece)
                if size > max_chars:
                    raise TooMuchText(f"The chat template produced more than {max_chars} characters.")
                if self._clock() > deadline:
                    raise TemplateFailure("The chat template took too long.")
        except jinja2.TemplateError as error:
            raise TemplateFailure(error.message or type(error).__name__) from error
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise TemplateFailure(f"The chat template could not render these messages: {error}") from error
        return "".join(pieces)


def _cut_at_mark(text: str) -> str:
    """End the prompt where the final message ends, without the end-of-turn the template adds."""
    at = text.rfind(_CONTINUE_MARK.rstrip())
    if at < 0:
        raise TemplateFailure("continue_final_message: the chat template does not show the final message.")
    return text[:at] if text.startswith(_CONTINUE_MARK, at) else text[:at].rstrip()


def with_reasoning_aliases(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning goes under several names; templates read `reasoning_content` or `thinking`."""
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
