"""When the own decoder's steps run in the CPU kernels, and that it makes no difference beyond rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_worker.kernels import NativeUnavailable, library
from services.gpu_worker.kernels.decoder import NativeDecoder
from services.gpu_worker.models import native_step
from tests.gpu_worker.tiny_models import Sequence, Session, load, random_tokens, reference_logits, save_model

CHUNKS = (7, 1, 13, 2, 17, 1)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens of the steps the kernels have run."""
    seen: list[int] = []
    forward = NativeDecoder.forward

    def recorded(self: NativeDecoder, token_ids: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        seen.append(token_ids.shape[0])
        return forward(self, token_ids, *rest, **more)

    monkeypatch.setattr(NativeDecoder, "forward", recorded)
    return seen


def chunked(folder: Path, **options: Any) -> torch.Tensor:
    """Logits of a prompt computed in CHUNKS."""
    session, sequence = Session(load(folder, **options)), Sequence(random_tokens(sum(CHUNKS), seed=2))
    return torch.cat([session.step([(sequence, count)]) for count in CHUNKS])


def expected(model: Any) -> torch.Tensor:
    return reference_logits(model, random_tokens(sum(CHUNKS), seed=2))


@pytest.mark.parametrize("isa", library.available_isas(library.load().functions))
def test_steps_run_in_the_kernels(tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    model = save_model("qwen3", tmp_path)
    torch.testing.assert_close(chunked(tmp_path, attention_backend="native"), expected(model), rtol=0, atol=1e-4)
    assert steps == list(CHUNKS)


def test_large_steps_take_the_plain_weights(tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_step, "NATIVE_ROWS", 7)
    model = save_model("llama", tmp_path)
    torch.testing.assert_close(chunked(tmp_path, attention_backend="native"), expected(model), rtol=0, atol=1e-4)
    assert steps == [count for count in CHUNKS if count <= 7]


@pytest.mark.parametrize("tied", [False, True])
def test_a_large_model_has_one_copy_of_its_weights(
    tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    monkeypatch.setattr(native_step, "NATIVE_ROWS", 7)
    monkeypatch.setattr(native_step, "SECOND_COPY_BYTES", 0)
    model = save_model("llama-tied" if tied else "llama", tmp_path)
    torch.testing.assert_close(chunked(tmp_path, attention_backend="native"), expected(model), rtol=0, atol=1e-4)
    assert steps == list(CHUNKS)


def test_deterministic_steps_of_any_size_run_in_the_kernels(
    tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_step, "NATIVE_ROWS", 7)
    save_model("llama", tmp_path)
    chunked(tmp_path, attention_backend="native", deterministic=True)
    assert steps == list(CHUNKS)


def test_without_kernels_the_layers_run_in_torch(
    tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> library.Library:
        raise NativeUnavailable("no C++ compiler found")

    monkeypatch.setattr(library, "load", missing)
    model = save_model("llama", tmp_path)
    torch.testing.assert_close(chunked(tmp_path, attention_backend="auto"), expected(model), rtol=0, atol=1e-4)
    assert steps == []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-biased", {"attention_backend": "native"}),  # GELU
        ("llama", {"attention_backend": "auto", "dtype": torch.float16}),
        ("llama", {"attention_backend": "reference"}),
    ],
)
def test_what_the_kernels_cannot_do_runs_in_torch(
    tmp_path: Path, steps: list[int], name: str, options: dict[str, Any]
) -> None:
    model = save_model(name, tmp_path)
    tolerance = 0.2 if "dtype" in options else 1e-4
    torch.testing.assert_close(chunked(tmp_path, **options), expected(model), rtol=0, atol=tolerance)
    assert steps == []


def test_an_instruction_set_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, "mmx")
    save_model("llama", tmp_path)
    with pytest.raises(ValueError, match="mmx"):
        load(tmp_path, attention_backend="native")
