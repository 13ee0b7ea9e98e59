"""The HTTP bodies as this server reads them; leaves ranges to validation and meaning to sampling and the routes.

Every field may be null, as clients send it. Names that are known but cannot be honoured stand in REFUSED.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from services.tokenizer.scripts.body import PromptPart

StrOrList = str | list[str] | None
Ids = list[int]


class ConstraintFields(msgspec.Struct, kw_only=True):
    """What the output must conform to: at most one of the first seven."""

    regex: str | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    ebnf: str | None = None
    lark: str | None = None
    choice: list[str] | None = None
    structural_tag: str | dict[str, Any] | None = None
    xml_schema: str | dict[str, Any] | None = None
    best_effort: bool | None = None
    complete_within_budget: bool | None = None
    jump_forward: bool | None = None
    any_whitespace: bool | None = None


class SamplingFields(ConstraintFields, kw_only=True):
    """How tokens are chosen, in the words of the OpenAI endpoints and their usual extensions."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: StrOrList = None
    stop_token_ids: list[int] | None = None
    stop_regex: StrOrList = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIFields(SamplingFields, kw_only=True):
    """What chat and completions share beside sampling."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    rid: StrOrList = None
    extra_key: StrOrList = None
    cache_salt: str | None = None
    custom_labels: dict[str, str] | None = None
    priority: int | None = None
    timeout: float | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ChatBody(OpenAIFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    parallel_tool_calls: bool | None = None


class ChatTemplateBody(msgspec.Struct, kw_only=True):
    """POST /apply_chat_template."""

    messages: list[dict[str, Any]]
    model: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(OpenAIFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    parse_special: bool | None = None
    session_params: dict[str, Any] | None = None


class NativeSampling(SamplingFields, kw_only=True):
    """`sampling_params` of /generate: the same wishes, some under names of their own."""

    max_tokens: int | None = msgspec.field(default=None, name="max_new_tokens")
    min_tokens: int | None = msgspec.field(default=None, name="min_new_tokens")
    sampling_seed: int | None = None
    stream_interval: int | None = None

    def __post_init__(self) -> None:
        if self.sampling_seed is not None:
            if self.seed not in (None, self.sampling_seed):
                raise ValueError("seed and sampling_seed differ; send one")
            self.seed = self.sampling_seed


NATIVE_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


class GenerateBody(msgspec.Struct, kw_only=True):
    """POST /generate. Lists make a batch; per-item options are lists of the same length."""

    text: StrOrList = None
    input_ids: list[int | list[int]] | None = None
    prompt_parts: list[PromptPart] | None = None  # one prompt of texts and ids in any order
    templated: bool | None = None  # its parts were opened by a chat template, which wrote its own first token
    pin: str | None = None  # keep the path in the cache under this name, until /unpin or for pin_seconds
    pin_seconds: float | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: StrOrList = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    extra_key: StrOrList = None
    cache_salt: StrOrList = None
    custom_labels: dict[str, str] | None = None
    priority: int | None = None
    timeout: float | None = None
    parse_special: bool | None = None
    model: str | None = None
    session_params: dict[str, Any] | None = None
    no_logs: bool | None = None  # texts never stand in logs


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize."""

    prompt: str | list[str]
    model: str | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool | None = None


class AbortBody(msgspec.Struct, kw_only=True):
    """POST /abort_request."""

    rid: str | None = None
    abort_all: bool | None = None


_GUIDED = "white space between JSON tokens is compact, or free with any_whitespace"
_MULTIMODAL = "this model takes text only"
_ADAPTER = "adapters are not supported"
_EMBEDDINGS = "embeddings as input are not supported"
_DISAGGREGATION = "prefill/decode disaggregation is not supported"
_CODE = "custom code is not accepted from requests"
_SESSION = "use session_params of /generate or /v1/completions"
_BACKGROUND = "answers are not kept for later"

_COMMON = {
    "lora_path": _ADAPTER,
    "lora_id": _ADAPTER,
    "session_id": _SESSION,
    "background": _BACKGROUND,
    "custom_logit_processor": _CODE,
    "custom_params": _CODE,
    "return_hidden_states": "hidden states are not returned",
    "bootstrap_host": _DISAGGREGATION,
    "bootstrap_port": _DISAGGREGATION,
    "bootstrap_room": _DISAGGREGATION,
    "data_parallel_rank": "the scheduler chooses the worker",
    "beam_width": "beam search is not supported",
    "use_beam_search": "beam search is not supported",
}
REFUSED_OPENAI = {
    **_COMMON,
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": _MULTIMODAL,
    "modalities": _MULTIMODAL,  # beyond text
    "prediction": "predicted outputs are not supported",
    "web_search_options": "web search is not supported",
    "guided_whitespace_pattern": _GUIDED,
    "chat_template": "templates are not accepted from requests",
    "documents": "documents are not supported",
    "input_ids": "use /generate for token ids",
}
REFUSED_CHAT = {**REFUSED_OPENAI, "session_params": _SESSION}
REFUSED_GENERATE = {
    **_COMMON,
    "input_embeds": _EMBEDDINGS,
    "image_data": _MULTIMODAL,
    "video_data": _MULTIMODAL,
    "audio_data": _MULTIMODAL,
    "modalities": _MULTIMODAL,
}
REFUSED_SAMPLING = {"custom_params": _CODE, "beam_width": "beam search is not supported"}

ToolChoice = Literal["none", "auto", "required"]
