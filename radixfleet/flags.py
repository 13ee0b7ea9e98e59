"""Every flag of `radixfleet serve` as data: what it means and which RADIXFLEET_* variable it becomes.

Names and defaults are those operators of such servers know. Leaves values to the services, which check them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "RADIXFLEET_"
Kind = Literal["text", "int", "float", "switch", "list"]


@dataclass(frozen=True)
class Flag:
    """One flag. `setting` is a field of a service's configuration; without one the launcher itself uses the flag."""

    names: tuple[str, ...]
    help: str
    setting: str = ""
    kind: Kind = "text"
    choices: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()  # other words for a value
    sets: str = "true"  # what a switch sets
    least: float | None = None
    most: float | None = None

    @property
    def dest(self) -> str:
        return self.names[0].removeprefix("--").replace("-", "_")


def _launcher(*names: str, help: str, kind: Kind = "text", least: float | None = None) -> Flag:
    return Flag(names, help, kind=kind, least=least)


def _text(name: str, help: str, choices: tuple[str, ...] = (), **aliases: str) -> Flag:
    return Flag((name,), help, _field(name), choices=choices, aliases=tuple(aliases.items()))


def _list(name: str, help: str) -> Flag:
    """May be given several times, and each time with several values separated by commas."""
    return Flag((name,), help, _field(name), kind="list")


def _int(name: str, help: str, setting: str = "", least: float | None = 0) -> Flag:
    return Flag((name,), help, setting or _field(name), kind="int", least=least)


def _float(name: str, help: str, setting: str = "", most: float | None = None) -> Flag:
    return Flag((name,), help, setting or _field(name), kind="float", least=0, most=most)


def _switch(*names: str, help: str, setting: str = "", sets: str = "true") -> Flag:
    return Flag(names, help, setting or _field(names[0]), kind="switch", sets=sets)


