"""What the checks need before they start: what is installed, and a folder with the small model."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
import tarfile
import zipfile
from pathlib import Path

PACKAGES = ("torch", "transformers", "flashinfer-python", "numpy", "msgspec", "pyzmq", "tokenizers")


def versions(device: str) -> int:
    """Print them; 1 where the device is not there."""
    import torch

    installed = []
    for name in PACKAGES:
        try:
            installed.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            installed.append(f"{name} missing")
    print(", ".join(installed))
    found = torch.cuda.get_device_name(0) if device == "cuda" and torch.cuda.is_available() else platform.machine()
    print(f"Python {platform.python_version()}, CUDA of torch {torch.version.cuda}, {found}")
    if device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device")
        return 1
    return 0


def model(wish: str, out: Path) -> int:
    """Print the folder of the model `wish`, unpacked or made below `out` where it is no folder."""
    path = Path(wish)
    if wish and path.is_dir():
        print(path)
        return 0
    out.mkdir(parents=True, exist_ok=True)
    if not wish:
        from scripts.gpu_check.shapes import write_tiny

        print(write_tiny(out))
        return 0
    if tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            archive.extractall(out, filter="data")
    else:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(out)
    found = sorted(config.parent for config in out.rglob("config.json"))
    if not found:
        print(f"{path} holds no config.json")
        return 1
    print(found[0])
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("versions", "model"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="")
    parser.add_argument("--out", type=Path, default=Path("build/gpu_check/model"))
    given = parser.parse_args()
    return versions(given.device) if given.what == "versions" else model(given.model, given.out)


if __name__ == "__main__":
    sys.exit(main())
