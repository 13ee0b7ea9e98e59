"""Checkpoints: single and sharded files, what is missing or too much, digests, dummy weights, backend names."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.gpu_worker.attention import select
from services.gpu_worker.models.config import ModelError
from tests.gpu_worker.tiny_models import Sequence, Session, load, random_tokens, save_model


def logits_of(folder: Path, **options: object) -> torch.Tensor:
    tokens = random_tokens(13, seed=1)
    return Session(load(folder, **options)).step([(Sequence(tokens), 13)])


def edit_weights(folder: Path, drop: str = "", **added: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items() if name != drop}
    save_file({**weights, **added}, path, metadata={"format": "pt"})


def test_shards_equal_a_single_file(tmp_path: Path) -> None:
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    save_model("llama", single)
    save_model("llama", sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert torch.equal(logits_of(single), logits_of(sharded))
    assert load(single).config.digest == load(sharded).config.digest


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    edit_weights(tmp_path, drop="model.layers.1.self_attn.k_proj.weight")
    with pytest.raises(ModelError, match=r"missing tensors: model\.layers\.1\.self_attn\.k_proj\.weight"):
        load(tmp_path)


def test_unexpected_tensor_is_named(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    edit_weights(tmp_path, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(ModelError, match=r"unexpected tensors: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(tmp_path)


def test_misshapen_tensor_is_named(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    edit_weights(tmp_path, drop="model.norm.weight", **{"model.norm.weight": torch.zeros(65)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight is \(65,\), expected \(64,\)"):
        load(tmp_path)


def test_copies_of_tied_heads_and_old_buffers_are_ignored(tmp_path: Path) -> None:
    save_model("llama-tied", tmp_path)
    before = logits_of(tmp_path)
    edit_weights(
        tmp_path,
        **{"lm_head.weight": torch.zeros(128, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)},
    )
    assert torch.equal(logits_of(tmp_path), before)


def test_shard_the_index_names_must_exist(tmp_path: Path) -> None:
    save_model("llama", tmp_path, max_shard_size="100KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[0]
    lost.unlink()
    with pytest.raises(ModelError, match=lost.name):
        load(tmp_path)


def test_index_cannot_leave_the_folder(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    index = {"weight_map": {"model.norm.weight": "../other/model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="outside the folder"):
        load(tmp_path)


def test_pickled_weights_are_not_weights(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="no safetensors weights"):
        load(tmp_path)


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ModelError, match="gptq"):
        load(tmp_path)


def test_digest_tells_models_apart(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        save_model("llama", folder)
    same, again, weights, config = folders
    edit_weights(weights, drop="model.norm.weight", **{"model.norm.weight": torch.full((64,), 0.5)})
    changed = json.loads((config / "config.json").read_text())
    (config / "config.json").write_text(json.dumps({**changed, "rms_norm_eps": 1e-5}))
    digests = [load(folder).config.digest for folder in (same, again, weights, config)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_dtype_follows_the_folder(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    assert load(tmp_path, dtype=None).config.dtype is torch.bfloat16
    config.pop("dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path, dtype=None).config.dtype is torch.float32
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float8_e4m3fn"}))
    with pytest.raises(ModelError, match="float8_e4m3fn"):
        load(tmp_path, dtype=None)


def test_dummy_weights_need_only_the_config(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    first, second = logits_of(tmp_path, load_format="dummy"), logits_of(tmp_path, load_format="dummy")
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert first.std() > 0


def test_plain_models_need_no_transformers(tmp_path: Path) -> None:
    import subprocess

    save_model("llama", tmp_path)
    code = f"""
import sys, torch
from services.gpu_worker.model_runner import load_model
load_model({str(tmp_path)!r}, device=torch.device("cpu"), dtype=None, load_format="auto", model_impl="auto",
           attention_backend="reference", context_length=0, deterministic=False).build_runner(4, 16, 64)
assert "transformers" not in sys.modules
"""
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_unknown_backend_is_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    with pytest.raises(ModelError, match="'fast' is not one of"):
        load(tmp_path, attention_backend="fast").build_runner(4, 16, 64)


def test_without_native_kernels_auto_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("llama", tmp_path)
    monkeypatch.setattr(select, "NATIVE_MODULE", "services.gpu_worker.attention.absent")
    load(tmp_path, attention_backend="auto").build_runner(4, 16, 64)
    with pytest.raises(ModelError, match="not available"):
        load(tmp_path, attention_backend="native").build_runner(4, 16, 64)
