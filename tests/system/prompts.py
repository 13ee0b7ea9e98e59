"""Thirty prompts of many kinds; leaves what is done with them to the tests."""

_SHORT = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "List three uses of a paper clip:\n1.",
    "Q: What is 17 + 25?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "To be, or not to be:",
    "The three states of matter are",
    "In 1969, the first humans",
    "A haiku about rain:\n",
    "Translate to German: Good morning, my friend.\n",
    "今天北京天气如何？",
    "请用一句话介绍人工智能。",
    "中国的首都是",
    "从前有座山，山里有座庙，",
    "你是一个旅行助手。用户说：去杭州玩三天。",
    "日本語で自己紹介をしてください。",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\ndef softmax(x):\n",
    "SELECT name, age FROM users WHERE",
    "#include <stdio.h>\n\nint main(void) {\n",
    'function greet(name) {\n  return "',
    '{"name": "Ada", "age": 36, "city": "',
    "<html>\n<head>\n<title>",
    "for i in range(10):\n    print(",
    "🙂 means happy, 😢 means",
    "café, naïve, Zürich, Kraków:",
    "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nName a color.<|im_end|>\n<|im_start|>assistant\n",
    "a",
]


def long_prompt(num_words: int = 1900) -> str:
    """About 3,000 tokens of text that does not repeat itself exactly."""
    words = "time river mountain ancient story people water light garden winter letter road".split()
    return " ".join(f"{words[i % len(words)]} {i}," if i % 9 == 0 else words[(i * 7) % 12] for i in range(num_words))


def thirty() -> list[str]:
    return [*_SHORT, long_prompt()]
