"""A streamed chat with the openai package, and what came from the cache. Needs: pip install openai"""

import sys

from openai import OpenAI

client = OpenAI(base_url=(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000") + "/v1", api_key="none")
stream = client.chat.completions.create(
    model="default",
    messages=[
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "What is the capital of France?"},
    ],
    max_tokens=48,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage and chunk.usage.prompt_tokens_details:
        cached = chunk.usage.prompt_tokens_details.cached_tokens
        print(f"\n[{chunk.usage.prompt_tokens} prompt tokens, {cached} from the cache]")
