"""The openai package: whole, streamed, asynchronous, structured, with tools, responses. argv[1] is the server's URL."""

import asyncio
import json
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel

URL = sys.argv[1] + "/v1"
ASK: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: Any = {"model": "default", "temperature": 0}
WEATHER: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
client = openai.OpenAI(base_url=URL, api_key="none")


class Colour(BaseModel):
    name: Literal["red", "green", "blue"]
    warm: bool


def chat() -> None:
    whole = client.chat.completions.create(messages=ASK, max_tokens=24, **GREEDY).choices[0].message.content
    assert whole
    assert "Paris" in whole
    text = ""
    for chunk in client.chat.completions.create(messages=ASK, max_tokens=24, stream=True, **GREEDY):
        text += chunk.choices[0].delta.content or ""
    assert text == whole
    choices = client.chat.completions.create(messages=ASK, max_tokens=8, n=3, model="default", logprobs=True).choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert all(choice.logprobs and choice.logprobs.content for choice in choices)


def structured() -> None:
    parsed = client.chat.completions.parse(
        messages=[{"role": "user", "content": "A colour, as JSON."}], response_format=Colour, max_tokens=60, **GREEDY
    )
    assert isinstance(parsed.choices[0].message.parsed, Colour)
    try:
        client.chat.completions.create(
            messages=ASK,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "?"}}},
            **GREEDY,
        )
        raise AssertionError("a schema that is none was taken")
    except openai.BadRequestError as error:
        if not error.param:
            raise


def tools() -> None:
    function: Any = {"name": "get_weather", "description": "Weather of a city", "parameters": WEATHER}
    asked: Any = {
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "max_tokens": 100,
        **GREEDY,
    }
    [choice] = client.chat.completions.create(**asked).choices
    [call] = choice.message.tool_calls or []
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"}
    parts, names = "", []
    for chunk in client.chat.completions.create(stream=True, **asked):
        for piece in chunk.choices[0].delta.tool_calls or []:
            names += [piece.function.name] if piece.function and piece.function.name else []
            parts += (piece.function.arguments or "") if piece.function else ""
    assert names == ["get_weather"]
    assert json.loads(parts) == arguments


def responses() -> None:
    first = client.responses.create(
        model="default", input="What is the capital of France?", temperature=0, max_output_tokens=24
    )
    assert "Paris" in first.output_text
    again = client.responses.create(
        model="default", input="And of Italy?", previous_response_id=first.id, temperature=0, max_output_tokens=24
    )
    assert again.output_text
    text, kinds = "", []
    with client.responses.stream(
        model="default", input="What is the capital of France?", temperature=0, max_output_tokens=24
    ) as stream:
        for event in stream:
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == first.output_text
    assert kinds[0] == "response.created"


async def asynchronous() -> None:
    async with openai.AsyncOpenAI(base_url=URL, api_key="none") as many:
        asked: Any = {"prompt": "A list: 1,", "max_tokens": 8, **GREEDY}
        answers = await asyncio.gather(*(many.completions.create(**asked) for _ in range(8)))
        assert len({answer.choices[0].text for answer in answers}) == 1
        [model] = [model async for model in many.models.list()]
        assert model.id


chat()
asyncio.run(asynchronous())
structured()
tools()
responses()
