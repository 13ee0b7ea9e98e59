"""Steps of a script as prompts for the scheduler. Leaves ranges to sampling and running to chain.

Every step but the first goes before others of its priority and to the worker that holds its pages; what it will
continue stays pinned in the radix tree meanwhile.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from services.tokenizer import constraints, requests, sampling, validation
from services.tokenizer.context import Context
from services.tokenizer.errors import invalid
from services.tokenizer.render.logprobs import NativeLogprobs
from services.tokenizer.render.native import NativeItem
from services.tokenizer.requests import Prompt
from services.tokenizer.sampling import Names, ScoreWishes
from services.tokenizer.schema import NATIVE_NAMES, REFUSED_SAMPLING, NativeSampling
from services.tokenizer.scripts.body import GenStep, ScriptBody
from services.tokenizer.streams import Group
from shared.messages.request import SamplingParams

DEFAULT_MAX_TOKENS = 128
PIN_S = 10.0  # how long a path waits for the next step at most


class Generation(NamedTuple):
    """A checked generation. `wishes` are its scores'."""

    step: GenStep
    fields: NativeSampling
    scores: ScoreWishes
    names: Names
    unknown: list[str]


class Steps:
    """Makes requests of one script. Raises ApiError for wishes that cannot be met."""

    def __init__(self, context: Context, body: ScriptBody) -> None:
        validation.in_range("priority", body.priority, -(1 << 31), (1 << 31) - 2)
        self._context = context
        self._namespace = requests.namespace(body.extra_key, body.cache_salt)
        self._priority = body.priority or 0
        self._family = requests.new_rid()
        self._streaming = bool(body.stream) and body.deltas is not False
        self._with_ids = bool(body.return_prompt_token_ids)
        self._made = 0
        self.rid = validation.request_id(body.rid) if body.rid is not None else requests.new_rid()

    def check(self, index: int, step: GenStep) -> Generation:
        """Everything about a generation that does not need its prompt."""
        path = f"steps[{index}].gen."
        names = Names(f"{path}sampling_params.", NATIVE_NAMES)
        fields, unknown = validation.convert(
            step.sampling_params or {}, NativeSampling, REFUSED_SAMPLING, f"{path}sampling_params."
        )
        if fields.n not in (None, 1):
            raise invalid(f"{names('n')} must be 1: a script goes on from one answer.", names("n"), "invalid_value")
        most = self._context.config.max_logprobs
        validation.in_range(f"{path}logprob_start_len", step.logprob_start_len, -1, float("inf"))
        validation.in_range(f"{path}top_logprobs_num", step.top_logprobs_num, 0, most)
        start = step.logprob_start_len if step.logprob_start_len is not None else -1
        scores = ScoreWishes(step.top_logprobs_num or 0, start) if step.return_logprob else ScoreWishes()
        generation = Generation(step, fields, scores, names, unknown)
        self._params(generation)
        constraints.read(fields, names)
        return generation

    def generation(self, wanted: Generation, ids: array[int], *, last: bool) -> tuple[Group, NativeItem]:
        """The request of a generation after these ids."""
        fields, scores, names = wanted.fields, wanted.scores, wanted.names
        if scores.prompt_from > len(ids):
            name = "logprob_start_len"
            text = f"{name} = {scores.prompt_from} is beyond the prompt of {len(ids)} tokens."
            raise invalid(text, name, "out_of_range")
        prompt = Prompt(
            ids=ids,
            params=self._params(wanted),
            wished=fields.max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            rid=self._step_rid(),
            names=(self.rid,),
            seeded=fields.seed is not None,
            stop_strings=sampling.stop_strings(fields, names),
            stop_regex=sampling.stop_patterns(fields, names),
            no_stop_trim=bool(fields.no_stop_trim),
            skip_special_tokens=fields.skip_special_tokens is not False,
            spaces_between_special_tokens=fields.spaces_between_special_tokens is not False,
            constraint=constraints.read(fields, names),
            pin=f"script-{self._family}",
            pin_s=0.0 if last else PIN_S,
        )
        logprobs = None
        if scores.top >= 0:
            logprobs = NativeLogprobs(self._context.vocabulary, bool(wanted.step.return_text_in_logprobs), ())
        return self._group([prompt], names("max_tokens")), NativeItem(
            rid=self.rid,
            prompt_ids=ids,
            logprobs=logprobs,
            prompt_from=scores.prompt_from,
            return_prompt_ids=self._with_ids,
        )

    def scoring(self, lists: Sequence[array[int]], start: int) -> Group:
        """One request for each option of a select: its tokens from `start` on get log-probabilities, no more."""
        params = SamplingParams(max_tokens=0, temperature=0.0, logprobs=0, prompt_logprobs_from=start)
        rid = self._step_rid()
        prompts = [
            Prompt(ids=ids, params=params, wished=0, default_max_tokens=0, rid=f"{rid}.{index}", names=(self.rid,))
            for index, ids in enumerate(lists)
        ]
        return self._group(prompts, "max_tokens")

    def _step_rid(self) -> str:
        """No other request's, so that late words about one step never meet the next."""
        return f"{self.rid}.{self._family[:12]}.{self._made}"

    def _params(self, wanted: Generation) -> SamplingParams:
        most = self._context.config.max_logprobs
        return sampling.build(wanted.fields, wanted.names, self._context.model, {}, wanted.scores, most)

    def _group(self, prompts: Sequence[Prompt], max_param: str) -> Group:
        config, first = self._context.config, self._made == 0
        self._made += 1
        for prompt in prompts:
            prompt.namespace = self._namespace
            prompt.priority = self._priority if first else self._priority + 1
            prompt.stream = self._streaming
            requests.settle_length(prompt, self._context.limit, config.strict_length, "prompt_parts", max_param)
        group = requests.make_group(prompts, self._context.seeds)
        for stream in group.streams:
            stream.request = msgspec.structs.replace(stream.request, group_id=self._family)
        return group
