"""Run as a script: what transformers makes of conversations. JSON cases on stdin, JSON answers on stdout."""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from typing import Any


@lru_cache
def load(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def answer(case: dict[str, Any]) -> dict[str, Any]:
    tokenizer = load(case["folder"])
    if "text" in case:
        return {"ids": tokenizer(case["text"])["input_ids"]}
    options = {"chat_template": case.get("template"), **case.get("options", {})}
    options.setdefault("add_generation_prompt", True)
    try:
        text = tokenizer.apply_chat_template(case["messages"], tools=case.get("tools"), tokenize=False, **options)
        encoded = tokenizer.apply_chat_template(case["messages"], tools=case.get("tools"), return_dict=True, **options)
    except Exception as error:
        return {"error": str(error)}
    return {"text": text, "ids": encoded["input_ids"]}


if __name__ == "__main__":
    json.dump([answer(case) for case in json.load(sys.stdin)], sys.stdout)
