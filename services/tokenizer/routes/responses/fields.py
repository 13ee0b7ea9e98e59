"""The body of POST /v1/responses, and what of it cannot be honoured. Leaves its meaning to translate."""

from __future__ import annotations

from typing import Any

from services.tokenizer.schema import REFUSED_CHAT, SamplingFields, StreamOptions, StrOrList


class ResponsesBody(SamplingFields, kw_only=True):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # of built-in tools, of which there are none
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None  # equal prefixes are found without it
    prompt_cache_retention: str | None = None
    rid: StrOrList = None
    extra_key: StrOrList = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_MANAGED = "send the conversation as input, or previous_response_id"
REFUSED_RESPONSES = {
    **REFUSED_CHAT,
    "conversation": _MANAGED,
    "prompt": "stored prompts are not supported",
    "context_management": _MANAGED,
    "background_options": "answers are not made in the background",
    "moderation": "answers are not moderated",
    "image": "this model takes text only",
    "response_format": "use text.format",
    "messages": "use input",
}
