"""The anthropic package: text, streams, tools, counting. argv[1] is the server's URL."""

import sys
from typing import Any

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none")
GREEDY = {"temperature": 0}  # not an argument of every version of the package
ASK: Any = [{"role": "user", "content": "What is the capital of France?"}]
COMMON: Any = {"model": "default", "max_tokens": 24, "extra_body": GREEDY, "messages": ASK}
whole = client.messages.create(**COMMON)
assert "Paris" in whole.content[0].text
assert whole.stop_reason in ("end_turn", "max_tokens")
with client.messages.stream(**COMMON) as stream:
    assert "".join(stream.text_stream) == whole.content[0].text
    assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
counted = client.messages.count_tokens(model="default", messages=ASK)
used = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
assert counted.input_tokens == used
schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
tool: Any = {"name": "visit", "description": "Visit a city", "input_schema": schema}
called = client.messages.create(
    model="default",
    max_tokens=80,
    extra_body=GREEDY,
    messages=ASK,
    tools=[tool],
    tool_choice={"type": "tool", "name": "visit"},
)
[use] = [block for block in called.content if block.type == "tool_use"]
assert use.input["city"] in ("Paris", "Rome")
assert called.stop_reason == "tool_use"
