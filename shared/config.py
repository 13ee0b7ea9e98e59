"""One small frozen configuration per service, from flags over environment over defaults.

A field `max_queued_requests` is the flag `--max-queued-requests` and the variable
`RADIXFLEET_MAX_QUEUED_REQUESTS`. Derived values are properties of their users, never rewrites here.
Leaves the user's `serve` command to the radixfleet package, which hands flags on as environment.
"""

from __future__ import annotations

import argparse
import os
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

PREFIX = "RADIXFLEET_"
DEFAULT_PAGE_SIZE = 16

C = TypeVar("C", bound="ServiceConfig")
Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
ToolCallParser = typing.Literal["auto", "hermes", "qwen", "qwen25", "qwen3", "llama3", "mistral", "pythonic"]
ReasoningParser = typing.Literal[
    "none", "deepseek-r1", "deepseek-v3", "glm45", "kimi", "kimi_k2", "magistral", "qwen3", "qwen3-thinking", "step3"
]


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What every service knows."""

    service_id: str = ""  # empty: drawn at start
    log_level: typing.Literal["debug", "info", "warning", "error", "critical"] = "info"
    log_format: typing.Literal["auto", "console", "json"] = "auto"
    heartbeat_interval: float = 1.0
    drain_timeout: float = 30.0  # seconds for running requests after SIGTERM
    curve_dir: str = ""  # folder with keys for tcp sockets; see shared.curve
    health_bind: str = ""  # where `radixfleet ping` is answered, tcp or ipc; empty: nowhere


class TokenizerConfig(ServiceConfig, frozen=True, kw_only=True):
    model_path: str = ""  # a folder; the launcher resolves names and files
    model_name: str = ""  # the name as the user gave it: model_path of /get_model_info
    served_model_name: str = ""
    tokenizer_path: str = ""
    chat_template: str = ""  # a file that replaces the model's own
    tool_call_parser: ToolCallParser = "auto"  # by the chat template
    reasoning_parser: ReasoningParser = "none"
    max_stored_responses: NonNegative = 10_000  # of /v1/responses; the least recently used go first
    max_stored_response_bytes: NonNegative = 256 << 20
    stored_response_ttl: float = 86400.0
    scheduler: str = "tcp://127.0.0.1:5550"
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 30000
    reuse_port: bool = False  # several processes listen on host and port, the kernel spreads the connections
    http_fd: int = -1  # an inherited listening socket instead of host and port
    context_length: NonNegative = 0  # 0: the model's
    strict_length: bool = False
    sampling_defaults: typing.Literal["model", "openai"] = "model"
    max_concurrent_requests: Positive = 2048
    max_body_bytes: Positive = 16 << 20
    max_batch_size: Positive = 512  # prompts times n of one HTTP request
    max_logprobs: Positive = 128
    text_threads: NonNegative = 0  # 0: as many as cores, at most 4
    worker_grace: float = 0.0  # how long requests wait for a service that is away; 0: 30 s
    keep_alive_interval: float = 15.0
    client_stall_timeout: float = 60.0
    log_requests: bool = False
    enable_metrics: bool = True
    metrics_custom_labels: str = ""  # names that callers may label their requests with, separated by commas
    enable_cache_report: bool = True  # accepted for compatibility; the report is always there
    stream_output: bool = False  # /generate streams deltas instead of cumulative text
    script: bool = True  # whether /script is there
    fastapi_root_path: str = ""
    log_level_http: str = ""
    api_key: str = ""  # keys of tenants without limits, separated by commas
    api_key_file: str = ""  # tenants with names, limits and namespaces; see shared.tenants
    admin_api_key: str = ""  # for an operator's commands; several separated by commas
    launch_key: str = ""  # the launcher's own, drawn at start: its warm-up request
    public_metrics: bool = False
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    ssl_keyfile_password: str = ""
    cors_origins: str = ""  # separated by commas; "*" for any
    strict_fields: bool = False
    request_timeout: Annotated[float, Meta(ge=0)] = 0.0  # seconds of one request; 0: none
    random_seed: NonNegative = 0  # 0: seeds are drawn from the system


class SchedulerConfig(ServiceConfig, frozen=True, kw_only=True):
    tokenizer_bind: str = "tcp://127.0.0.1:5550"
    detokenizer_bind: str = "tcp://127.0.0.1:5551"
    worker_bind: str = "tcp://127.0.0.1:5560"
    model_path: str = ""
    api_key_file: str = ""  # the tenants' budgets stand there
    page_size: Positive = DEFAULT_PAGE_SIZE
    schedule_policy: typing.Literal["fcfs", "lpm"] = "fcfs"
    disable_radix_cache: bool = False
    speculative_algorithm: typing.Literal["ngram", "none"] = "ngram"
    speculative_num_draft_tokens: NonNegative = 0  # most guesses of one row; 0: what the worker offers
    chunked_prefill_size: int = 0  # tokens per step and worker; 0: the worker's own limit; -1: no chunks
    max_running_requests: NonNegative = 0  # per worker; 0: the worker's slots
    max_queued_requests: Positive = 4096
    max_queued_tokens: Positive = 16 << 20
    max_inflight_steps: NonNegative = 0  # run-ahead depth; 0: what the worker offers
    decode_log_interval: Positive = 40
    worker_grace: float = 30.0  # how long requests wait while no worker is left
    heartbeat_timeout: float = 3.0
    step_timeout: float = 300.0
    kv_events_endpoint: str = ""  # where changes of the radix tree are published; empty: nowhere
    kv_events_replay_endpoint: str = ""  # where a subscriber asks for what it has missed
    kv_events_topic: str = "kv-events"
    kv_events_buffer: Positive = 10_000  # batches that can be asked for again
    ageing_seconds: float = 5.0  # under lpm a request waiting this long goes first
    transfer_timeout: float = 10.0  # seconds pages may be on their way to another worker
    recompute: bool = True  # off, for proofs: a request ends where cached pages could not be had


class WorkerConfig(ServiceConfig, frozen=True, kw_only=True):
    scheduler: str = "tcp://127.0.0.1:5560"
    model_path: str = ""
    model_name: str = ""
    device: typing.Literal["auto", "cpu", "cuda"] = "auto"
    dtype: typing.Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    load_format: typing.Literal["auto", "safetensors", "dummy"] = "auto"
    quantization: typing.Literal["none", "int8", "fp8", "int4"] = "none"  # of the weights, at load
    model_impl: typing.Literal["auto", "own", "transformers"] = "auto"
    attention_backend: typing.Literal["auto", "native", "flashinfer", "reference"] = "auto"
    moe_backend: typing.Literal["auto", "flashinfer", "torch"] = "auto"
    kv_cache_dtype: typing.Literal["auto", "fp8_e4m3"] = "auto"
    page_size: Positive = DEFAULT_PAGE_SIZE
    mem_fraction_static: Annotated[float, Meta(ge=0, le=1)] = 0.0  # 0: what suits the device
    max_total_tokens: NonNegative = 0  # KV pool in tokens; 0: from free memory
    max_running_requests: NonNegative = 0  # slots; 0: 256
    max_batched_tokens: NonNegative = 0  # tokens of one step; 0: 512 on CPU, 8192 on CUDA
    context_length: NonNegative = 0
    max_inflight_steps: Positive = 2
    threads: NonNegative = 0  # 0: all physical cores
    disable_thread_pinning: bool = False
    deterministic: bool = False
    tp_size: Positive = 1  # ranks that share each layer's weights
    tp_rank: NonNegative = 0
    tp_meeting: str = ""  # HOST:PORT of rank 0; empty: rank 0 starts the others on its machine
    host_cache_gb: Annotated[float, Meta(ge=0)] = 0.0  # memory for pages that leave the device
    disk_cache_gb: Annotated[float, Meta(ge=0)] = 0.0  # and for those that leave the memory
    disk_cache_dir: str = ""  # in a folder of its own below this one
    kv_bind: str = ""  # where other workers send pages to; empty: beside the way to the scheduler
    page_transport: typing.Literal["auto", "zmq", "nixl"] = "auto"  # how pages go to other workers
    disable_cuda_graph: bool = False
    cuda_graph_max_bs: NonNegative = 0  # rows of the largest graph; 0: as many as there are slots


class DetokenizerConfig(ServiceConfig, frozen=True, kw_only=True):
    scheduler: str = "tcp://127.0.0.1:5551"
    model_path: str = ""
    tokenizer_path: str = ""
    bind: str = "tcp://127.0.0.1:5552"
    advertise: str = ""  # endpoint tokenizers connect to; empty: the bound one


def load(kind: type[C], argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> C:
    """The configuration of one service. Raises SystemExit with a message that names the bad field."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for name in kind.__struct_fields__:
        raw = environ.get(PREFIX + name.upper())
        if raw is not None:
            values[name] = raw
    values.update(_parse_flags(kind, argv))
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise SystemExit(f"radixfleet: bad configuration: {error}") from None


def _parse_flags(kind: type[ServiceConfig], argv: Sequence[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog=kind.__name__.removesuffix("Config").lower(), allow_abbrev=False)
    hints = typing.get_type_hints(kind)
    for name in kind.__struct_fields__:
        flag = "--" + name.replace("_", "-")
        if _is_bool(hints[name]):
            parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS)
        else:
            parser.add_argument(flag, dest=name, default=argparse.SUPPRESS)
    return vars(parser.parse_args(list(argv)))


def _is_bool(hint: object) -> bool:
    return hint is bool or (isinstance(hint, types.UnionType) and bool in typing.get_args(hint))
