"""Reports 11 to 13, 17, 20, 23, 24, 26 to 28: what clients send that is wrong, odd or large. See docs/reports.md."""

from __future__ import annotations

import asyncio
import json
import random
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from tests.tokenizer.test_reports_streams import CHAT, NATIVE, PATHS, TEXT, body_for
from tests.whole_house import WholeHouse, open_house

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]
ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role, please') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def house() -> AsyncIterator[WholeHouse]:
    with tempfile.TemporaryDirectory(prefix="rf") as folder:
        template = Path(folder, "strict.jinja")
        template.write_text(TEMPLATE)
        async with open_house(Path(folder), constraints=True, door={"max_body_bytes": 6 << 20}) as house:
            yield house


async def refused(house: WholeHouse, path: str, body: Any, param: str | None, status: int = 400) -> dict[str, Any]:
    """The error of a request that must be refused with every part of the envelope, streaming or not."""
    error: dict[str, Any] = {}
    for stream in (False, True):
        whole = {**body, "stream": stream} if isinstance(body, dict) else body
        answer = await house.post(path, whole)
        assert answer.status_code == status, (path, str(body)[:200], answer.text)
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["code"]
        assert "Traceback" not in answer.text
        if param is not None:
            assert error["param"] is not None, (body, error)
            named = error["param"].removeprefix("sampling_params.").removeprefix("sampling_")
            assert named.startswith(param), (str(body)[:200], error)
    return error


async def test_11_errors_are_readable_in_the_sdk(house: WholeHouse) -> None:
    good: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    cases: list[tuple[dict[str, Any], type[openai.APIStatusError], str]] = [
        ({"model": "other"}, openai.NotFoundError, "model_not_found"),
        ({"max_tokens": "many"}, openai.BadRequestError, "invalid_type"),
        ({"messages": []}, openai.BadRequestError, "empty_prompt"),
        (
            {"messages": [{"role": "user", "content": "word " * 9000}]},
            openai.BadRequestError,
            "context_length_exceeded",
        ),
        ({"extra_body": {"regex": "("}}, openai.BadRequestError, "bad_constraint"),
    ]
    async with house.trial(), openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        for change, kind, code in cases:
            for stream in (False, True):
                with pytest.raises(kind) as caught:
                    await client.chat.completions.create(**{**good, **change}, stream=stream)
                assert caught.value.code == code
                assert caught.value.body is not None
                assert len(caught.value.message) > 10
        assert (await house.client.get("/v1/nowhere")).json()["error"]["code"] == "not_found"
        broken = await house.client.post(CHAT, content=b"{broken", headers={"content-type": "application/json"})
        assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
        large = await house.client.post(
            CHAT, content=b"[" + b"1," * (4 << 20), headers={"content-type": "application/json"}
        )
        assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")


BAD_CONSTRAINTS: list[tuple[str, Any]] = [
    *(("regex", pattern) for pattern in ("foo**", "(", "[a", "(?=x)", "a{9,2}", "\\", "")),
    ("json_schema", ""),
    ("json_schema", "[]"),
    ("json_schema", "5"),
    ("json_schema", {"type": "stuff"}),
    ("json_schema", {"$ref": "#/nope"}),
    ("json_schema", {"type": "string", "pattern": "["}),
    ("json_schema", {"type": "string", "pattern": "(?<=x)*"}),
    ("json_schema", {"enum": []}),
    ("json_schema", {"type": "integer", "minimum": "x"}),
    ("json_schema", False),
    ("ebnf", "root ::="),
    ("choice", []),
]


async def test_12_constraints_that_are_none(house: WholeHouse) -> None:
    async with house.trial():
        await asyncio.gather(
            *(
                refused(house, path, body_for(path, "x", max_tokens=40, **{kind: source}), kind)
                for kind, source in BAD_CONSTRAINTS
                for path in (NATIVE, TEXT)
            )
        )
        both = body_for(NATIVE, "x", regex="a", choice=["b"])
        await refused(house, NATIVE, both, "choice")


