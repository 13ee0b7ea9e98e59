"""The step edge, scheduler <-> worker: what one forward pass changes and what came out of it.

A StepCommand says only what changes. The worker applies, strictly in this order: closes, opens,
page appends, page copies (all sources are read before any target is written), then one forward over
`decode_slots` followed by `prefills`, then masks, then sampling, then the StepResult.
"""

from __future__ import annotations

from typing import Literal

from shared.messages.base import PROTOCOL_VERSION, Message
from shared.messages.request import SamplingParams
from shared.messages.stream import Scores

FaultKind = Literal["oom", "cuda", "nccl", "protocol", "internal"]


class WorkerHello(Message, frozen=True, tag=30):
    """Everything the scheduler must know of a worker before its first step."""

    worker_id: str
    incarnation: int
    model: str
    model_digest: str  # of config and weights' index; equal for equal models
    page_size: int
    num_pages: int
    max_slots: int
    max_batched_tokens: int  # most tokens of one step
    max_context: int  # longest sequence the model takes
    max_inflight_steps: int  # credits: steps that may be dispatched before a result returns
    vocab_size: int
    device: str
    kv_dtype: str
    kv_layout: str
    kv_bytes_per_page: int
    tp_size: int = 1
    kv_endpoints: tuple[str, ...] = ()  # a socket, `nixl:AGENT` where offers are taken too; empty: no transfers
    protocol: int = PROTOCOL_VERSION
    host_pages: int = 0  # pages its cache tiers hold beyond the device
    disk_pages: int = 0
    max_drafts: int = 0  # most guesses of one PrefillRow
    keeps_hidden: bool = False  # takes `keep_hidden` and rows without tokens


class WorkerWelcome(Message, frozen=True, tag=31):
    """The worker is part of the fleet; its next command is step 0 of this epoch."""

    epoch: int


class WorkerReset(Message, frozen=True, tag=32):
    """Forget slots and KV, take a new incarnation, say WorkerHello again (unless `fatal`: log and exit)."""

    epoch: int
    reason: str
    fatal: bool = False


class SlotOpen(Message, frozen=True):
    """A request takes its seat (part of StepCommand).

    Positions are absolute: position p holds token p of prompt + output. Output index of a sample taken
    at position p (the row whose last input is p) is p + 1 - prompt_length.
    """

    slot: int
    sampling: SamplingParams
    prompt_length: int
    num_computed: int  # tokens whose KV already lies in `pages` once this command's page copies are done
    pages: bytes  # int32: the slot's page table so far
    history: bytes = b""  # int32: prompt and output tokens before num_computed, only where penalties need them
    remaining: int = 0  # samples this slot may still take; the worker skips rows beyond


class PrefillRow(Message, frozen=True):
    """A chunk of known tokens for one slot (part of StepCommand), right after what it has computed.

    It runs even where its slot has ended, for its pages are shared once it is sent; only sampling is skipped.
    A row that begins at position 0 with `score_from` 0 yields a NaN for token 0, so that blocks join to a whole.

    Its last `drafts` tokens may be guesses of what will be sampled: then it samples after the last known token and
    after each guess, and what comes after a guess counts only where the sample before it is that guess. The slot has
    then computed the known tokens and the right guesses. Not for slots with scores or penalties.

    `start`: the row was planned before the result of the step before was there. Its first token, then the last known
    one, is what the slot was expected to sample last, at this position. Where the slot stands elsewhere or has sampled
    something else, its row is its own last sample, as in a decode row, and what is sampled behind the guesses is -1;
    where it has ended, there is no row.

    `keep_hidden`: the hidden state behind its last token, from which the next token's logits follow, is kept with the
    page of that token, one for each page, and copied with it. A row without tokens computes nothing: it samples from
    the state that is kept with the page of the slot's last computed token, which must be that token's.
    """

    slot: int
    token_ids: bytes  # int32: suffix only; also forced tokens
    sample: bool = True  # False: a chunk that is not the last one, or prefill only
    score_from: int = -1  # score this row's tokens from this index (absolute position); -1: none
    next_token: int = -1  # the token after this chunk: its score comes from this chunk's last logits
    drafts: int = 0
    keep_hidden: bool = False
    start: int = -1  # -1: nothing is expected


class StepCommand(Message, frozen=True, tag=33):
    """Groups of decode rows, and of rows with drafts, that share pages are nested: two of them have no slot in common,
    or the later one's slots are among the earlier one's and it has more pages. A slot may be named that has no row, so
    that groups outlive rows.
    """

    step_id: int  # dense per worker and epoch, from 0
    epoch: int
    decode_slots: bytes = b""  # int32: each row's input is the slot's own last sampled token
    prefills: tuple[PrefillRow, ...] = ()
    masked_slots: bytes = b""  # int32: sampling of these waits for TokenMasks of this step id; once for each sample
    opens: tuple[SlotOpen, ...] = ()
    closes: bytes = b""  # int32 slots
    page_slots: bytes = b""  # int32: slot[i] gets page_ids[i] appended to its table
    page_ids: bytes = b""
    page_copies: bytes = b""  # int32 pairs (source, target)
    group_slots: bytes = b""  # int32: slots of the decode rows that share pages, group after group
    group_sizes: bytes = b""  # int32: rows of each group; the outer before the inner
    group_pages: bytes = b""  # int32: full pages from position 0 that each group shares


class TokenMasks(Message, frozen=True, tag=34):
    """Header; the bitmask rides in the next frame: uint32 [len(slots), ceil(vocab / 32)], 1 = allowed.

    `slots` are those of masked_slots, in that order; the first of a slot is for its first sample, and so on.
    """

    step_id: int
    epoch: int
    slots: bytes  # int32


class RowScores(Message, frozen=True):
    """Scores of one row (part of StepResult)."""

    row: int  # output rows: index into token_ids; prompt rows: index into prefills
    scores: Scores


class RowError(Message, frozen=True):
    """One row failed (NaN logits, bad mask); its request ends, the batch goes on (part of StepResult)."""

    slot: int
    detail: str


class StepResult(Message, frozen=True, tag=35):
    """Token -1 marks a row that was skipped because its slot had already ended, or that failed.

    A row with drafts has so many samples more; -1 behind the first one: it does not count.
    """

    step_id: int
    epoch: int
    incarnation: int
    token_ids: bytes  # int32: decode_slots in order, then the sampling prefills in order
    scores: tuple[RowScores, ...] = ()  # of sampled tokens
    prompt_scores: tuple[RowScores, ...] = ()  # of prompt tokens
    errors: tuple[RowError, ...] = ()
    forward_ms: float = 0.0
    mask_wait_ms: float = 0.0
    queue_ms: float = 0.0  # command received to forward started


class WorkerFault(Message, frozen=True, tag=36):
    """Step `step_id` failed as a whole; no later step is executed until a new incarnation is welcome."""

    incarnation: int
    step_id: int
    kind: FaultKind
    detail: str = ""
    # oom: the next incarnation takes smaller steps, so that no request is to blame yet; or the step was one request
    # that fits into no step; empty: the worker does not say
    remedy: Literal["", "smaller", "none"] = ""


class Drain(Message, frozen=True, tag=44):
    """Nothing more will come: exit cleanly (after a WorkerDrain was settled)."""

    deadline_s: float


class WorkerDrain(Message, frozen=True, tag=45):
    """The worker asks to leave (SIGTERM): move its requests away, then send Drain."""

    incarnation: int
    deadline_s: float = 30.0
