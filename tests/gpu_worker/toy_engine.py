"""A deterministic toy model over a real paged cache, and commands in one line, for tests of the engine."""

from __future__ import annotations

import numpy as np
import torch

from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.cuda.start import graph_device, split
from services.gpu_worker.engine import Engine
from services.gpu_worker.executor import StepEngine
from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.slots import SlotLimits
from shared.ints import pack, unpack
from shared.messages.request import SamplingParams
from shared.messages.step import PrefillRow, SlotOpen, StepCommand, StepResult

VOCAB = 100
PAGE = 4
CPU = torch.device("cpu")


def toy_logits(tokens: list[int], vocab: int = VOCAB) -> np.ndarray:
    """float32 [vocab]: a function of all tokens seen and of their order."""
    state = 0
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % (2**61 - 1)
    return (np.random.default_rng(state).standard_normal(vocab) * 3).astype(np.float32)


def toy_greedy(prompt: list[int], count: int) -> list[int]:
    """What greedy decoding of the toy model yields."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(toy_logits(tokens).argmax()))
    return tokens[len(prompt) :]


class ToyRunner:
    """Keeps each token's id in the cache as its K; logits come only from what the row's pages hold.

    What it keeps as a hidden state are the logits.
    """

    kv_bytes_read = 0
    blocks = None

    def __init__(self, num_pages: int, page_size: int = PAGE, vocab: int = VOCAB, keeps_hidden: bool = False) -> None:
        self.kv_cache = KVCache(1, num_pages, page_size, 1, 1, torch.float32, CPU, hidden=vocab if keeps_hidden else 0)
        self.vocab = vocab
        self.batches: list[ForwardBatch] = []
        self.broken_tokens: set[int] = set()  # rows that end in one of these have NaN logits
        self.error: Exception | None = None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        self.batches.append(batch)
        size = self.kv_cache.page_size
        keys = self.kv_cache.layers[0][:, 0, 0, :, 0]
        keys[batch.kv_slots // size, batch.kv_slots % size] = batch.token_ids.float()
        rows = torch.repeat_interleave(torch.arange(batch.num_rows), batch.qo_indptr.diff().long())
        wanted, hidden = batch.logit_rows.tolist(), batch.hidden
        wanted += hidden.kept.tolist() if hidden else []
        out = [self._row(batch, keys, int(rows[t]), int(batch.positions[t])) for t in wanted]
        logits = torch.from_numpy(np.stack(out)) if out else torch.zeros(0, self.vocab)
        return hidden.exchange(logits) if hidden else logits

    def _row(self, batch: ForwardBatch, keys: torch.Tensor, row: int, position: int) -> np.ndarray:
        pages = batch.page_tables[row, : position // self.kv_cache.page_size + 1].long()
        tokens = keys[pages].reshape(-1)[: position + 1].long().tolist()
        logits = toy_logits(tokens, self.vocab)
        return np.full_like(logits, np.nan) if tokens[-1] in self.broken_tokens else logits


class Steps:
    """An engine whose steps are numbered by themselves."""

    def __init__(self, engine: StepEngine) -> None:
        self.engine = engine
        self.masks: dict[int, tuple[bytes, bytes]] = {}
        self.steps = 0

    def step(self, decode: list[int] | None = None, **fields: object) -> StepResult:
        command = StepCommand(step_id=self.steps, epoch=1, decode_slots=pack(decode or []), **fields)  # type: ignore[arg-type]
        self.steps += 1
        return self.engine.execute(command, self.masks.__getitem__, incarnation=7)


class Bench(Steps):
    """An engine on the toy model."""

    engine: Engine

    def __init__(
        self,
        slots: int = 8,
        pages: int = 64,
        context: int = 64,
        max_tokens: int = 64,
        vocab: int = VOCAB,
        drafts: int = 0,
        keeps_hidden: bool = False,
    ) -> None:
        self.runner = ToyRunner(pages, vocab=vocab, keeps_hidden=keeps_hidden)
        self.limits = SlotLimits(slots, pages, PAGE, context, vocab, drafts, keeps_hidden)
        self.whole = Engine(self.runner, self.limits, max_tokens, CPU)
        # In one piece; in two halves where the tests are run with the switch of `cuda.start`.
        super().__init__(split(self.whole, graph_device(CPU)))

    def run(self, prompt: list[int], count: int, params: SamplingParams = SamplingParams(), slot: int = 0) -> list[int]:  # noqa: B008
        """Prefill and decode one request alone; its pages are 0, 1, ..."""
        pages = list(range(-(-(len(prompt) + count) // PAGE)))
        opened = open_slot(slot, len(prompt), pages, params)
        out = tokens(self.step(opens=(opened,), prefills=(prefill(slot, prompt),)))
        for _ in range(count - 1):
            out += tokens(self.step([slot]))
        self.step(closes=pack([slot]))
        return out


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, **fields)  # type: ignore[arg-type]


def open_slot(
    slot: int,
    prompt_length: int,
    pages: list[int],
    params: SamplingParams | None = None,
    computed: int = 0,
    history: list[int] | None = None,
    remaining: int = 1000,
) -> SlotOpen:
    sampling = greedy() if params is None else params
    return SlotOpen(slot, sampling, prompt_length, computed, pack(pages), pack(history or []), remaining)


def prefill(slot: int, ids: list[int], sample: bool = True, **fields: int) -> PrefillRow:
    return PrefillRow(slot=slot, token_ids=pack(ids), sample=sample, **fields)


def tokens(result: StepResult) -> list[int]:
    return unpack(result.token_ids).tolist()


def floats(data: bytes) -> list[float]:
    return np.frombuffer(data, dtype="<f4").tolist()
