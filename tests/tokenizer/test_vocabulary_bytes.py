"""Token ids as bytes, for the three kinds of vocabularies, and the laziness of encoding."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from services.tokenizer import model_folder as folders
from services.tokenizer.errors import ApiError
from services.tokenizer.text import TextEngine
from services.tokenizer.vocabulary import Vocabulary
from tests.tokenizer.tiny_folder import CONTEXT, write_model_folder


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer, json.loads(tokenizer.to_str()).get("decoder"))


def test_byte_level(tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(tokenizer)
    text = "hello world, 你好 🙂 \x00\x7f\xa0\xad é"
    ids = tokenizer.encode(text).ids
    assert b"".join(map(vocabulary.token_bytes, ids)).decode() == text
    assert vocabulary.token_bytes(2) == b"<|im_end|>"
    assert vocabulary.token_bytes(10**6) == b""


def test_byte_fallback() -> None:
    vocab = {"<unk>": 0, "▁hi": 1, "<0xE4>": 2, "<0xBD>": 3, "<0xA0>": 4, "▁": 5}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    vocabulary = vocabulary_of(tokenizer)
    assert [vocabulary.token_bytes(i) for i in (1, 2, 3, 4)] == [b" hi", b"\xe4", b"\xbd", b"\xa0"]
    assert vocabulary.label(2) == "bytes:\\xe4"
    assert vocabulary.text(2) == "\ufffd"


def test_plain_words() -> None:
    tokenizer = Tokenizer(models.WordLevel({"hi": 0, "<unk>": 1}, unk_token="<unk>"))
    assert vocabulary_of(tokenizer).token_bytes(0) == b"hi"


async def test_hopeless_texts_are_not_encoded(model_folder: Path) -> None:
    engine = TextEngine(folders.load(str(model_folder)), 1)
    with pytest.raises(ApiError) as caught:
        await engine.encode("x" * 10_000_000, CONTEXT, "text")
    assert caught.value.code == "context_length_exceeded"
    assert "at least" in caught.value.message
    engine.close()


async def test_work_runs_in_the_pool(model_folder: Path) -> None:
    engine = TextEngine(folders.load(str(model_folder)), 1)
    assert await engine.run(threading.current_thread) is not threading.main_thread()
    engine.close()


async def test_literal_texts_after_a_special_token_get_no_prefix_blank(tmp_path: Path) -> None:
    """Vocabularies that put a blank before the first word only: the literal path encodes as the plain one."""
    words = {"▁hello": 0, "hello": 1, "<s>": 2, "▁": 3, "<": 4, "s": 5, ">": 6, "u": 7, "<unk>": 8}
    tokenizer = Tokenizer(models.BPE(words, [], unk_token="<unk>", ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    template = "<s>{{ messages[0].content }}<s>{{ messages[1].content }}"
    folder = write_model_folder(tmp_path / "m", template=template)
    tokenizer.save(str(folder / "tokenizer.json"))
    engine = TextEngine(folders.load(str(folder)), 1)

    async def encode(*contents: str) -> list[int]:
        messages = [{"role": "user", "content": content} for content in contents]
        return (await engine.encode_chat(messages, None, {}, 4096)).tolist()

    plain = await encode("hello", "u")
    literal = await encode("hello", "<s>")
    assert plain[:3] == literal[:3] == [2, 1, 2]
    assert 2 not in literal[3:]
    engine.close()


def test_what_a_folder_says(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", eos_token_id=[0, 5], max_position_embeddings=99)
    model = folders.load(str(folder), name="org/name")
    assert model.eos_ids == (0, 2, 5)
    assert model.context_length == 99
    assert model.served_name == "org/name"
    assert model.sampling_defaults == {"temperature": 0.6, "top_p": 0.9, "top_k": 50}
    assert folders.load(str(folder), context_length=50).context_length == 50
    (folder / "config.json").unlink()
    bare = folders.load(str(folder))
    assert bare.vocab_size == Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        folders.load(str(folder))
