"""GGUF vocabulary -> tokenizer.json and tokenizer_config.json; byte-level BPE here, SentencePiece in `spm`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from radixfleet.models.errors import ModelError
from radixfleet.models.gguf.metadata import Metadata
from radixfleet.models.gguf.spm import build_spm

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

# The split patterns are part of the models' published tokenizer.json files.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPLITS = {
    "llama-bpe": rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_TAIL}",
    "qwen2": rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_TAIL}",
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
    ),
}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "smaug-bpe": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
_DIGITS_FIRST = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
_PLAIN = frozenset({"default", "gpt-2", "gpt2", "olmo", "jais", "phi-2"})
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "tekken"})  # a word that is a token is not merged up to


def write_tokenizer(meta: Metadata, folder: Path) -> None:
    """Raises ModelError where the file's tokenizer or pre-tokenizer is not known: guessing changes ids."""
    kind = meta.text("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(meta)
    elif kind == "llama":
        tokenizer = build_spm(meta)
    else:
        raise ModelError(f"GGUF files with the tokenizer {kind!r} are not supported (only gpt2 and llama)")
    add_bos = _adds_bos(meta, kind)
    _add_tokens(tokenizer, meta)
    _add_bos_and_eos(tokenizer, meta, add_bos)
    tokenizer.save(str(folder / "tokenizer.json"))
    document = _tokenizer_config(meta, add_bos)
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _pre_tokenizer_name(meta: Metadata) -> str:
    name = str(meta.get("tokenizer.ggml.pre", "default"))
    return _ALIASES.get(name, name)


def _byte_level(meta: Metadata) -> Tokenizer:
    tokens: list[str] = meta.require("tokenizer.ggml.tokens")
    merges = [_pair(line) for line in meta.require("tokenizer.ggml.merges")]
    name = _pre_tokenizer_name(meta)
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=name in _WHOLE_WORDS_FIRST))
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _pair(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    return left, right


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    if name in _SPLITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[name]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in _PLAIN:
        return plain
    if name in _DIGITS_FIRST:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    raise ModelError(f"the pre-tokenizer {name!r} of this GGUF file is not known")


def _add_tokens(tokenizer: Tokenizer, meta: Metadata) -> None:
    tokens: list[str] = meta.require("tokenizer.ggml.tokens")
    types: list[int] = meta.get("tokenizer.ggml.token_type") or []
    added = [
        AddedToken(tokens[i], special=kind != USER_DEFINED, normalized=False)
        for i, kind in enumerate(types)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and tokens[i]
    ]
    tokenizer.add_tokens(added)
    moved = [token.content for token in added if tokens[tokenizer.token_to_id(token.content) or 0] != token.content]
    if moved or tokenizer.get_vocab_size() > len(tokens):
        raise ModelError(f"the GGUF file's tokens do not fit its ids (first: {moved[:1]})")


def _adds_bos(meta: Metadata, kind: str) -> bool:
    """What the file says, else what its family does."""
    said = meta.get("tokenizer.ggml.add_bos_token")
    if said is not None:
        return bool(said)
    return kind == "llama" or _pre_tokenizer_name(meta) == "llama-bpe"


def _add_bos_and_eos(tokenizer: Tokenizer, meta: Metadata, add_bos: bool) -> None:
    tokens: list[str] = meta.require("tokenizer.ggml.tokens")
    bos = meta.get("tokenizer.ggml.bos_token_id")
    eos = meta.get("tokenizer.ggml.eos_token_id")
    before = [int(bos)] if add_bos and bos is not None else []
    after = [int(eos)] if meta.get("tokenizer.ggml.add_eos_token", False) and eos is not None else []
    if not before and not after:
        return
    pieces = [*(tokens[i] for i in before), "$A", *(tokens[i] for i in after)]
    template = processors.TemplateProcessing(
        single=pieces,
        pair=[*pieces, *(piece.replace("$A", "$B:1") for piece in pieces)],
        special_tokens=[(tokens[i], i) for i in {*before, *after}],
    )
    current = tokenizer.post_processor
    tokenizer.post_processor = template if current is None else processors.Sequence([current, template])


def _tokenizer_config(meta: Metadata, add_bos: bool) -> dict[str, Any]:
    tokens: list[str] = meta.require("tokenizer.ggml.tokens")
    document: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": bool(meta.get("tokenizer.ggml.add_eos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(meta.arch_require("context_length")),
    }
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    for key, name in names.items():
        value = meta.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None and 0 <= int(value) < len(tokens):
            document[name] = tokens[int(value)]
    template = meta.get("tokenizer.chat_template")
    if template:
        document["chat_template"] = template
    return document
