"""POST /v1/score: how likely given tokens are to follow a query and each of some items; words to render.score."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from services.tokenizer import body, requests, validation
from services.tokenizer.context import Context
from services.tokenizer.errors import invalid
from services.tokenizer.metrics import RequestTimer
from services.tokenizer.openapi import takes
from services.tokenizer.render.score import ScoreAnswerer
from services.tokenizer.render.usage import Counts
from services.tokenizer.requests import Prompt
from services.tokenizer.routes.completions import Text, encode_prompts
from shared import ints
from shared.messages.request import SamplingParams


class ScoreBody(msgspec.Struct, kw_only=True):
    """POST /v1/score. Query and items are all texts, or all token ids."""

    query: str | list[int]
    items: str | list[str | list[int]]
    label_token_ids: list[int]
    apply_softmax: bool | None = None
    item_first: bool | None = None
    model: str | None = None


def router(context: Context) -> APIRouter:
    routes = APIRouter(tags=["openai"])

    @routes.post("/v1/score", openapi_extra=takes(ScoreBody))
    async def score(request: Request) -> Response:
        """Probabilities of the label tokens after query and item, for each item."""
        wishes, unknown = await body.read(request, context, ScoreBody, {})
        return await _answer(context, wishes, unknown)

    return routes


async def _answer(context: Context, wishes: ScoreBody, unknown: list[str]) -> Response:
    context.check_model(wishes.model)
    texts = _texts(wishes)
    validation.in_range("items", len(texts), 1, context.config.max_batch_size)
    if not wishes.label_token_ids:
        raise invalid("label_token_ids is empty.", "label_token_ids", "invalid_value")
    most, vocab = context.config.max_logprobs, context.model.vocab_size
    labels = validation.token_ids("label_token_ids", wishes.label_token_ids, vocab, most)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=ints.pack(labels))
    timer = RequestTimer(context.measurements, len(texts), streaming=False)
    prompts = []
    for ids, (rid, names) in zip(
        await encode_prompts(context, texts, "items", True),
        requests.item_rids(None, len(texts), True, "score-"),
        strict=True,
    ):
        prompt = Prompt(ids=ids, params=params, wished=1, default_max_tokens=1, rid=rid, names=names)
        requests.settle_length(prompt, context.limit, context.config.strict_length, "items", "max_tokens")
        prompts.append(prompt)
    counts = Counts([len(prompt.ids) for prompt in prompts], 1)
    answerer = ScoreAnswerer(wishes.model or context.model.served_name, counts, bool(wishes.apply_softmax))
    group = requests.make_group(prompts, context.seeds)
    return context.exchange(group, answerer, timer, streaming=False, headers=context.ignored(unknown))


def _texts(wishes: ScoreBody) -> list[Text]:
    """Each item joined to the query, in the order wished for. Raises ApiError on a mixture of texts and ids."""
    items: list[Text] = [wishes.items] if isinstance(wishes.items, str) else list(wishes.items)
    return [_join(item, wishes.query) if wishes.item_first else _join(wishes.query, item) for item in items]


def _join(first: Text, second: Text) -> Text:
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    if isinstance(first, list) and isinstance(second, list):
        return first + second
    raise invalid("query and items must both be texts or both be token ids.", "items", "invalid_type")
