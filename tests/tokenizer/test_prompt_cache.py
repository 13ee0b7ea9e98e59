"""Prompts from known pieces have exactly the ids of the tokenizer, whatever the text and whatever was sent before."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from services.tokenizer import prompt_cache
from services.tokenizer.prompt_cache import PromptCache

QWEN = next(pattern for pattern in prompt_cache._WORD_PATTERNS if "{1,3}" not in pattern)
CORPUS = ["the cat sat on the mat", "don't ask, it's 12 o'clock", "one two three\n\nfour  five", "Ünïcödé 中文 text"]
PRE_TOKENIZERS: dict[str, Any] = {
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "digits": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "qwen": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "prefix": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "metaspace": pre_tokenizers.Metaspace(prepend_scheme="first"),
    "whole": None,
}


def build(kind: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>" if kind in ("metaspace", "whole") else None))
    if PRE_TOKENIZERS[kind] is not None:
        tokenizer.pre_tokenizer = PRE_TOKENIZERS[kind]
    if kind == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    if kind == "whole":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind in ("bytes", "digits", "qwen", "prefix") else []
    trainer = BpeTrainer(vocab_size=420, special_tokens=["<unk>", "<s>", "<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_special_tokens(["<|end|>\n"])  # longer than another one
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False, rstrip=True), AddedToken("Mat", normalized=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZERS = {kind: build(kind) for kind in PRE_TOKENIZERS}
WORDS = [
    "the",
    " cat",
    "sat",
    " ",
    "  ",
    "\n",
    "<|end|>",
    "<|end|>\n",
    "<s>",
    "<tool>",
    " <tool> ",
    "<|en",
    "Mat",
    "'s",
]
WORDS += ["o'clock", "12", " 3", "中文", "é", "e\u0301", "...", " X", "a", "\t", "<unk>", "\r\n", "don't", "\U0001f600"]
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=6), max_size=60).map("".join)


def plain(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
    return ids


@pytest.mark.parametrize("kind", list(PRE_TOKENIZERS))
@settings(max_examples=120, deadline=None)
@given(history=st.lists(TEXTS, min_size=1, max_size=4), special=st.booleans(), piece=st.sampled_from([1, 8, 40]))
def test_ids_are_those_of_the_tokenizer(kind: str, history: list[str], special: bool, piece: int) -> None:
    tokenizer = TOKENIZERS[kind]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_cache, "PIECE_CHARS", piece)
        cache, prompt = PromptCache(tokenizer, tokenizer.to_str(), max_bytes=4000), ""
        for text in history:
            prompt += text
            assert cache.encode(prompt, special).tolist() == plain(tokenizer, prompt, special)


class Counted:
    """A tokenizer that says which texts it was asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.asked = tokenizer, [""]

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        self.asked += texts
        encodings: list[Any] = self.tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return encodings


def counted(kind: str = "digits", max_bytes: int = prompt_cache.CACHE_BYTES) -> tuple[PromptCache, Counted]:
    tokenizer = Counted(TOKENIZERS[kind])
    cache = PromptCache(tokenizer, TOKENIZERS[kind].to_str(), max_bytes)  # type: ignore[arg-type]
    tokenizer.asked.clear()
    return cache, tokenizer


def test_a_resent_history_is_not_encoded_again() -> None:
    cache, tokenizer = counted()
    history = "".join(f"<|end|>turn {'the cat sat ' * 200} of it" for _ in range(3))
    cache.encode(history, False)
    tokenizer.asked.clear()
    cache.encode(history + "<|end|>and what now", False)
    assert tokenizer.asked == ["<|end|>and what now"]


def test_a_text_that_goes_on_is_encoded_from_its_last_cut() -> None:
    cache, tokenizer = counted()
    text = "the cat sat on the mat " * 300
    cache.encode(text, True)
    tokenizer.asked.clear()
    cache.encode(text + "for hours", True)
    assert sum(map(len, tokenizer.asked)) < 2 * prompt_cache.PIECE_CHARS


def test_tenants_do_not_share_pieces() -> None:
    cache, tokenizer = counted()
    for isolation in ("a", "b", "a"):
        cache.encode("a secret", False, isolation)
    assert tokenizer.asked == ["a secret", "a secret"]


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    cache, tokenizer = counted(max_bytes=3000)
    for number in range(100):
        cache.encode("kept", False)
        cache.encode(f"number {number} " * 10, False)
        assert cache.bytes <= 3000
    assert tokenizer.asked.count("kept") == 1


@pytest.mark.parametrize("change", [{"lstrip": True}, {"single_word": True}])
def test_tokens_that_look_to_their_left_switch_it_off(change: dict[str, bool]) -> None:
    definition = json.loads(TOKENIZERS["bytes"].to_str())
    definition["added_tokens"][1].update(change)
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    cache = PromptCache(tokenizer, json.dumps(definition))
    text = "the cat <s> sat<|end|> on"
    assert cache.encode(text, False).tolist() == plain(tokenizer, text, False)
    assert cache.bytes == 0
