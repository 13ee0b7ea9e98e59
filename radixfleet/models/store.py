"""Turns what the user wrote after --model-path into a folder; leaves fetching and converting to its neighbours."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from radixfleet.models import small_model
from radixfleet.models.cache import build_once, cache_root
from radixfleet.models.errors import ModelError
from radixfleet.models.progress import Progress, to_stderr

SMALL_MODEL_NAME = small_model.NAME
CONVERTER_VERSION = 1
"""Grows when the converter's output changes, so that older entries of the cache are not used."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def resolve(model_path: str | None = None, revision: str | None = None, say: Progress = to_stderr) -> Path:
    """The local folder (Hugging Face layout) of a model.

    `model_path` is None (the small default model), a folder, a GGUF file, or a name on the Hugging Face hub.
    Raises ModelError with a message for the user.
    """
    if not model_path:
        return _small_model(say)
    path = Path(model_path).expanduser()
    if path.is_dir():
        return _folder(path, say)
    if path.is_file():
        return _file(path, say)
    if path.suffix == ".gguf" or not _HUB_NAME.fullmatch(model_path):
        raise ModelError(f"no such model file or folder: {model_path}")
    return _from_hub(model_path, revision, say)


def _small_model(say: Progress) -> Path:
    def build(folder: Path) -> None:
        source = small_model.fetch(folder, say)
        _convert(source, folder, say)
        source.unlink()

    name = f"{small_model.NAME}-{small_model.SHA256[:12]}-v{CONVERTER_VERSION}"
    return build_once(cache_root() / "models" / name, build, say)


def _folder(path: Path, say: Progress) -> Path:
    if (path / "config.json").is_file():
        return path.absolute()
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _file(files[0], say)
    raise ModelError(
        f"{path} is no model folder: it has no config.json"
        + (f" and {len(files)} GGUF files; name one of them" if files else "")
    )


def _file(path: Path, say: Progress) -> Path:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file; --model-path takes a folder, a GGUF file or a hub name")
    path = path.resolve()
    state = path.stat()
    key = f"{path}\0{state.st_size}\0{state.st_mtime_ns}"
    name = f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}-v{CONVERTER_VERSION}"
    return build_once(cache_root() / "models" / name, lambda folder: _convert(path, folder, say), say)


def _convert(source: Path, folder: Path, say: Progress) -> None:
    # Imported late: numpy and gguf cost a quarter of a second, and a converted model needs neither.
    from radixfleet.models.gguf.convert import convert

    convert(source, folder, say)


def _from_hub(name: str, revision: str | None, say: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES))
    except RepositoryNotFoundError as error:
        raise ModelError(f"{name} is neither a local path nor a (public) model of {hub}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        say(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        raise ModelError(
            f"{name} is not a local path, and {hub} could not be reached for it; "
            "name a folder or a GGUF file, or start without --model-path for the small default model"
        ) from error
