"""Token tables of model folders, and what the package may import."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from radixfleet.models import resolve
from services.scheduler.constraint.vocabulary import Vocabulary, VocabularyError

sys.path.insert(0, str(Path(__file__).parent))
from constraint_kit import build, byte_tokens, mask, vocabulary

TEXTS = [
    "Hello, world!",
    '{"name":"李雷","age":42}',
    "中文，没有空格。",
    "emoji 😀👩‍👩‍👧",
    "\n\t  spaces  \n",
    "naïve é",
]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_bytes_equal_the_tokenizers(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(Path(resolve(None), "tokenizer.json")))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert vocabulary().encode(text) == ids
    assert vocabulary().decode(ids) == text.encode()
    assert b"".join(vocabulary().all_bytes[token] for token in ids) == text.encode()


def test_a_character_may_be_split_over_bytes() -> None:
    data = "气😀".encode()
    ids = [byte_tokens()[byte] for byte in data]
    assert vocabulary().decode(ids[:2]) == data[:2]
    assert vocabulary().decode(ids) == data
    assert vocabulary().decode(vocabulary().encode(data[:5])) == data[:5]


def test_special_tokens_are_no_text() -> None:
    token = vocabulary().special_id("<|im_end|>")
    assert token in vocabulary().eos_ids
    assert vocabulary().all_bytes[token] == b""
    assert token not in vocabulary().encode("<|im_end|>")
    assert vocabulary().special_id("hello") is None


@pytest.mark.parametrize("text", ["<|im_end|> foo", "x <|im_start|>user", "<|endoftext|>"])
def test_the_text_of_a_special_token_is_forced_as_text(text: str) -> None:
    matcher = build("choice", json.dumps([text]))
    forced = matcher.forced_tokens()
    assert vocabulary().decode(forced) == text.encode()
    assert forced[0] in mask(matcher)
    assert matcher.advance(forced)
    assert matcher.is_complete


def test_the_size_is_that_of_the_models_logits(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(Path(resolve(None), name), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 49_300, "eos_token_id": 2}))
    padded = Vocabulary.load(tmp_path)
    assert (padded.size, padded.words) == (49_300, 1541)
    assert padded.all_bytes[49_299] == b""
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 100, "eos_token_id": [0, 2]}}))
    assert Vocabulary.load(tmp_path).size == vocabulary().size


def test_tokenizers_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match="names no end-of-sequence"):
        Vocabulary("{}", [])
    with pytest.raises(VocabularyError, match="cannot be used"):
        Vocabulary('{"model":1}', [0])


def test_no_torch_and_no_transformers_are_imported() -> None:
    code = (
        "import sys, services.scheduler.constraint.compiler, services.scheduler.constraint.masks, "
        "services.scheduler.constraint.compile_worker; "
        "print([name for name in ('torch', 'transformers', 'jsonschema') if name in sys.modules])"
    )
    root = Path(__file__).parents[3]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"
