"""Small tokenizers: byte-level BPE, SentencePiece with byte fallback, WordPiece (tokens depend on neighbours)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from services.detokenizer.vocabulary import Vocabulary, from_tokenizer

WORDS = ["Ġ", "he", "lo", "hello", "Ġworld", "ä½", "ł", "ðŁ", "ðŁĺ", "âĢ", "âĢį", "the", "Ġthe", "ä½ł"]


def byte_level_tokenizer() -> Tokenizer:
    """256 bytes, some words and pieces of characters, special and plain added tokens; 280 ids or so."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [word for word in dict.fromkeys(WORDS) if word not in letters]
    vocab = {token: i for i, token in enumerate(["<|end|>", *letters, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<|end|>", special=True), AddedToken("<tool>", special=False, normalized=False)])
    tokenizer.add_tokens([AddedToken("<｜深｜>", special=True), AddedToken("two  blanks", normalized=False)])
    return tokenizer


def sentence_piece_tokenizer() -> Tokenizer:
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{n:02X}>" for n in range(256)),
        "▁",
        "▁Hello",
        "▁world",
        "wor",
        "ld",
        "你",
        "!",
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    tokenizer.add_tokens([AddedToken(word, special=True) for word in ("<unk>", "<s>", "</s>")])
    return tokenizer


def word_piece_tokenizer() -> Tokenizer:
    words = ["[UNK]", "play", "##ing", "##ed", "the", "game", "##s", "你", "##好"]
    tokenizer = Tokenizer(models.WordPiece(vocab={w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_tokens([AddedToken("[UNK]", special=True)])
    return tokenizer


@pytest.fixture(scope="session")
def byte_level() -> Vocabulary:
    return from_tokenizer(byte_level_tokenizer())


@pytest.fixture(scope="session")
def sentence_piece() -> Vocabulary:
    return from_tokenizer(sentence_piece_tokenizer())


@pytest.fixture(scope="session")
def word_piece() -> Vocabulary:
    return from_tokenizer(word_piece_tokenizer())


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with nothing but the byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
