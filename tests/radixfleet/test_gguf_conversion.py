"""GGUF files become folders that transformers reads as the model they were made from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from radixfleet.models import ModelError, resolve
from radixfleet.models.gguf import config as gguf_config
from radixfleet.models.gguf import tensors
from radixfleet.models.gguf.spm import merges_from_scores
from radixfleet.models.progress import silent

sys.path.insert(0, str(Path(__file__).parent))
import gguf_files

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXFLEET_CACHE", str(tmp_path / "cache"))


def _random_model(model_type: str, tied: bool) -> torch.nn.Module:
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        model_type, vocab_size=len(gguf_files.byte_vocabulary()), tie_word_embeddings=tied, **SIZES
    )
    model = AutoModelForCausalLM.from_config(config).float()
    # bf16 values survive the conversion unchanged, so that results can be compared exactly.
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(value.bfloat16().float() + (0.125 if value.ndim == 1 else 0.0))
    return model.eval()


def _weights(model: torch.nn.Module, tied: bool) -> dict[str, np.ndarray]:
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    if tied:
        state.pop("lm_head.weight", None)
    return state


@pytest.mark.parametrize(
    ("arch", "model_type", "tied"),
    [("llama", "llama", True), ("llama", "llama", False), ("qwen2", "qwen2", True), ("qwen3", "qwen3", False)],
)
def test_converted_model_computes_the_same_logits(tmp_path: Path, arch: str, model_type: str, tied: bool) -> None:
    original = _random_model(model_type, tied)
    path = tmp_path / "tiny.gguf"
    gguf_files.write(path, arch, SIZES, _weights(original, tied))
    folder = resolve(str(path), say=silent)
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(2, 42).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, original(ids).logits)


def test_conversion_happens_once_per_content(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    gguf_files.write(path, "llama", SIZES, _weights(_random_model("llama", True), True))
    lines: list[str] = []
    first = resolve(str(path), say=lines.append)
    assert lines
    lines.clear()
    assert resolve(str(path), say=lines.append) == first
    assert not lines
    path.touch()
    assert resolve(str(path), say=silent) != first


def test_weights_are_split_into_indexed_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "SHARD_BYTES", 20_000)
    path = tmp_path / "tiny.gguf"
    gguf_files.write(path, "llama", SIZES, _weights(_random_model("llama", True), True))
    folder = resolve(str(path), say=silent)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, framework="numpy") as shard:
            assert name in shard.keys()  # noqa: SIM118 - it is no dict


def test_tokenizer_and_chat_template(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    gguf_files.write(path, "llama", SIZES, _weights(_random_model("llama", True), True))
    tokenizer = AutoTokenizer.from_pretrained(resolve(str(path), say=silent))
    text = "hello wo 12 你好 🫠\n\n x<|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    names = tokenizer.convert_ids_to_tokens(ids)
    assert names[:3] == ["hello", "Ġwo", "Ġ"]
    assert names[3:5] == ["1", "2"]  # single digits
    assert ids[-1] == 1
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|end|>", "<|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.removesuffix("<|im_end|>")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert rendered == "x"


def test_end_tokens_are_the_declared_and_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    gguf_files.write(path, "llama", SIZES, _weights(_random_model("llama", True), True))
    folder = resolve(str(path), say=silent)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1]


@pytest.mark.parametrize(
    ("arch", "pre", "complaint"), [("gptneox", "smollm", "gptneox"), ("llama", "unheard-of", "unheard-of")]
)
def test_unknown_kinds_are_refused_by_name_and_leave_nothing(
    tmp_path: Path, arch: str, pre: str, complaint: str
) -> None:
    path = tmp_path / "tiny.gguf"
    gguf_files.write(path, arch, SIZES, _weights(_random_model("llama", True), True), pre=pre)
    with pytest.raises(ModelError, match=complaint):
        resolve(str(path), say=silent)
    assert not [entry for entry in (tmp_path / "cache" / "models").iterdir() if entry.is_dir()]


def test_unknown_tensor_is_refused() -> None:
    with pytest.raises(ModelError, match=r"blk\.0\.attn_sinks\.weight"):
        tensors.hf_name("blk.0.attn_sinks.weight")


def test_bf16_rounds_to_nearest_even_as_torch_does() -> None:
    values = np.concatenate(
        [
            np.random.default_rng(3).normal(size=5000).astype(np.float32),
            np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3.39e38, 1.00390625, 1.01171875], dtype=np.float32),
        ]
    )
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    actual = tensors.to_bf16(values)
    numbers = ~np.isnan(values)
    assert np.array_equal(actual[numbers], expected[numbers])
    assert np.isnan(torch.from_numpy(actual[~numbers].copy()).view(torch.bfloat16).float().numpy()).all()


class _Keys:
    """Stands in for the metadata of a file with rope factors."""

    def arch_get(self, key: str, default: object = None) -> object:
        return {"rope.scaling.original_context_length": 8192}.get(key, default)


def test_llama3_rope_factors_are_recognised() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.for_model(
        "llama", head_dim=64, hidden_size=64, num_attention_heads=1, rope_parameters={"rope_theta": 500000.0, **scaling}
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / (500000.0 ** (np.arange(0, 64, 2) / 64))
    factors = (plain / scaled.numpy()).astype(np.float32)
    assert gguf_config._llama3_scaling(_Keys(), 64, 500000.0, factors) == scaling
    with pytest.raises(ModelError, match="no known rule"):
        gguf_config._llama3_scaling(_Keys(), 64, 500000.0, factors * np.linspace(1, 2, 32, dtype=np.float32))


def test_sentencepiece_merges_come_in_score_order() -> None:
    tokens = ["<unk>", "a", "b", "c", "ab", "bc", "abc"]
    scores = [0.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0]
    assert merges_from_scores(tokens, scores) == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]
