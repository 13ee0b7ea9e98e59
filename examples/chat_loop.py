"""A chat at the terminal: every turn sends the whole history, and only what is new is computed."""

import json
import sys

import httpx

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"
messages: list[dict[str, str]] = []
with httpx.Client(base_url=url, timeout=300) as client:
    while True:
        try:
            question = input("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            break
        if not question:
            continue
        messages.append({"role": "user", "content": question})
        answer, usage = "", None
        body = {
            "messages": messages,
            "max_tokens": 200,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    text = choice["delta"].get("content") or ""
                    answer += text
                    print(text, end="", flush=True)
        messages.append({"role": "assistant", "content": answer})
        if usage:
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            print(f"\n    [{usage['prompt_tokens']} prompt tokens, {cached} of them from the cache]")
