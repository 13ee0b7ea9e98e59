"""A model folder small enough for a test: byte-level BPE, special tokens, a chatml template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512  # the model's; the tokenizer has fewer
CONTEXT = 256
CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog, hello world and good morning to all of you"] * 30


def write_model_folder(folder: Path, template: str = CHATML, **config: Any) -> Path:
    """Everything the tokenizer service reads; `config` overrides fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    files: dict[str, dict[str, Any]] = {
        "config.json": {
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": CONTEXT,
            "eos_token_id": 0,
            **config,
        },
        "generation_config.json": {"eos_token_id": [2], "temperature": 0.6, "top_p": 0.9, "top_k": 50},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "chat_template": template,
        },
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    return folder


def build_tokenizer() -> Tokenizer:
    """Ids 0, 1, 2 are the special tokens; every byte is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(text, special=True) for text in specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    return tokenizer
