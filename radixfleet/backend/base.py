"""What the language asks of a model, and the words for it. Knows no program and no HTTP.

Prompt   ids the model has seen | text it has not | ids generated elsewhere | ...
Answer   what was generated: its text, and the ids that continue the prompt
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from radixfleet.backend.sampling import Sampling


@dataclass(frozen=True)
class TextPart:
    """Text that no tokenizer has seen. `literal`: the text of a special token in it means only its letters."""

    text: str
    literal: bool = False


@dataclass(frozen=True)
class IdsPart:
    """Token ids that are never made from text again, and the text they stand for."""

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class CutPart:
    """Generated ids that a stop string ended, perhaps in the middle of a token: what they are is found out on demand.

    `resolve` gives the ids that hold nothing beyond `text`, and the text they lack.
    """

    text: str
    resolve: Callable[[], tuple[tuple[int, ...], str]]

    def parts(self) -> tuple[Part, ...]:
        """The same as ids and text. May ask the server, and raise BackendError."""
        ids, rest = self.resolve()
        kept = self.text.removesuffix(rest) if rest else self.text
        return (IdsPart(ids, kept), TextPart(rest, literal=True)) if rest else (IdsPart(ids, kept),)


Part = TextPart | IdsPart


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """Everything a model is to continue. `templated`: a chat template opened it, and wrote its own first token.

    `messages` and `open_role` say the same for models behind an API of conversations.
    """

    parts: tuple[Part, ...]
    templated: bool = False
    messages: tuple[Message, ...] = ()
    open_role: str | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True)
class Answer:
    """One generation, whole or so far.

    `prompt_ids` and `ids` together are what a continuation starts from (None: this backend has no ids). Where a stop
    string ended it, `cut` finds these ids when they are needed.
    """

    text: str
    meta: dict[str, Any] = field(default_factory=dict)
    prompt_ids: tuple[int, ...] | None = None
    ids: tuple[int, ...] = ()
    cut: CutPart | None = None
    others: tuple[Answer, ...] = ()  # further choices, where n > 1


@dataclass(frozen=True)
class OptionScores:
    """Scores of one option of a select, as `meta_info` lists them: [logprob, token id, text or None]."""

    prompt_ids: tuple[int, ...] | None
    ids: tuple[int, ...]  # the tokens that were scored
    rows: tuple[tuple[float | None, int, str | None], ...]
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GenStep:
    """A generation in a script."""

    sampling: Sampling


@dataclass(frozen=True)
class SelectStep:
    """The likeliest option, in a script; `method` is the name of one that the server knows."""

    options: tuple[str, ...]
    method: str
    literal: bool = False


@dataclass(frozen=True)
class AgainStep:
    """The text of an earlier generation or select of the script, by its number, once more as text."""

    number: int
    literal: bool = False


WorkStep = GenStep | SelectStep
Step = TextPart | AgainStep | WorkStep


@dataclass(frozen=True)
class News:
    """Of a script's part: new text, or its whole answer. `number` counts generations and selects."""

    number: int
    text: str = ""
    answer: Answer | None = None


class Backend(Protocol):
    """A model to run programs on. Every method may raise BackendError."""

    @property
    def has_scripts(self) -> bool:
        """Whether `script` can be asked for. May ask the server once."""
        ...

    @property
    def wants_guesses(self) -> bool:
        """Whether one call for several generations is worth guessing what the program will say between them."""
        ...

    def script(self, prompt: Prompt, steps: Sequence[Step], tag: str, *, deltas: bool) -> Iterator[News]:
        """Run steps one after another in one request; each continues the ids of those before it.

        Whole answers come in order. With `deltas`, new text comes as it is written.
        """
        ...

    def generate(self, prompt: Prompt, sampling: Sampling, tag: str) -> Answer:
        """`tag` is a name of this request, to abort it by."""
        ...

    def stream(self, prompt: Prompt, sampling: Sampling, tag: str) -> Iterator[Answer]:
        """Answers so far, each holding all of the text; the last one is whole."""
        ...

    def abort(self, tag: str) -> None:
        """End a request early; it then raises, or answers with what it has."""
        ...

    def pick(self, prompt: Prompt, options: Sequence[str]) -> int | None:
        """The likeliest option, from a model that cannot score; None: `score` them."""
        ...

    def score(self, prompt: Prompt, options: Sequence[str], *, batched: bool = True) -> list[OptionScores]:
        """Log-probabilities of each option's tokens after the prompt."""
        ...

    def score_alone(self, scores: Sequence[OptionScores]) -> list[list[float | None]]:
        """Log-probabilities of the same tokens with no prompt before them."""
        ...

    def prefill(self, prompt: Prompt) -> tuple[int, ...] | None:
        """Compute and cache the prompt; returns its ids."""
        ...

    def pin(self, prompt: Prompt, name: str) -> None:
        """Compute and cache the prompt, and keep it cached until `unpin`, or for an hour."""
        ...

    def unpin(self, name: str) -> None: ...

    def render(self, roles: tuple[str, ...], contents: tuple[str, ...], generation_prompt: bool) -> str | None:
        """The chat template's text for these messages; None where the backend takes messages as they are."""
        ...

    def clip(self, text: str, max_tokens: int) -> str:
        """The first `max_tokens` tokens of a text."""
        ...

    def flush_cache(self) -> None: ...

    def get_server_info(self) -> dict[str, Any]: ...