async def test_13_white_space_between_json_tokens_is_bounded(house: WholeHouse) -> None:
    """The tokens are drawn at random from what the mask allows: a model with the worst manners."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 20}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }

    async def one(seed: int, free: bool) -> None:
        fields = {"json_schema": schema, "max_tokens": 120, "seed": seed, "any_whitespace": free}
        answer = (await house.post(NATIVE, body_for(NATIVE, "a poem", temperature=1.5, **fields))).json()
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        assert set(json.loads(answer["text"])) == {"a", "b"}
        outside = re.sub(r'"(?:[^"\\]|\\.)*"', '""', answer["text"])
        longest = max(map(len, re.findall(r"\s+", outside)), default=0)
        assert longest <= (21 if free else 1), answer["text"]
        assert answer["text"].endswith("}")

    async with house.trial():
        await asyncio.gather(*(one(seed, free) for seed in range(10) for free in (False, True)))


async def test_17_lengths(house: WholeHouse) -> None:
    limit = house.door.context.limit
    async with house.trial():
        fits = (await house.complete([5] * (limit - 1), 1))["usage"]
        assert (fits["prompt_tokens"], fits["completion_tokens"]) == (limit - 1, 1)
        for size in (limit, limit + 1, 10 * limit):
            for path, field in ((TEXT, "prompt"), (NATIVE, "input_ids")):
                error = await refused(house, path, {field: [5] * size}, field)
                assert error["code"] == "context_length_exceeded"
                assert str(size) in error["message"]
                assert str(limit) in error["message"]
        for wished in (limit, 10**9):
            clipped = await house.complete([6] * (limit - 3), wished)
            assert clipped["usage"]["completion_tokens"] == 3
        chat = body_for(CHAT, "a" * (limit - 60), temperature=0, ignore_eos=True)  # without max_tokens: what is left
        answer = (await house.post(CHAT, chat)).json()
        assert answer["usage"]["total_tokens"] == limit
        words = "morning " * 600_000  # within the bounds of a body, hopeless as a prompt
        error = await refused(house, TEXT, {"prompt": words}, "prompt")
        assert error["code"] == "context_length_exceeded"
        for path in (CHAT, "/v1/responses"):  # however much their template makes of it
            field = "messages" if path == CHAT else "input"
            body = {"messages": [{"role": "user", "content": words}]} if path == CHAT else {"input": words}
            error = await refused(house, path, body, field)
            assert error["code"] == "context_length_exceeded"
            assert str(limit) in error["message"]


A_PICKLE = b"\x80\x04\x95\x0e\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x03rid\x94\x8c\x01x\x94s."  # of {"rid": "x"}


async def test_20_sockets_take_nothing_but_their_own_messages(house: WholeHouse) -> None:
    """Random bytes, a pickle, a cut message and a gigantic length, at every endpoint."""
    unsafe = re.compile(
        r"^\s*(import|from) (pickle|cloudpickle|dill|marshal)\b|recv_pyobj|send_pyobj|torch\.load\(|allow_pickle=True"
        r"|trust_remote_code=True|[^.\w](eval|exec)\(",
        re.MULTILINE,
    )
    for folder in ("services", "shared", "radixfleet"):
        for file in (ROOT / folder).rglob("*.py"):
            assert not unsafe.search(file.read_text(encoding="utf-8")), file
    dice = random.Random(20)
    garbage = [dice.randbytes(size) for size in (0, 1, 10, 1000)]
    garbage += [A_PICKLE, b"\x93\x01", b"\xdd\xff\xff\xff\xff", b"\xc6\x40\x00\x00\x00"]
    context = zmq.asyncio.Context()
    async with house.trial():
        for name in ("t", "d", "w", "o"):
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, b"stranger/1")
            socket.setsockopt(zmq.LINGER, 100)
            socket.connect(f"ipc://{house.folder}/{name}")
            for data in garbage:
                await socket.send_multipart([data, data])
                await socket.send(data)
            await house.check_next()
            socket.close()
    context.destroy(linger=0)


async def test_23_forms_of_content(house: WholeHouse) -> None:
    def text(word: str) -> dict[str, str]:
        return {"type": "text", "text": word}

    async def counted(message: dict[str, Any]) -> int:
        body = {"messages": [message, {"role": "user", "content": "x"}], "max_tokens": 1}
        answer = await house.post(CHAT, body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens"])

    async with house.trial():
        for role in ("system", "user", "assistant", "tool"):
            forms: list[Any] = ["one two", [text("one two")], [text("one"), text(" t"), text("wo")]]
            assert len({await counted({"role": role, "content": form}) for form in forms}) == 1
            await counted({"role": role, "content": []})
            for part in ({"type": "image_url", "image_url": {"url": "http://x/y.png"}}, {"type": "video"}, {}, 5):
                await refused(house, CHAT, {"messages": [{"role": role, "content": [part]}]}, "messages[0].content")
        empty = [{"content": None}, {"content": ""}, {}, {"content": []}]
        assert len({await counted({"role": "assistant", **form}) for form in empty}) == 1


async def test_24_templates_that_raise(house: WholeHouse) -> None:
    system, user, assistant = ({"role": role, "content": "x"} for role in ("system", "user", "assistant"))
    async with AsyncExitStack() as stack, house.trial():
        door = await house.add_door(stack, chat_template=str(house.folder / "strict.jinja"))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=door.url, timeout=20))

        async def ask(*conversation: dict[str, Any]) -> tuple[int, str]:
            answer = await client.post(CHAT, json={"messages": conversation, "max_tokens": 1})
            assert "Traceback" not in answer.text
            return answer.status_code, answer.json().get("error", {}).get("message", "")

        assert await ask(system, user) == (400, "No system role, please")
        assert await ask(user, user) == (400, "Roles must alternate")
        assert await ask(assistant) == (400, "Roles must alternate")
        assert (await ask({"role": "wizard", "content": "x"}))[0] == 400
        assert (await ask())[0] == 400
        assert (await ask({**user, "name": "ann", "mood": "good"}))[0] == 200
        assert (await ask(user, assistant, user))[0] == 200


async def test_26_ids_and_numbers_out_of_range(house: WholeHouse) -> None:
    vocab = house.door.context.model.vocab_size
    common: list[tuple[dict[str, Any], str]] = [
        ({"logit_bias": {str(vocab): 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [1 << 40]}, "stop_token_ids"),
        ({"top_k": 10**7}, "top_k"),
        ({"top_k": -5}, "top_k"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 1 << 70}, "seed"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"stop": ["x" * 5000]}, "stop"),
    ]
    bad_ids: list[Any] = [[-1], [vocab], [1 << 63], [1.5], [True], [None], [[5], "x"]]
    async with house.trial():
        for path in PATHS:
            for fields, param in common:
                await refused(house, path, body_for(path, "x", **fields), param)
        for ids in bad_ids:
            await refused(house, NATIVE, {"input_ids": ids}, "input_ids")
            await refused(house, TEXT, {"prompt": ids}, "prompt")
        for ids in ([vocab], [-1]):
            await refused(
                house, NATIVE, {"text": "x", "return_logprob": True, "token_ids_logprob": ids}, "token_ids_logprob"
            )
        await refused(house, CHAT, {**body_for(CHAT, "x"), "logprobs": True, "top_logprobs": 10**6}, "top_logprobs")
        await refused(house, TEXT, {"prompt": "x", "logprobs": -1}, "logprobs")


async def test_27_nothing_as_a_prompt(house: WholeHouse) -> None:
    async with house.trial():
        for prompt in ("", [""], [], [[]], ["x", ""], [[5], []]):
            error = await refused(house, TEXT, {"prompt": prompt}, "prompt")
            assert error["code"] == "empty_prompt"
        for body in ({"text": ""}, {"text": [""]}, {"text": []}, {"input_ids": []}, {"input_ids": [[]]}):
            error = await refused(house, NATIVE, body, next(iter(body)))
            assert error["code"] == "empty_prompt"
        await refused(house, CHAT, {"messages": []}, "messages")
        for prompt in (" ", "\u200b"):
            assert (await house.complete(prompt, 2))["usage"]["completion_tokens"] == 2
        empty = await house.post(CHAT, body_for(CHAT, "", max_tokens=2, ignore_eos=True))
        assert empty.json()["usage"]["completion_tokens"] == 2


async def test_28_large_prompts_beside_a_stream(house: WholeHouse) -> None:
    """Five at once, each refused for its length: after tokenising where it might fit, before where it cannot."""
    async with house.trial():
        large = ["quick brown fox " * (size << 16) for size in (1, 2, 3, 4, 5)]
        answers = await asyncio.gather(*(house.post(TEXT, {"prompt": prompt}) for prompt in large))
        assert [answer.status_code for answer in answers] == [400] * 5
        assert {answer.json()["error"]["code"] for answer in answers} == {"context_length_exceeded"}
        huge = await house.post(TEXT, {"prompt": "x" * (7 << 20)})
        assert huge.status_code == 413
        fitting = "a" * 2 + " quick brown fox" * 900
        assert (await house.complete(fitting, 2))["choices"][0]["text"] == house.model.text(fitting, 2)
