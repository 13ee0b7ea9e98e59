"""litellm, whole and streamed, and with a tool. argv[1] is the server's URL."""

import json
import sys
from typing import Any

import litellm

COMMON: Any = {
    "model": "openai/default",
    "api_base": sys.argv[1] + "/v1",
    "api_key": "none",
    "temperature": 0,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}
whole = litellm.completion(max_tokens=24, **COMMON)
assert "Paris" in whole.choices[0].message.content
parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(max_tokens=24, stream=True, **COMMON)]
assert "".join(parts) == whole.choices[0].message.content
parameters = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
tool = {"type": "function", "function": {"name": "visit", "parameters": parameters}}
called = litellm.completion(max_tokens=60, tools=[tool], tool_choice="required", **COMMON)
calls = called.choices[0].message.tool_calls
assert calls
assert all(json.loads(call.function.arguments)["city"] in ("Paris", "Rome") for call in calls)
