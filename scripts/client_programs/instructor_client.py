"""instructor over the openai package: JSON schemas and tools. argv[1] is the server's URL."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field


class City(BaseModel):
    name: Literal["Paris", "Rome", "Berlin"]
    millions: int = Field(ge=1, le=40)


for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    client = instructor.from_openai(openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none"), mode=mode)
    city = client.chat.completions.create(
        model="default",
        response_model=City,
        max_retries=0,
        temperature=0,
        max_tokens=100,
        messages=[{"role": "user", "content": "The capital of France and its size."}],
    )
    assert isinstance(city, City), mode
