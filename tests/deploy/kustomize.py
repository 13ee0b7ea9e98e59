"""Renders kustomizations: what of kustomize our own files use. Leaves everything else to kubectl, which judges it.

Resources (files and folders) and strategic merge patches: maps merge, lists of named things merge by name, other lists
are replaced, `$patch: delete` removes the object.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]


def render(folder: Path) -> list[Object]:
    """All objects of the kustomization in `folder`."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(kustomization) <= {"apiVersion", "kind", "resources", "patches"}
    objects: list[Object] = []
    for name in kustomization["resources"]:
        path = folder / name
        objects += render(path) if path.is_dir() else _load(path)
    for patch in kustomization.get("patches", ()):
        for change in _load(folder / patch["path"]):
            objects = _patched(objects, change)
    return objects


def render_with_kubectl(folder: Path) -> list[Object] | None:
    """The same by kubectl; None where there is none."""
    if shutil.which("kubectl") is None:
        return None
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True)
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def identity(item: Object) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def _load(path: Path) -> list[Object]:
    return [item for item in yaml.safe_load_all(path.read_text()) if item]


def _patched(objects: list[Object], change: Object) -> list[Object]:
    (target,) = (item for item in objects if identity(item) == identity(change))
    if change.get("$patch") == "delete":
        return [item for item in objects if item is not target]
    return [_merge(item, change) if item is target else item for item in objects]


def _merge(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merge(old[key], value) if key in old else value for key, value in new.items()}}
    if _named(old) and _named(new):
        changes = {item["name"]: item for item in new}
        kept = [_merge(item, changes.pop(item["name"])) if item["name"] in changes else item for item in old]
        return [*changes.values(), *kept]
    return copy.deepcopy(new)


def _named(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) and "name" in item for item in value)
