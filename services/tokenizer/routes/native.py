"""POST /generate, /tokenize and /detokenize; leaves words to render.native."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.tokenizer import body, calls, constraints, requests, sampling, sessions, sse, validation
from services.tokenizer.context import Context
from services.tokenizer.errors import invalid
from services.tokenizer.exchange import Answerer
from services.tokenizer.metrics import RequestTimer
from services.tokenizer.openapi import takes
from services.tokenizer.render.interval import IntervalAnswerer
from services.tokenizer.render.logprobs import NativeLogprobs
from services.tokenizer.render.native import NativeAnswerer, NativeItem
from services.tokenizer.requests import Prompt
from services.tokenizer.routes.completions import Text, encode_prompts, split_prompts
from services.tokenizer.routes.openai_fields import single
from services.tokenizer.sampling import Names, ScoreWishes
from services.tokenizer.schema import (
    NATIVE_NAMES,
    REFUSED_GENERATE,
    REFUSED_SAMPLING,
    DetokenizeBody,
    GenerateBody,
    NativeSampling,
    TokenizeBody,
)
from services.tokenizer.scripts import pins
from services.tokenizer.scripts.body import check_parts
from services.tokenizer.scripts.parts import encode_parts
from services.tokenizer.sessions import RecordingAnswerer

DEFAULT_MAX_TOKENS = 128
PROMPTS = ("text", "input_ids", "prompt_parts")
NAMES = Names("sampling_params.", NATIVE_NAMES)


def router(context: Context) -> APIRouter:
    routes = APIRouter(tags=["native"])

    @routes.post("/generate", openapi_extra=takes(GenerateBody))
    @routes.put("/generate", openapi_extra=takes(GenerateBody), include_in_schema=False)
    async def generate(request: Request) -> Response:
        """Continue one or several prompts, given as text or token ids."""
        wishes, unknown = await body.read(request, context, GenerateBody, REFUSED_GENERATE)
        return await _Generation(context, wishes, unknown).answer()

    @routes.post("/tokenize", openapi_extra=takes(TokenizeBody))
    @routes.post("/v1/tokenize", openapi_extra=takes(TokenizeBody), include_in_schema=False)
    async def tokenize(request: Request) -> Response:
        """Token ids of texts."""
        wishes, unknown = await body.read(request, context, TokenizeBody, {})
        return await _tokenize(context, wishes, unknown)

    @routes.post("/detokenize", openapi_extra=takes(DetokenizeBody))
    @routes.post("/v1/detokenize", openapi_extra=takes(DetokenizeBody), include_in_schema=False)
    async def detokenize(request: Request) -> Response:
        """Text of token ids."""
        wishes, unknown = await body.read(request, context, DetokenizeBody, {})
        return await _detokenize(context, wishes, unknown)

    return routes


class _Generation:
    """One /generate request on its way to a group of streams."""

    def __init__(self, context: Context, wishes: GenerateBody, unknown: list[str]) -> None:
        self._context = context
        self._wishes = wishes
        self._unknown = list(unknown)
        context.check_model(wishes.model)
        self._texts, self._listed = _prompts_of(wishes)
        self._count = len(self._texts)
        self._fields = self._sampling_fields()
        most = context.config.max_batch_size
        counts = {sampling.choices(fields, NAMES, self._count, most) for fields in self._fields}
        if len(counts) > 1:
            raise invalid("sampling_params.n must be the same for all items.", "sampling_params.n", "invalid_value")
        self._n = counts.pop()
        self._scores = self._score_wishes()
        if all(score.top < 0 for score in self._scores):
            self._unknown += _idle_score_fields(wishes, context.config.strict_fields)
        self._intervals = [
            validation.in_range(NAMES("stream_interval"), fields.stream_interval, 1, 1 << 20) or 1
            for fields in self._fields
        ]
        self._pin = pins.read(wishes.pin, wishes.pin_seconds)
        if wishes.pin and self._count * self._n > 1:
            raise invalid("A pin goes with one prompt and one answer.", "pin", "invalid_value")

    async def answer(self) -> Response:
        context, wishes = self._context, self._wishes
        timer = RequestTimer(context.measurements, self._count * self._n, streaming=bool(wishes.stream))
        param = next(name for name in PROMPTS if getattr(wishes, name) is not None)
        ids = await self._encode(param)
        recorder = None
        session = sessions.read(wishes.session_params, self._count * self._n, self._unknown)
        if session is not None:
            [(wishes.rid, _)] = requests.item_rids(single(wishes.rid, "rid"), 1, False)
            ids[0], recorder = context.sessions.enter(calls.current().tenant, session, wishes.rid, ids[0])
        prompts = self._prompts(ids, param)
        items = [self._item(prompt, index) for index, prompt in enumerate(prompts) for _ in range(self._n)]
        listed = self._listed or self._n > 1
        answerer: Answerer = NativeAnswerer(items, listed, context.config.stream_output, timer.started)
        if recorder is not None:
            answerer = RecordingAnswerer(answerer, recorder)
        if any(interval > 1 for interval in self._intervals):
            answerer = IntervalAnswerer(answerer, [i for i in self._intervals for _ in range(self._n)])
        group = requests.make_group(prompts, context.seeds)
        headers = context.ignored(self._unknown)
        return context.exchange(group, answerer, timer, streaming=bool(wishes.stream), headers=headers)

    async def _encode(self, param: str) -> list[array[int]]:
        context, wishes = self._context, self._wishes
        if wishes.prompt_parts is None:
            return await encode_prompts(context, self._texts, param, wishes.parse_special is not False)
        check_parts(wishes.prompt_parts, context.model.vocab_size, context.limit)
        templated = bool(wishes.templated)
        return [await encode_parts(context.text, wishes.prompt_parts, context.limit, templated=templated)]

    def _sampling_fields(self) -> list[NativeSampling]:
        given = validation.per_item("sampling_params", self._wishes.sampling_params, self._count, {})
        converted: list[NativeSampling] = []
        seen: dict[int, NativeSampling] = {}
        for params in given:
            if id(params) not in seen:
                native, unknown = validation.convert(params, NativeSampling, REFUSED_SAMPLING, "sampling_params.")
                self._unknown += unknown
                seen[id(params)] = native
            converted.append(seen[id(params)])
        return converted

    def _score_wishes(self) -> list[ScoreWishes]:
        wishes, count = self._wishes, self._count
        wanted = validation.per_item("return_logprob", wishes.return_logprob, count, False)
        starts = validation.per_item("logprob_start_len", wishes.logprob_start_len, count, -1)
        tops = validation.per_item("top_logprobs_num", wishes.top_logprobs_num, count, 0)
        ids = self._wanted_ids()
        scores = []
        for scored, start, top, item_ids in zip(wanted, starts, tops, ids, strict=True):
            validation.in_range("logprob_start_len", start, -1, float("inf"))
            validation.in_range("top_logprobs_num", top, 0, self._context.config.max_logprobs)
            scores.append(ScoreWishes(top, start, tuple(item_ids)) if scored else ScoreWishes())
        return scores

    def _wanted_ids(self) -> list[list[int]]:
        """`token_ids_logprob`: one list for all items, or a list of lists (null where an item wants none)."""
        value = self._wishes.token_ids_logprob
        plain = [item for item in value or () if isinstance(item, int)]
        if not value or len(plain) == len(value):
            return [plain] * self._count
        if plain:
            raise invalid("token_ids_logprob mixes ids and lists.", "token_ids_logprob", "invalid_type")
        lists = [item if isinstance(item, list) else [] for item in value]
        return validation.per_item("token_ids_logprob", lists, self._count, [])

    def _prompts(self, ids: Sequence[array[int]], param: str) -> list[Prompt]:
        wishes, context = self._wishes, self._context
        rids = requests.item_rids(wishes.rid, self._count, self._listed)
        keys = validation.per_item("extra_key", wishes.extra_key, self._count, "")
        salts = validation.per_item("cache_salt", wishes.cache_salt, self._count, "")
        validation.in_range("priority", wishes.priority, -(1 << 31), (1 << 31) - 1)
        prompts = []
        for index, fields in enumerate(self._fields):
            scores = self._scores[index]
            if scores.prompt_from > len(ids[index]):
                raise invalid(
                    f"logprob_start_len = {scores.prompt_from} is beyond the prompt of {len(ids[index])} tokens.",
                    "logprob_start_len",
                    "out_of_range",
                )
            prompt = Prompt(
                ids=ids[index],
                params=sampling.build(fields, NAMES, context.model, {}, scores, context.config.max_logprobs),
                wished=fields.max_tokens,
                default_max_tokens=DEFAULT_MAX_TOKENS,
                rid=rids[index][0],
                names=rids[index][1],
                n=self._n,
                seeded=fields.seed is not None,
                stop_strings=sampling.stop_strings(fields, NAMES),
                stop_regex=sampling.stop_patterns(fields, NAMES),
                namespace=requests.namespace(keys[index], salts[index]),
                no_stop_trim=bool(fields.no_stop_trim),
                skip_special_tokens=fields.skip_special_tokens is not False,
                spaces_between_special_tokens=fields.spaces_between_special_tokens is not False,
                stream=bool(wishes.stream),
                constraint=constraints.read(fields, NAMES),
                priority=wishes.priority or 0,
                pin=self._pin[0],
                pin_s=self._pin[1],
            )
            requests.settle_length(prompt, context.limit, context.config.strict_length, param, NAMES("max_tokens"))
            prompts.append(prompt)
        return prompts

    def _item(self, prompt: Prompt, index: int) -> NativeItem:
        scores = self._scores[index]
        logprobs = None
        if scores.top >= 0:
            with_text = bool(self._wishes.return_text_in_logprobs)
            logprobs = NativeLogprobs(self._context.vocabulary, with_text, scores.wanted_ids)
        return NativeItem(
            rid=prompt.rid,
            prompt_ids=prompt.ids,
            logprobs=logprobs,
            prompt_from=scores.prompt_from,
            return_prompt_ids=bool(self._wishes.return_prompt_token_ids),
        )


def _idle_score_fields(wishes: GenerateBody, strict: bool) -> list[str]:
    """Fields that say which log-probabilities, where none are wanted: clients send them so; they are listed as ignored.

    Raises ApiError in strict mode.
    """
    names = ("top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs")
    idle = [name for name in names if getattr(wishes, name) not in (None, False, 0, [])]
    if idle and strict:
        raise invalid(f"{idle[0]} needs return_logprob = true.", idle[0], "invalid_value")
    return idle


def _prompts_of(wishes: GenerateBody) -> tuple[list[Text], bool]:
    """The prompts of the request, and whether they came as a batch."""
    given = [name for name in PROMPTS if getattr(wishes, name) is not None]
    if not given:
        raise invalid("Give text, input_ids or prompt_parts.", "text", "missing_required_parameter")
    if len(given) > 1:
        raise invalid(f"{' and '.join(given)} cannot be used together.", given[1], "invalid_value")
    if wishes.templated and wishes.prompt_parts is None:
        raise invalid("templated goes with prompt_parts.", "templated", "invalid_value")
    if wishes.prompt_parts is not None:
        if wishes.parse_special is False:
            text = "parse_special cannot be used with prompt_parts: literal says it for each of them."
            raise invalid(text, "parse_special", "invalid_value")
        return [""], False
    if wishes.text is not None:
        return split_prompts(wishes.text, "text"), isinstance(wishes.text, list)
    assert wishes.input_ids is not None
    if not wishes.input_ids:
        raise invalid("input_ids cannot be empty.", "input_ids", "empty_prompt")
    return split_prompts(wishes.input_ids, "input_ids"), isinstance(wishes.input_ids[0], list)


async def _tokenize(context: Context, wishes: TokenizeBody, unknown: list[str]) -> Response:
    context.check_model(wishes.model)
    texts = [wishes.prompt] if isinstance(wishes.prompt, str) else wishes.prompt
    validation.in_range("prompt", len(texts), 0, context.config.max_batch_size)
    tokens = [
        await context.text.encode(
            text,
            context.config.max_body_bytes,
            "prompt",
            parse_special=wishes.parse_special is not False,
            add_special_tokens=wishes.add_special_tokens is not False,
        )
        for text in texts
    ]
    lists: list[list[int]] = [ids.tolist() for ids in tokens]
    counts = [len(ids) for ids in lists]
    single = isinstance(wishes.prompt, str)
    return _json(
        {
            "tokens": lists[0] if single else lists,
            "count": counts[0] if single else counts,
            "max_model_len": context.limit,
        },
        context.ignored(unknown),
    )


async def _detokenize(context: Context, wishes: DetokenizeBody, unknown: list[str]) -> Response:
    context.check_model(wishes.model)
    batched = bool(wishes.tokens) and isinstance(wishes.tokens[0], list)
    lists = split_prompts(wishes.tokens, "tokens") if wishes.tokens else [[]]
    skip = wishes.skip_special_tokens is not False
    texts = []
    for ids in lists:
        assert not isinstance(ids, str)
        checked = validation.token_ids("tokens", ids, context.model.vocab_size)
        texts.append(await context.text.decode(checked, skip))
    return _json({"text": texts if batched else texts[0]}, context.ignored(unknown))


def _json(value: Any, headers: dict[str, str]) -> Response:
    return Response(sse.json_bytes(value), headers=headers, media_type="application/json")
