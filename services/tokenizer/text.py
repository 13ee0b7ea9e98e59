"""Text to token ids and back, always in a thread pool, never on the event loop.

Leaves templates to chat_template, special texts in content to literal and limits to validation.
`encode_batch_fast` is used even for one text: unlike `encode` it lets other threads run meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from services.tokenizer import calls
from services.tokenizer.chat_template import ChatTemplate, TemplateFailure, TooMuchText, with_reasoning_aliases
from services.tokenizer.errors import invalid, too_long, unavailable
from services.tokenizer.literal import LiteralMarker, SpecialToken
from services.tokenizer.model_folder import ModelFolder
from services.tokenizer.prompt_cache import PromptCache
from services.tokenizer.vocabulary import Vocabulary

R = TypeVar("R")

MAX_THREADS = 4
RENDER_TIMEOUT_S = 10.0


class TextEngine:
    """Owns the tokenizer, its literal twin and the pool. Close it at the end."""

    def __init__(self, model: ModelFolder, threads: int = 0) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # our pool is the parallelism
        source = Path(model.tokenizer_path, "tokenizer.json").read_text(encoding="utf-8")
        self._tokenizer = Tokenizer.from_str(source)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._cache = PromptCache(self._tokenizer, source)
        self._literal = _LiteralTwin(source)
        added = self._tokenizer.get_added_tokens_decoder()
        specials = [SpecialToken(i, t.content, t.lstrip, t.rstrip) for i, t in added.items() if t.special]
        self._special_ids = frozenset(token.id for token in specials)
        self._marker = LiteralMarker(specials)
        self._longest = max((len(t.encode()) for t in self._tokenizer.get_vocab()), default=1)
        tokens = {**model.special_texts, "bos_token": model.bos_token, "eos_token": model.eos_token}
        self.vocabulary = Vocabulary(self._tokenizer, json.loads(source).get("decoder"))
        self._template = ChatTemplate(model.chat_template, tokens) if model.chat_template else None
        self._pool = ThreadPoolExecutor(threads or min(MAX_THREADS, os.cpu_count() or 1), "text")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def template_knows_tools(self) -> bool:
        """Whether the chat template tells the model of tools by itself."""
        return self._template is not None and self._template.knows_tools

    @property
    def template_knows_developer(self) -> bool:
        """Whether the chat template speaks of the role `developer`; others would drop or misplace its messages."""
        return self._template is None or self._template.knows_developer

    def token_id(self, text: str) -> int:
        """The one token that `text` is, special or not; -1 where it is none."""
        token = self._tokenizer.token_to_id(text)
        return -1 if token is None else token

    def is_special(self, text: str) -> bool:
        """Whether `text` is a token that answers leave out of their text."""
        return self.token_id(text) in self._special_ids

    async def run(self, work: Callable[..., R], *args: Any) -> R:
        """Any other pure function that is too long for the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    def has_control_text(self, text: str) -> bool:
        """Whether the letters of a special token stand in it."""
        return self._marker.found_in(text)

    async def encode(
        self, text: str, limit: int, param: str, *, parse_special: bool = True, add_special_tokens: bool = True
    ) -> array[int]:
        """Ids of one text. Raises ApiError where it cannot fit `limit` tokens, before encoding it."""
        isolation = calls.current().isolation

        def work() -> array[int]:
            self._refuse_hopeless(text, limit, param)
            if parse_special:
                return self._cache.encode(text, add_special_tokens, isolation)
            return _encode(self._literal.first, text, add_special_tokens)

        return await self.run(work)

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        extra: Mapping[str, Any],
        limit: int,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> array[int]:
        """Ids of a rendered conversation. Raises ApiError with the template's own words where it refuses."""
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        isolation = calls.current().isolation
        return await self._with_template(self._encode_chat, messages, tools, dict(extra), limit, options, isolation)

    async def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        extra: Mapping[str, Any],
        limit: int,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Text of a rendered conversation. Raises as encode_chat does."""
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        messages = [with_reasoning_aliases(message) for message in messages]
        return await self._with_template(self._render_chat, messages, tools, dict(extra), limit, options)

    async def _with_template(self, work: Callable[..., R], *args: Any) -> R:
        if self._template is None:
            raise invalid("This model has no chat template; use /v1/completions or give one with --chat-template.")
        try:
            async with asyncio.timeout(RENDER_TIMEOUT_S):
                return await self.run(work, *args)
        except TimeoutError:
            raise unavailable("Rendering the chat template took too long.") from None

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids, already checked against the vocabulary."""
        return await self.run(lambda: self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def _encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        extra: dict[str, Any],
        limit: int,
        options: dict[str, bool],
        isolation: str = "",
    ) -> array[int]:
        messages = [with_reasoning_aliases(message) for message in messages]
        content = [messages, tools, extra]
        marks = self._marker.pick_marks(content) if self._marker.found_in(content) else None
        if marks is not None:
            messages, tools, extra = self._marker.mark(content, marks)
        text = self._render_chat(messages, tools, extra, limit, options)
        if marks is None:
            return self._cache.encode(text, False, isolation)
        return self._encode_pieces(self._marker.split(text, marks))

    def _render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        extra: dict[str, Any],
        limit: int,
        options: dict[str, bool],
    ) -> str:
        assert self._template is not None
        max_chars = self._longest * limit + 4096
        try:
            text = self._template.render(messages, tools, extra, max_chars=max_chars, **options)
        except TooMuchText as error:
            raise too_long(max_chars // self._longest + 1, limit, "messages", at_least=True) from error
        except TemplateFailure as error:
            raise invalid(str(error), "messages") from error
        self._refuse_hopeless(text, limit, "messages")
        return text

    def _encode_pieces(self, pieces: list[SpecialToken | str]) -> array[int]:
        ids = array("i")
        for index, piece in enumerate(pieces):
            if isinstance(piece, SpecialToken):
                ids.append(piece.id)
            else:
                ids.extend(self._encode_literal(piece, self._literal.first if index == 0 else self._literal.later))
        return ids

    def _encode_literal(self, text: str, tokenizer: Tokenizer) -> array[int]:
        """Some vocabularies hold special tokens as ordinary words, too: such words are taken apart."""
        ids = _encode(tokenizer, text, False)
        if not self._special_ids.isdisjoint(ids):
            ids = array("i")
            for part in self._marker.cut(text):
                ids.extend(_encode(self._literal.later if ids else tokenizer, part, False))
            if not self._special_ids.isdisjoint(ids):
                raise invalid("The content holds text that this model cannot tell from its control tokens.", "messages")
        return ids

    def _refuse_hopeless(self, text: str, limit: int, param: str) -> None:
        least = len(text.encode("utf-8", "replace")) // self._longest
        if least > limit:
            raise too_long(least, limit, param, at_least=True)


class _LiteralTwin:
    """The same tokenizer with special tokens switched off; `later` is for text that does not open the prompt."""

    def __init__(self, source: str) -> None:
        self.first = Tokenizer.from_str(source)
        self.later = self.first
        anywhere = re.sub(r'"prepend_scheme"\s*:\s*"first"', '"prepend_scheme":"never"', source)
        if anywhere != source:
            self.later = Tokenizer.from_str(anywhere)
        for tokenizer in (self.first, self.later):
            tokenizer.encode_special_tokens = True
            tokenizer.no_truncation()
            tokenizer.no_padding()


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> array[int]:
    [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return array("i", encoding.ids)
