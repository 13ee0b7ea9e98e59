"""A worker's inside without a model: pages hold tokens, the next token is a hash of all tokens found in them.

It verifies the step protocol as it executes: dense ids, slots, page tables, copies, who writes which page. Each cell of
a page also holds a hash of everything before it, as real KV does, so a page in the wrong place is noticed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from shared import ints
from shared.messages.request import SamplingParams
from shared.messages.step import PrefillRow, RowError, RowScores, SlotOpen, StepCommand, StepResult, WorkerHello
from shared.messages.stream import Scores
from tests.fake_model import EMPTY, chain, choose, logprob


class ProtocolError(AssertionError):
    """The scheduler broke a rule of the step protocol."""


@dataclass(slots=True)
class _Slot:
    sampling: SamplingParams
    prompt_length: int
    pages: list[int]
    length: int  # positions with KV
    state: int  # hash of these
    remaining: int
    last: int = -1  # the last sampled token, not yet in the pages
    ended: bool = False


@dataclass(slots=True)
class FakeEngine:
    """`verify` off: only the arithmetic, for benchmarks."""

    hello: WorkerHello
    epoch: int = 0
    verify: bool = True
    next_step: int = 0
    ms_per_step: float = 0.0  # what it says a forward takes, and each of its tokens besides
    ms_per_token: float = 0.0
    prefill_tokens: int = 0
    decode_rows: int = 0
    guesses: int = 0  # tokens it was sent as drafts
    right_guesses: int = 0
    copies: int = 0
    shared_reads: int = 0  # pages that groups spared decode rows to read
    choose: Callable[[int, bytes | None, SamplingParams], int] = choose
    fail_tokens: set[int] = field(default_factory=set)  # a row that would sample one of these fails
    steps: list[StepCommand] = field(default_factory=list)
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _cells: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)  # page -> (position, token, hash)
    recalls: int = 0  # rows without tokens
    expected: int = 0  # rows that were planned ahead, with guesses
    disappointed: int = 0  # those of them whose slot stood elsewhere
    _hidden: dict[int, tuple[int, int]] = field(default_factory=dict)  # page -> (position behind its token, hash)
    _masks: dict[int, list[bytes]] = field(default_factory=dict)  # of this step, by slot: one for each sample
    _users: dict[int, int] = field(default_factory=dict)  # page -> open slots with it in their table

    def read_page(self, page: int) -> list[tuple[int, int, int]]:
        """A full page, as it is sent to another worker. Raises ProtocolError for one that is not full."""
        cells = self._cells.get(page, [])
        self._check(len(cells) == self.hello.page_size, f"page {page} is sent with {len(cells)} of its tokens")
        return list(cells)

    def write_page(self, page: int, cells: list[tuple[int, int, int]]) -> None:
        """Beside the steps. Whatever still uses the page will find something else in it."""
        self._cells[page] = list(cells)
        self._hidden.pop(page, None)

    @property
    def open_slots(self) -> int:
        return len(self._slots)

    def execute(self, command: StepCommand, masks: tuple[bytes, bytes] | None = None) -> StepResult:
        """One step; `masks` are the slots and rows of its TokenMasks. Raises ProtocolError."""
        self._take_masks(command, masks)
        self._check(command.epoch == self.epoch, f"epoch {command.epoch}, not {self.epoch}")
        self._check(command.step_id == self.next_step, f"step {command.step_id} instead of {self.next_step}")
        self.next_step += 1
        self.steps.append(command)
        del self.steps[:-50]
        for slot in ints.unpack(command.closes):
            self._close(slot)
        for opening in command.opens:
            self._open(opening)
        for slot, page in zip(ints.unpack(command.page_slots), ints.unpack(command.page_ids), strict=True):
            self._append_page(slot, page)
        self._copy(ints.unpack(command.page_copies))
        for opening in command.opens:
            self._read_context(opening.slot)
        return self._forward(command)

    def _forward(self, command: StepCommand) -> StepResult:
        decode = ints.unpack(command.decode_slots)
        rows = len(decode) + sum(len(row.token_ids) // 4 for row in command.prefills)
        seen = [*decode, *(row.slot for row in command.prefills)]
        self._check(len(set(seen)) == len(seen), f"a slot has two rows: {seen}")
        self._check(rows <= self.hello.max_batched_tokens, f"{rows} tokens in one step")
        if self.verify:
            self._check_groups(command, {*decode, *(row.slot for row in command.prefills if row.drafts)})
        tokens: list[int] = []
        scores: list[RowScores] = []
        prompt_scores: list[RowScores] = []
        errors: list[RowError] = []
        for slot in decode:
            self._decode(slot, tokens, scores, errors)
        for index, row in enumerate(command.prefills):
            self._prefill(index, row, tokens, scores, prompt_scores, errors)
        return StepResult(
            step_id=command.step_id,
            epoch=command.epoch,
            incarnation=self.hello.incarnation,
            token_ids=ints.pack(tokens),
            scores=tuple(scores),
            prompt_scores=tuple(prompt_scores),
            errors=tuple(errors),
            forward_ms=self.ms_per_step + rows * self.ms_per_token,
        )

    def _check_groups(self, command: StepCommand, decode: set[int]) -> None:
        """Rows of a group have the same full pages in front; slots that have no row in this step do not count."""
        slots, sizes = ints.unpack(command.group_slots).tolist(), ints.unpack(command.group_sizes).tolist()
        counts = ints.unpack(command.group_pages).tolist()
        self._check(len(sizes) == len(counts) and sum(sizes) == len(slots), "columns of groups that do not fit")
        around: dict[int, tuple[int, int]] = {}  # by slot: the innermost group so far and its pages
        for group, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            named, slots = slots[:size], slots[size:]
            outer = {around.get(slot, (-1, 0)) for slot in named}
            self._check(len(set(named)) == size and len(outer) <= 1, f"slots {named} are in groups that are not nested")
            start = max((pages for _, pages in outer), default=0)
            self._check(count > start, f"the group of slots {named} has no pages of its own")
            around |= dict.fromkeys(named, (group, count))
            members = [slot for slot in named if slot in decode]
            seats = [self._seat(slot) for slot in members]
            self._check(
                len({tuple(seat.pages[:count]) for seat in seats}) <= 1, f"slots {members} share no {count} pages"
            )
            full = all(seat.length >= count * self.hello.page_size for seat in seats)
            self._check(full, f"a shared page of slots {members} is not full")
            self.shared_reads += max(len(members) - 1, 0) * (count - start)

    def _take_masks(self, command: StepCommand, masks: tuple[bytes, bytes] | None) -> None:
        """Exactly one TokenMasks for a step with masked slots, each of which samples; none for any other."""
        self._masks = {}
        self._check(bool(command.masked_slots) == (masks is not None), "masks that no step is owed, or none")
        if masks is None:
            return
        sampling = dict.fromkeys(ints.unpack(command.decode_slots), 1)
        sampling |= {row.slot: 1 + row.drafts for row in command.prefills if row.sample}
        masked = ints.unpack(command.masked_slots).tolist()
        width = -(-self.hello.vocab_size // 32) * 4
        fits = all(masked.count(slot) == sampling.get(slot, 0) for slot in masked)
        self._check(fits, "a slot has not one mask for each of its samples")
        self._check(masks[0] == command.masked_slots, "masks of other slots")
        self._check(len(masks[1]) == width * len(masked), "masks of another width")
        for i, slot in enumerate(masked):
            self._masks.setdefault(slot, []).append(masks[1][i * width : (i + 1) * width])

    # Slots and pages

    def _close(self, slot: int) -> None:
        self._check(slot in self._slots, f"close of slot {slot}, which is not open")
        for page in self._slots.pop(slot).pages:
            self._users[page] -= 1

    def _open(self, opening: SlotOpen) -> None:
        self._check(opening.slot not in self._slots, f"slot {opening.slot} is open already")
        self._check(0 <= opening.slot < self.hello.max_slots, f"there is no slot {opening.slot}")
        pages = ints.unpack(opening.pages).tolist()
        self._check(len(set(pages)) == len(pages), "a page twice in one table")
        self._check(opening.num_computed <= len(pages) * self.hello.page_size, "computed tokens without pages")
        self._slots[opening.slot] = _Slot(
            opening.sampling, opening.prompt_length, [], opening.num_computed, 0, opening.remaining
        )
        for page in pages:
            self._append_page(opening.slot, page)

    def _append_page(self, slot: int, page: int) -> None:
        self._check(slot in self._slots, f"a page for slot {slot}, which is not open")
        self._check(0 <= page < self.hello.num_pages, f"there is no page {page}")
        self._check(page not in self._slots[slot].pages, f"page {page} twice in slot {slot}")
        self._slots[slot].pages.append(page)
        self._users[page] = self._users.get(page, 0) + 1

    def _copy(self, pairs: array[int]) -> None:
        sources, targets = pairs[::2].tolist(), pairs[1::2].tolist()
        self._check(not set(sources) & set(targets), "a page is source and target")
        self._check(len(set(targets)) == len(targets), "a page is the target of two copies")
        self._check(all(self._users.get(page) == 1 for page in targets), "the target of a copy is shared or nobody's")
        self.copies += len(targets)
        contents = [(list(self._cells.get(page, ())), self._hidden.get(page, (0, 0))) for page in sources]
        for target, (cells, hidden) in zip(targets, contents, strict=True):
            self._cells[target], self._hidden[target] = cells, hidden

    def _read_context(self, slot: int) -> None:
        """What the open slot finds in its pages must be one sequence from its start."""
        seat = self._slots[slot]
        seat.state = EMPTY
        for position in range(seat.length):
            seat.state = self._check_cell(slot, seat, position, seat.state)

    def _check_cell(self, slot: int, seat: _Slot, position: int, before: int) -> int:
        page, offset = seat.pages[position // self.hello.page_size], position % self.hello.page_size
        cells = self._cells.get(page, [])
        self._check(offset < len(cells), f"slot {slot}: nothing at position {position}, page {page}")
        at, token, state = cells[offset]
        if self.verify:
            good = at == position and state == chain(before, token)
            self._check(good, f"slot {slot}: page {page} holds something else at position {position}")
        return state

    def _write(self, slot: int, seat: _Slot, token: int) -> None:
        index, offset = divmod(seat.length, self.hello.page_size)
        self._check(index < len(seat.pages), f"slot {slot} has no page for position {seat.length}")
        page = seat.pages[index]
        self._check(self._users[page] == 1, f"slot {slot} writes page {page}, which another slot uses")
        seat.state = chain(seat.state, token)
        cells = self._cells.setdefault(page, [])
        del cells[offset:]
        self._check(len(cells) == offset, f"slot {slot}: page {page} has a hole before position {seat.length}")
        cells.append((seat.length, token, seat.state))
        seat.length += 1

    def _verify_context(self, slot: int, seat: _Slot) -> None:
        if self.verify:
            state = EMPTY
            for position in range(seat.length):
                state = self._check_cell(slot, seat, position, state)
            self._check(state == seat.state, f"slot {slot}: its context has changed")

    # Rows

    def _decode(self, slot: int, tokens: list[int], scores: list[RowScores], errors: list[RowError]) -> None:
        seat = self._seat(slot)
        if seat.ended:
            tokens.append(-1)
            return
        self._check(seat.last >= 0, f"slot {slot} decodes before it has sampled")
        self._write(slot, seat, seat.last)
        self.decode_rows += 1
        self._sample(slot, seat, tokens, scores, errors)

    def _prefill(
        self,
        index: int,
        row: PrefillRow,
        tokens: list[int],
        scores: list[RowScores],
        prompt_scores: list[RowScores],
        errors: list[RowError],
    ) -> None:
        seat = self._seat(row.slot)
        if row.start >= 0 and self._disappoints(seat, row):
            tokens_before = len(tokens)
            if seat.ended:
                tokens.append(-1)
            else:
                self._decode(row.slot, tokens, scores, errors)
            tokens.extend([-1] * (1 + row.drafts - (len(tokens) - tokens_before)))
            return
        known = ints.unpack(row.token_ids).tolist()
        if not known:
            self._recall(row, seat)
        if row.drafts:
            self._check_drafts(seat, row)
            known, guesses = known[: -row.drafts], known[-row.drafts :]
        values: list[float] = []
        start = seat.length
        for token in known:
            if 0 <= row.score_from <= seat.length:
                self._check(seat.length > start or start == 0, "a score that needs logits before the chunk")
                values.append(logprob(seat.state, token) if seat.length else float("nan"))
            self._write(row.slot, seat, token)
        if row.next_token >= 0:
            values.append(logprob(seat.state, row.next_token))
        self.prefill_tokens += len(known)
        if row.keep_hidden:
            self._check(self.hello.keeps_hidden and not row.drafts and bool(known), "a hidden state that nobody keeps")
            self._hidden[self._last_page(seat)] = (seat.length, seat.state)
        if values:
            prompt_scores.append(RowScores(index, _scores(values, seat.sampling)))
        if row.drafts:
            self._sample_with(guesses, row.slot, seat, tokens, errors)
        elif row.sample:
            self._sample(row.slot, seat, tokens, scores, errors)

    def _disappoints(self, seat: _Slot, row: PrefillRow) -> bool:
        """Whether the slot has ended, stands elsewhere, or has sampled something else than was expected."""
        fits = row.sample and not row.keep_hidden and len(row.token_ids) == 4 * (1 + row.drafts)
        fits = fits and 0 <= row.drafts <= self.hello.max_drafts
        self._check(fits, "an expected sample in a row that cannot have one")
        self._check(seat.ended or seat.last >= 0, f"slot {row.slot} was expected to have sampled")
        disappoints = seat.ended or seat.length != row.start or seat.last != ints.unpack(row.token_ids)[0]
        self.expected += 1
        self.disappointed += disappoints
        return disappoints

    def _recall(self, row: PrefillRow, seat: _Slot) -> None:
        """A row without tokens samples from what was kept of just the tokens that the slot has."""
        plain = row.sample and not row.drafts and row.score_from < 0 and row.next_token < 0
        self._check(self.hello.keeps_hidden and plain and seat.length > 0, f"an empty chunk for slot {row.slot}")
        kept = self._hidden.get(self._last_page(seat))
        self._check(kept == (seat.length, seat.state), f"slot {row.slot}: {kept} is kept, not {seat.length}")
        self.recalls += 1

    def _last_page(self, seat: _Slot) -> int:
        return seat.pages[(seat.length - 1) // self.hello.page_size]

    def _check_drafts(self, seat: _Slot, row: PrefillRow) -> None:
        params = seat.sampling
        self._check(0 < row.drafts <= self.hello.max_drafts, f"{row.drafts} guesses in one row")
        self._check(row.sample and row.score_from < 0 and row.next_token < 0, "guesses in a row that is scored")
        self._check(params.logprobs < 0, "guesses for a row with scores")
        self._check(params.repetition_penalty == 1.0, "guesses for a row with penalties")

    def _sample_with(
        self, guesses: list[int], slot: int, seat: _Slot, tokens: list[int], errors: list[RowError]
    ) -> None:
        """All guesses get into the pages, and stay there even where they are wrong."""
        states, length = [seat.state], seat.length
        for guess in guesses:
            self._write(slot, seat, guess)
            states.append(seat.state)
        self.guesses += len(guesses)
        end = len(tokens) + len(guesses) + 1
        for kept, state in enumerate(states):
            seat.length, seat.state = length + kept, state
            if seat.ended or not seat.remaining:
                break
            self._sample(slot, seat, tokens, [], errors)
            if kept == len(guesses) or tokens[-1] != guesses[kept] or seat.ended:
                break
            self.right_guesses += 1
        tokens.extend([-1] * (end - len(tokens)))

    def _sample(
        self, slot: int, seat: _Slot, tokens: list[int], scores: list[RowScores], errors: list[RowError]
    ) -> None:
        self._verify_context(slot, seat)
        self._check(seat.remaining > 0, f"slot {slot} has no samples left")
        seat.remaining -= 1
        mask = self._masks[slot].pop(0) if slot in self._masks else None
        token = self.choose(seat.state, mask, seat.sampling)
        self._check(token >= 0, f"slot {slot}: no token is allowed")
        if token in self.fail_tokens:
            errors.append(RowError(slot, "logits are not finite"))
            seat.ended = True
            tokens.append(-1)
            return
        if seat.sampling.logprobs >= 0:
            scores.append(RowScores(len(tokens), _scores([logprob(seat.state, token)], seat.sampling)))
        tokens.append(token)
        seat.last = token
        output_index = seat.length - seat.prompt_length
        if token in seat.sampling.stop_token_ids and output_index >= seat.sampling.min_new_tokens:
            seat.ended = True

    def _seat(self, slot: int) -> _Slot:
        self._check(slot in self._slots, f"a row for slot {slot}, which is not open")
        return self._slots[slot]

    @staticmethod
    def _check(condition: bool, text: str) -> None:
        if not condition:
            raise ProtocolError(text)


def _scores(values: list[float], sampling: SamplingParams) -> Scores:
    count, top = len(values), max(sampling.logprobs, 0)
    wanted = ints.count(sampling.logprob_token_ids)
    return Scores(
        count=count,
        logprobs=array("f", values).tobytes(),
        top_ids=ints.pack(i for _ in range(count) for i in range(top)),
        top_logprobs=array("f", [v - i for v in values for i in range(top)]).tobytes(),
        wanted=array("f", [v for v in values for _ in range(wanted)]).tobytes(),
    )
