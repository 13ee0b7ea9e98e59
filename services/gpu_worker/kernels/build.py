"""Compiles the kernel sources once into a cache folder. Leaves loading and dispatch to library.py.

    python -m services.gpu_worker.kernels.build      builds (or finds) the library and prints its path

One translation unit per instruction set; a unit that the compiler cannot build is left out. A library beside this
file (`prebuilt/`, in wheels) is taken before anything is compiled.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from services.gpu_worker.kernels import NativeUnavailable

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "prebuilt"
COMMON_UNITS = ("dispatch", "attention_plan", "pack")
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",  # 64-byte vectors in arguments; nothing of theirs leaves a unit
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni")
X86_UNITS = {"avx2": _AVX2, "avx512": _AVX512, "amx": _AVX512}


def library_path(extra_flags: tuple[str, ...] = ()) -> Path:
    """The built library. Raises NativeUnavailable without a working compiler."""
    prebuilt = PREBUILT / f"radixfleet_kernels_{_platform()}.so"
    if prebuilt.is_file() and not extra_flags:
        return prebuilt
    compiler = find_compiler()
    target = cache_folder() / f"radixfleet_kernels_{_key(compiler, extra_flags)}.so"
    if not target.is_file():
        _build(compiler, target, extra_flags)
    return target


def find_compiler() -> list[str]:
    """The C++ compiler's command, from $CXX or the path."""
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        words = name.split()
        if words and shutil.which(words[0]):
            return words
    raise NativeUnavailable("no C++ compiler found ($CXX, c++, g++, clang++)")


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "radixfleet" / "kernels"


def _platform() -> str:
    return f"{platform.system()}_{platform.machine()}".lower()


def _key(compiler: list[str], extra_flags: tuple[str, ...]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256()
    for part in (version, " ".join(compiler).encode(), repr((FLAGS, X86_UNITS, extra_flags)).encode()):
        digest.update(part)
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"{_platform()}_{digest.hexdigest()[:16]}"


def _build(compiler: list[str], target: Path, extra_flags: tuple[str, ...]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        openmp = ("-fopenmp",) if _accepts(compiler, "-fopenmp", Path(folder)) else ()
        flags = (*FLAGS, *openmp, *extra_flags)
        linked = Path(folder) / "library.so"
        objects = _compile_units(compiler, flags, Path(folder))
        _run([*compiler, *flags, "-shared", *map(str, objects), "-o", str(linked)])
        os.replace(linked, target)  # several processes may build at once; the last one wins whole


def _accepts(compiler: list[str], flag: str, folder: Path) -> bool:
    probe = folder / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    command = [*compiler, flag, str(probe), "-o", str(folder / "probe")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _compile_units(compiler: list[str], flags: tuple[str, ...], folder: Path) -> list[Path]:
    optional = X86_UNITS if platform.machine().lower() in ("x86_64", "amd64") else {}

    def compile_unit(name: str, *more: str) -> Path:
        target = folder / f"{name}.o"
        _run([*compiler, *flags, *more, "-c", str(SOURCES / f"{name}.cpp"), "-o", str(target)])
        return target

    def compile_optional(isa: str) -> Path | None:
        try:
            return compile_unit(f"isa_{isa}", *optional[isa])
        except NativeUnavailable:
            return None  # an older compiler without these instructions

    with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        portable = pool.submit(compile_unit, "isa_portable")
        built = {isa: unit for isa, unit in zip(optional, pool.map(compile_optional, optional), strict=True) if unit}
        present = [f"-DRF_HAVE_{isa.upper()}" for isa in built]
        common = pool.map(lambda name: compile_unit(name, *present), COMMON_UNITS)
        return [portable.result(), *built.values(), *common]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"the C++ compiler failed: {error}") from error
    if done.returncode:
        raise NativeUnavailable(f"the C++ compiler failed: {' '.join(command)}\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{library_path()}\n")
    except NativeUnavailable as error:
        raise SystemExit(f"kernels not built: {error}") from None
