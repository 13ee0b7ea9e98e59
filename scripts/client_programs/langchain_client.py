"""langchain-openai, whole, streamed and structured. argv[1] is the server's URL."""

import sys
from typing import Any, Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    city: Literal["Paris", "Rome"]


COMMON: Any = {"model": "default", "base_url": sys.argv[1] + "/v1", "api_key": "none", "temperature": 0}
chat = ChatOpenAI(max_tokens=40, **COMMON)
whole = chat.invoke("What is the capital of France?").content
assert "Paris" in whole
assert "".join(str(part.content) for part in chat.stream("What is the capital of France?")) == whole
for method in ("json_schema", "function_calling"):
    answer = chat.with_structured_output(Answer, method=method).invoke("What is the capital of France?")
    assert isinstance(answer, Answer), method
