"""The frontend edge, tokenizer <-> scheduler: requests, aborts, operations, status."""

from __future__ import annotations

from typing import Literal

from shared.messages.base import Message
from shared.messages.control import ServiceMetrics

RejectCode = Literal[
    "queue_full",
    "too_long",
    "bad_constraint",
    "no_worker",
    "draining",
    "duplicate_id",
    "internal",
    "rate_limited",
]
OperationName = Literal[
    "flush_cache",
    "abort_all",
    "pause",
    "continue",
    "drain_worker",
    "tree",
    "requests",
    "workers",
    "set_log_level",
    "unpin",
]


class SamplingParams(Message, frozen=True):
    """How tokens are chosen. All numbers were checked at the door; nothing here is optional or None."""

    max_tokens: int = 128  # 0: prefill only
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    min_p: float = 0.0
    seed: int = 0  # 0 <= seed < 2**63; always drawn or given
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    min_new_tokens: int = 0  # until then no stop token is sampled
    stop_token_ids: tuple[int, ...] = ()  # the whole set; the model's EOS ids are in it unless ignored
    logit_bias_ids: bytes = b""  # int32
    logit_bias_values: bytes = b""  # float32, same length
    logprobs: int = -1  # -1: none; 0: the chosen token's; k: and the top k
    prompt_logprobs_from: int = -1  # -1: none; s: score prompt tokens s.. (token 0 has no score)
    logprob_token_ids: bytes = b""  # int32: also report these ids at every scored position


class Constraint(Message, frozen=True):
    """What the output must conform to; only the scheduler's compiler reads the source."""

    kind: Literal["regex", "json_schema", "ebnf", "lark", "choice", "structural_tag", "xml_schema"]
    source: str
    best_effort: bool = False
    any_whitespace: bool = False
    complete_within_budget: bool = False
    jump_forward: bool = True
    refuse_small_budget: bool = True  # False: where no complete text fits, the output is cut instead
    field: str = ""  # how the client called it, where that is not the kind


class GenerateRequest(Message, frozen=True, tag=10):
    """One choice of one prompt. `output_ids` are tokens this frontend already holds (a resumed request)."""

    request_id: str
    frontend_id: str
    prompt_ids: bytes  # int32 little endian, as all ids
    sampling: SamplingParams
    epoch: int = 0  # the scheduler life the frontend saw when it sent this
    output_ids: bytes = b""
    namespace: bytes = b""  # isolates cache entries; equal tokens in other namespaces never match
    constraint: Constraint | None = None
    stop_strings: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stream: bool = True  # False: the frontend wants text only at the end, chunks may be merged
    priority: int = 0
    tenant: str = ""
    group_id: str = ""  # requests of one group (n > 1, fork) stay on one worker while it has room
    choice_index: int = 0
    deadline_s: float = 0.0  # seconds from receipt; 0: none
    traceparent: str = ""
    thinking_end_id: int = -1  # a constraint starts after this token
    names: tuple[str, ...] = ()  # what callers of its tenant may abort it by, beside its id
    counted: bool = True  # against its tenant's requests a minute: once for each HTTP request
    pin: str = ""  # under this name its path stays in the tree once it has ended; ends the pin of that name
    pin_s: float = 0.0  # for so many seconds, or until somebody asks to unpin it; 0: not at all


class AbortRequest(Message, frozen=True, tag=11):
    """Idempotent; unknown ids are ignored. Ids are exact, never prefixes. Names reach requests of every frontend."""

    request_ids: tuple[str, ...]
    reason: str = "aborted by the client"
    names: tuple[str, ...] = ()
    tenant: str = ""  # whose requests the names mean; empty: anybody's


class RequestRejected(Message, frozen=True, tag=12):
    """The request was never admitted: nothing else will come for it."""

    request_id: str
    code: RejectCode
    detail: str = ""
    retry_after_s: float = 0.0


class StreamAck(Message, frozen=True, tag=14):
    """The frontend holds the final chunk of these requests; the scheduler may forget them."""

    request_ids: tuple[str, ...]


class Operation(Message, frozen=True, tag=15):
    """One command of an operator. `argument` is a worker id, a level, ...; answered once by nonce."""

    nonce: int
    name: OperationName
    argument: str = ""
    tenant: str = ""  # abort_all: only this one's requests


class OperationDone(Message, frozen=True, tag=16):
    nonce: int
    ok: bool
    detail: str = ""
    body: bytes = b""  # JSON, for the operations that report


class WorkerStatus(Message, frozen=True):
    """What the scheduler knows of one worker (part of SystemStatus)."""

    worker_id: str
    device: str
    ready: bool
    draining: bool
    num_pages: int
    pages_free: int
    pages_cached: int  # held by the tree and evictable
    max_slots: int
    running: int
    inflight_steps: int
    heartbeat_age_s: float
    cached_tokens: int = 0  # total hits on this worker
    computed_tokens: int = 0  # total prefilled tokens
    decoded_tokens: int = 0
    pages_held: int = 0  # in use by requests, transfers and pins
    queue: int = 0  # requests placed there that are not decoding yet
    kv_pages_in: int = 0  # total, from other workers and from cache tiers
    kv_pages_out: int = 0
    transfers: int = 0  # under way, in and out
    host_pages: int = 0  # of the cache tier in the host's memory
    host_pages_used: int = 0
    disk_pages: int = 0
    disk_pages_used: int = 0


class TenantUsage(Message, frozen=True):
    """What one tenant has used since the scheduler began (part of SystemStatus)."""

    name: str
    requests: int = 0
    rejected: int = 0  # for its rate or its token budget
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    live: int = 0  # running or waiting now


class SystemStatus(Message, frozen=True, tag=13):
    """The whole system in one picture: sent on change, at most 5/s, at least 1/s."""

    epoch: int
    ready: bool
    num_running: int
    num_waiting: int
    max_request_tokens: int = 0  # prompt + output of one request can never exceed this; 0: no worker yet
    page_size: int = 16
    detokenizers: tuple[tuple[str, str], ...] = ()  # (service_id/incarnation, endpoint)
    workers: tuple[WorkerStatus, ...] = ()
    counters: dict[str, float] = {}
    services: tuple[ServiceMetrics, ...] = ()
    model: str = ""
    detail: str = ""  # why it is not ready
    retry_after_s: float = 0.0
    tenants: tuple[TenantUsage, ...] = ()
