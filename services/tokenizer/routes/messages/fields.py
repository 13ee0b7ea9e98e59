"""The bodies of Anthropic's messages routes, and what of them cannot be honoured. Leaves their meaning to translate."""

from __future__ import annotations

from typing import Any

from services.tokenizer.schema import REFUSED_CHAT, SamplingFields, StrOrList

Blocks = str | list[dict[str, Any]]


class MessagesBody(SamplingFields, kw_only=True):
    """POST /v1/messages and, without max_tokens, /v1/messages/count_tokens."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: Blocks | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None  # its budget is part of max_tokens
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None  # every prefix is cached anyway
    rid: StrOrList = None
    extra_key: StrOrList = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None


REFUSED_MESSAGES = {
    **REFUSED_CHAT,
    "container": "there are no containers",
    "mcp_servers": "servers of tools are for the client to call",
    "context_management": "send the messages that are to be seen",
    "response_format": "use output_config.format",
    "stop": "use stop_sequences",
}
