"""POST /v1/completions; leaves words to render.completions."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.tokenizer import body, calls, requests, sampling, sessions, validation
from services.tokenizer.context import Context
from services.tokenizer.errors import invalid, too_long
from services.tokenizer.exchange import Answerer
from services.tokenizer.metrics import RequestTimer
from services.tokenizer.openapi import takes
from services.tokenizer.render.best_of import BestOfAnswerer
from services.tokenizer.render.completions import CompletionAnswerer, EchoedPrompt
from services.tokenizer.render.usage import Counts
from services.tokenizer.requests import Prompt
from services.tokenizer.routes.openai_fields import model_defaults, prompt_options, single, stream_options
from services.tokenizer.sampling import Names, ScoreWishes
from services.tokenizer.schema import REFUSED_OPENAI, CompletionBody
from services.tokenizer.sessions import RecordingAnswerer
from shared.messages.request import SamplingParams

DEFAULT_MAX_TOKENS = 16
Text = str | list[int]


def router(context: Context) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", openapi_extra=takes(CompletionBody), tags=["openai"])
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        wishes, unknown = await body.read(request, context, CompletionBody, REFUSED_OPENAI)
        return await _answer(context, wishes, unknown)

    return routes


async def _answer(context: Context, wishes: CompletionBody, unknown: list[str]) -> Response:
    context.check_model(wishes.model)
    texts = split_prompts(wishes.prompt, "prompt")
    n = sampling.choices(wishes, Names(), len(texts), context.config.max_batch_size)
    candidates = _candidates(wishes, n, len(texts), context.config.max_batch_size)
    timer = RequestTimer(context.measurements, candidates * len(texts), streaming=bool(wishes.stream))
    if wishes.suffix:
        raise invalid("suffix is not supported by this model.", "suffix", "unsupported_parameter")
    options = stream_options(wishes)
    params = _params(context, wishes)
    ids = await encode_prompts(context, texts, "prompt", wishes.parse_special is not False)
    recorder = None
    session = sessions.read(wishes.session_params, candidates * len(texts), unknown)
    if session is not None:
        [(wishes.rid, _)] = requests.item_rids(single(wishes.rid, "rid"), 1, False)
        ids[0], recorder = context.sessions.enter(calls.current().tenant, session, wishes.rid, ids[0])
    prompts = _prompts(context, wishes, params, ids, candidates)
    answerer = CompletionAnswerer(
        response_id=prompts[0].names[-1],
        model=wishes.model or context.model.served_name,
        counts=Counts([len(prompt.ids) for prompt in prompts], candidates),
        vocabulary=context.vocabulary,
        n=n,
        echoed=await _echoed(context, texts, prompts) if wishes.echo else None,
        with_logprobs=wishes.logprobs is not None,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
    )
    group = requests.make_group(prompts, context.seeds)
    headers = context.ignored(unknown)
    speaker: Answerer = answerer
    if candidates > n:
        speaker = BestOfAnswerer(answerer, candidates, n)
    elif recorder is not None:
        speaker = RecordingAnswerer(answerer, recorder)
    return context.exchange(group, speaker, timer, streaming=bool(wishes.stream), headers=headers)


def _candidates(wishes: CompletionBody, n: int, num_prompts: int, max_batch: int) -> int:
    """How many answers are generated for each prompt; `n` of them are shown."""
    best_of = validation.in_range("best_of", wishes.best_of, n, max_batch // num_prompts)
    if best_of is not None and best_of > n and wishes.stream:
        raise invalid("best_of larger than n cannot be streamed.", "best_of", "invalid_value")
    return best_of or n


def _params(context: Context, wishes: CompletionBody) -> SamplingParams:
    most = context.config.max_logprobs
    top = validation.in_range("logprobs", wishes.logprobs, 0, most)
    prompt_from = 0 if top is not None and wishes.echo else -1
    if top is None:
        top = 0 if (wishes.best_of or 0) > (wishes.n or 1) else -1  # candidates are ranked by their scores
    scores = ScoreWishes(top=top, prompt_from=prompt_from)
    return sampling.build(wishes, Names(), context.model, model_defaults(context), scores, most)


def _prompts(
    context: Context, wishes: CompletionBody, params: SamplingParams, ids: Sequence[array[int]], n: int
) -> list[Prompt]:
    rids = requests.item_rids(wishes.rid, len(ids), isinstance(wishes.rid, list) or len(ids) > 1, "cmpl-")
    shared = f"cmpl-{requests.new_rid()}"
    options = prompt_options(wishes)
    prompts = []
    for prompt_ids, (rid, names) in zip(ids, rids, strict=True):
        prompt = Prompt(
            ids=prompt_ids,
            params=params,
            wished=wishes.max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            rid=rid,
            names=names or (shared,),
            n=n,
            **options,
        )
        requests.settle_length(prompt, context.limit, context.config.strict_length, "prompt", "max_tokens")
        prompts.append(prompt)
    return prompts


async def _echoed(context: Context, texts: Sequence[Text], prompts: Sequence[Prompt]) -> list[EchoedPrompt]:
    shown = []
    for text, prompt in zip(texts, prompts, strict=True):
        words = text if isinstance(text, str) else await context.text.decode(prompt.ids, skip_special_tokens=False)
        shown.append(EchoedPrompt(words, prompt.ids))
    return shown


def split_prompts(prompt: str | Sequence[str | int | list[int]], param: str) -> list[Text]:
    """A prompt field as a list of prompts: a text, texts, ids, or lists of ids. Raises ApiError on a mixture."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid(f"{param} is empty.", param, "empty_prompt")
    if all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    texts = [item for item in prompt if isinstance(item, str)]
    if len(texts) == len(prompt):
        return list(texts)
    lists = [item for item in prompt if isinstance(item, list)]
    if len(lists) != len(prompt):
        raise invalid(f"{param} mixes texts, ids and lists.", param, "invalid_type")
    return list(lists)


async def encode_prompts(context: Context, texts: Sequence[Text], param: str, parse_special: bool) -> list[array[int]]:
    """Ids of every prompt; given ids are checked against the vocabulary, empty prompts are refused."""
    limit = context.limit

    async def one(text: Text) -> array[int]:
        if not text:
            raise invalid(f"{param} is empty.", param, "empty_prompt")
        if isinstance(text, str):
            return await context.text.encode(text, limit, param, parse_special=parse_special)
        if len(text) > limit:
            raise too_long(len(text), limit, param)  # before looking at each of them
        return array("i", validation.token_ids(param, text, context.model.vocab_size))

    return list(await asyncio.gather(*map(one, texts)))