def _field(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


GROUPS: dict[str, tuple[Flag, ...]] = {
    "model": (
        _launcher("--model-path", "--model", help="a folder, a GGUF file or a hub name [the small model]"),
        _launcher("--revision", help="branch, tag or commit of a hub model"),
        _text("--tokenizer-path", "folder with tokenizer.json [the model's]"),
        _text("--served-model-name", "name of the model in the API [the model path]"),
        _text("--chat-template", "jinja file that replaces the model's template"),
        _text("--tool-call-parser", "how the model writes tool calls [by its chat template]",
              ("auto", "hermes", "qwen", "qwen25", "qwen3", "llama3", "mistral", "pythonic")),
        _text("--reasoning-parser", "how the model marks its reasoning [none]",
              ("none", "deepseek-r1", "deepseek-v3", "glm45", "kimi", "kimi_k2", "magistral", "qwen3",
               "qwen3-thinking", "step3")),
        _text("--load-format", "where weights come from [auto]", ("auto", "safetensors", "dummy"), gguf="auto"),
        _text(
            "--dtype",
            "of weights and KV [auto]",
            ("auto", "bfloat16", "float16", "float32"),
            half="float16",
            float="float32",
        ),
        _text("--quantization", "how weights are kept: int8 (CPU), fp8 (CUDA), int4 (both) [none]",
              ("none", "int8", "fp8", "int4"), w8a16="int8", w8a8_fp8="fp8"),
        _text("--kv-cache-dtype", "of K and V: the weights' dtype, or 8 bits, so that twice as many fit [auto]",
              ("auto", "fp8_e4m3"), fp8="fp8_e4m3"),
        _text("--model-impl", "own decoder or transformers' [auto]", ("auto", "own", "transformers")),
        _int("--context-length", "longest prompt plus answer in tokens [the model's]"),
        _text("--sampling-defaults", "defaults of the model folder or OpenAI's [model]", ("model", "openai")),
    ),
    "HTTP": (
        _launcher("--host", help="address to listen on [127.0.0.1]"),
        _launcher("--port", help="port to listen on, 0 for any free one [30000]", kind="int", least=0),
        _text("--fastapi-root-path", "path prefix that a proxy in front removes"),
        _switch("--stream-output", help="/generate streams deltas instead of all text so far"),
        _switch("--no-script", help="no /script: each step of a program is a request", setting="script", sets="false"),
        _switch("--strict-length", help="refuse prompt + max_tokens beyond the context instead of clipping"),
        _int("--max-concurrent-requests", "HTTP requests at once [2048]", least=1),
        _int("--max-batch-size", "prompts times n of one HTTP request [512]", least=1),
        _int("--max-body-bytes", "largest request body [16 MiB]", least=1),
        _int("--max-logprobs", "most top logprobs per token [128]", least=1),
        _int("--max-stored-responses", "answers of /v1/responses that are kept [10000]"),
        _int("--max-stored-response-bytes", "memory for them [256 MiB]"),
        _float("--stored-response-ttl", "seconds they are kept [86400]"),
        Flag(("--keep-alive-interval", "--sse-keepalive-interval"), "seconds between comments on a silent stream [15]",
             "keep_alive_interval", kind="float", least=0.01),
        _float("--client-stall-timeout", "seconds after which a client that reads nothing is cut off [60]"),
        _float("--request-timeout", "seconds one request may take, waiting included; 0: any [0]"),
        _switch("--strict-fields", help="refuse fields that nobody knows instead of listing them in a header"),
        _list("--cors-origins", "origins whose pages may call the API from a browser, * for any [none]"),
        _text("--ssl-certfile", "PEM file of the certificate and its chain: serve HTTPS"),
        _text("--ssl-keyfile", "PEM file of the certificate's private key [in the certificate's file]"),
        _text("--ssl-keyfile-password", "of the private key; better as a variable"),
        _launcher("--http-workers", "--tokenizer-worker-num", help="processes that share the port [1]", kind="int",
                  least=1),
        _int("--text-threads", "threads for tokenising and templates [cores, at most 4]"),
    ),
    "keys": (
        _list("--api-key", "a key that clients must send; may be given several times"),
        _text("--api-key-file", "tenants, one a line: name key [requests/min] [tokens/min] [namespace]; mode 600"),
        _list("--admin-api-key", "key for an operator's commands; with keys on they need it"),
        _switch("--public-metrics", help="/metrics needs no key"),
    ),
    "scheduling and memory": (
        _launcher("--workers", "--dp-size", "--data-parallel-size", help="worker processes [1]", kind="int", least=1),
        Flag(("--tp-size", "--tensor-parallel-size", "--tp"), "ranks that share one worker's weights [1]", "tp_size",
             kind="int", least=1),
        _text("--device", "where workers compute [auto]", ("auto", "cpu", "cuda")),
        _float("--mem-fraction-static", "part of the memory for weights and KV [0.6 on a CPU, 0.88 on a GPU]", most=1),
        _int("--max-total-tokens", "KV pool of a worker in tokens [from free memory]"),
        _int("--max-running-requests", "requests in one batch of a worker [256]"),
        _float("--host-cache-gb", "memory of each worker's host for KV pages that leave its device [0]"),
        _float("--disk-cache-gb", "disk of each worker for KV pages that leave the device and the memory [0]"),
        _text("--disk-cache-dir", "folder of the disk tier; a worker that starts again finds it there [none]"),
        _float("--transfer-timeout", "seconds KV pages may take from one worker to another [10]"),
        _int("--max-queued-requests", "requests that may wait; more are refused [4096]", least=1),
        _int("--max-queued-tokens", "prompt tokens that may wait [16 Mi]", least=1),
        _int("--chunked-prefill-size", "prompt tokens of one step; -1: no chunks [the worker's limit]", least=-1),
        _int("--max-prefill-tokens", "all tokens of one step [512 on CPU, 8192 on CUDA]", "max_batched_tokens"),
        _text("--schedule-policy", "order of waiting requests [fcfs]", ("fcfs", "lpm")),
        _float("--ageing-seconds", "under lpm a request that waits this long goes first [5]"),
        _int("--page-size", "KV tokens per page; hits are token-granular anyway [16]", least=1),
        _switch("--disable-radix-cache", help="share no prefixes between requests"),
        _text("--speculative-algorithm", "guesses of the next tokens, from the text so far and the radix tree (ngram), "
              "on workers that take them [ngram]", ("ngram", "none"), NGRAM="ngram", NONE="none"),
        _int("--speculative-num-draft-tokens", "most guesses of one request in one step [31]"),
        _switch("--disable-overlap-schedule", help="one step at a time", setting="max_inflight_steps", sets="1"),
        _int("--max-inflight-steps", "steps dispatched ahead of their results [2]", least=1),
        _text("--attention-backend", "kernels of attention: native on CPU, flashinfer on CUDA [auto]",
              ("auto", "native", "flashinfer", "reference")),
        _text("--moe-backend", "kernels of experts on CUDA [auto]", ("auto", "flashinfer", "torch")),
        _text("--page-transport", "how KV pages go to other workers: NIXL between GPUs that have it, or sockets [auto]",
              ("auto", "zmq", "nixl")),
        _switch("--disable-cuda-graph", help="launch every kernel of a decode step by itself"),
        _int("--cuda-graph-max-bs", "rows of the largest CUDA graph [--max-running-requests]"),
        _int("--threads", "threads of a worker on CPU [physical cores shared by the workers]"),
        _switch("--disable-thread-pinning", help="let the system move a CPU worker's threads from core to core"),
        _switch("--enable-deterministic-inference", "--deterministic", help="sums do not depend on the batch",
                setting="deterministic"),
        _int("--random-seed", "seed of the seeds that requests do not give [drawn]"),
        _float("--watchdog-timeout", "seconds one step may take [300]", "step_timeout"),
        _float("--worker-grace", "seconds requests wait while no worker is left, or for another lost service [30]"),
    ),
    "logs and metrics": (
        _text("--log-level", "of all services [info]", ("debug", "info", "warning", "error", "critical")),
        _text("--log-level-http", "of the access log [warning]"),
        _text("--log-format", "console at a terminal, else json [auto]", ("auto", "console", "json")),
        _switch("--log-requests", help="one line per request"),
        _text("--kv-events-endpoint", "where changes of the radix tree are published, tcp or ipc [nowhere]"),
        _text("--kv-events-replay-endpoint", "where subscribers ask for events that they missed [nowhere]"),
        _text("--kv-events-topic", "first frame of every event [kv-events]"),
        _int("--kv-events-buffer", "batches of events that can be asked for again [10000]", least=1),
        _int("--decode-log-interval", "steps between two Decode batch lines [40]", least=1),
        _switch("--enable-metrics", help="accepted; /metrics is always on"),
        _text("--metrics-custom-labels", "names that callers may label requests with, separated by commas [none]"),
        _switch("--enable-cache-report", help="accepted; cached_tokens are always reported"),
    ),
    "life": (
        _launcher("--skip-server-warmup", help="no request of our own before the ready line", kind="switch"),
        _float("--drain-timeout", "seconds running requests get after SIGTERM [30]"),
        _launcher("--frozen-timeout", help="seconds of silence after which a service is restarted, 0: never [10]",
                  kind="float", least=0),
        _launcher("--run-dir", help="folder in which a private one for the sockets is made [the runtime folder]"),
        Flag(("--launcher",), "who starts workers: this machine or a Ray cluster [local]", choices=("local", "ray")),
        _launcher("--ray-address", help="of the Ray cluster; local: one on this machine alone [auto]"),
        _launcher("--worker-bind", help="tcp endpoint where workers on other hosts may join [none]"),
        _text("--curve-dir", "folder with keys for tcp between hosts, see radixfleet keygen [no keys]"),
    ),
}  # fmt: skip

# Flags of other servers that ask for what is the case here anyway; another value is refused.
ALWAYS: dict[str, tuple[str, ...]] = {
    "--tokenizer-mode": ("auto",),
    "--radix-eviction-policy": ("lru",),
    "--grammar-backend": ("auto", "llguidance"),
    "--pp-size": ("1",),
    "--nnodes": ("1",),
    "--node-rank": ("0",),
    "--num-continuous-decode-steps": ("1",),
    "--stream-interval": ("1",),
    "--schedule-conservativeness": (),  # nothing is reserved ahead, so there is nothing to tune
}
ALWAYS_SWITCHES = frozenset({"--enable-mixed-chunk", "--sleep-on-idle", "--trust-remote-code"})

REFUSED: dict[str, str] = {
    "--skip-tokenizer-init": "the HTTP service always has its tokenizer; send input_ids to skip tokenising",
    "--is-embedding": "embedding models are not supported",
    "--allow-auto-truncate": "prompts are never cut in silence",
    "--enable-lora": "LoRA adapters are not supported",
    "--lora-paths": "LoRA adapters are not supported",
    "--completion-template": "completions are sent as they are",
    "--warmups": "there is one warm-up request; --skip-server-warmup leaves it out",
}


def all_flags() -> tuple[Flag, ...]:
    return tuple(flag for group in GROUPS.values() for flag in group)
