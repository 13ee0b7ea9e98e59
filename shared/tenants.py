"""Who holds a key: the tenants of a key file. Leaves checking keys to the tokenizer and budgets to the scheduler.

One tenant a line; a name may stand on several lines with different keys, so that keys can be changed:

    # name   key                requests/min   tokens/min   namespace
    alice    sk-alice-5d0e...   600            200000
    bob      sk-bob-90aa...     -              -            research
    carol    sk-carol-77c1...   -              -            research
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable
from pathlib import Path

import msgspec

MAX_FILE_BYTES = 4 << 20
MAX_KEY_CHARS = 512
OTHERS = stat.S_IRWXO | stat.S_IWGRP
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_COMMENT = re.compile(r"(^|\s)#.*")  # within a word it may be part of a key
_NONE = "-"


class TenantsError(ValueError):
    """The file cannot be used; the text names the line and never shows a key."""


class Tenant(msgspec.Struct, frozen=True):
    """Limits are per minute, 0 means none. Tenants with equal `namespace` share their cache."""

    name: str
    keys: tuple[str, ...]
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    namespace: str = ""  # empty: its own


def read_file(path: str) -> tuple[Tenant, ...]:
    """The tenants of a key file. Raises TenantsError, also where others could read or change it."""
    file = Path(path)
    try:
        with file.open("rb") as opened:
            mode = stat.S_IMODE(file.stat().st_mode)
            if mode & OTHERS:
                raise TenantsError(f"{path} has mode {mode:04o}: others may read or change it; chmod it to 600")
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TenantsError(f"{path}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise TenantsError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return parse(data.decode().splitlines(), path)
    except UnicodeDecodeError:
        raise TenantsError(f"{path} is not UTF-8") from None


def parse(lines: Iterable[str], source: str = "key file") -> tuple[Tenant, ...]:
    """Tenants in the order of their first lines. Raises TenantsError."""
    found: dict[str, Tenant] = {}
    for number, line in enumerate(lines, 1):
        words = _COMMENT.sub("", line).split()
        if not words:
            continue
        try:
            tenant = _tenant(words)
            known = found.get(tenant.name)
            found[tenant.name] = tenant if known is None else _joined(known, tenant)
        except TenantsError as error:
            raise TenantsError(f"{source}, line {number}: {error}") from None
    if not found:
        raise TenantsError(f"{source} names no tenant: without keys everybody may do everything")
    check_keys((key for tenant in found.values() for key in tenant.keys), source)
    return tuple(found.values())


def from_keys(keys: Iterable[str]) -> tuple[Tenant, ...]:
    """Tenants without limits, named by their order. Raises TenantsError."""
    return tuple(Tenant(f"key-{number}", (_checked_key(key),)) for number, key in enumerate(keys, 1))


def check_keys(keys: Iterable[str], source: str = "--api-key, --api-key-file and --admin-api-key") -> None:
    """Raises TenantsError where one key would mean two tenants."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            raise TenantsError(f"{source}: one key stands there twice")
        seen.add(key)


def _tenant(words: list[str]) -> Tenant:
    if not 2 <= len(words) <= 5:
        raise TenantsError("a line is: name key [requests/min] [tokens/min] [namespace]")
    name, key, requests, tokens, namespace = [*words, *[_NONE] * (5 - len(words))]
    if not _NAME.fullmatch(name):
        raise TenantsError("a name is 1 to 64 letters, digits, '_', '.' or '-'")
    if namespace != _NONE and not _NAME.fullmatch(namespace):
        raise TenantsError("a namespace is 1 to 64 letters, digits, '_', '.' or '-'")
    shared = "" if namespace == _NONE else namespace
    return Tenant(name, (_checked_key(key),), _limit(requests), _limit(tokens), shared)


def _joined(known: Tenant, other: Tenant) -> Tenant:
    """One more key of a tenant that was there."""
    keys = known.keys + other.keys
    if msgspec.structs.replace(other, keys=known.keys) != known:
        raise TenantsError(f"{known.name} stands there twice with different limits or namespaces")
    return msgspec.structs.replace(known, keys=keys)


def _checked_key(key: str) -> str:
    if not 1 <= len(key) <= MAX_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise TenantsError(f"a key is 1 to {MAX_KEY_CHARS} visible ASCII characters")
    return key


def _limit(word: str) -> int:
    if word == _NONE:
        return 0
    if not word.isascii() or not word.isdecimal() or not 1 <= int(word[:12]) <= 10**9 or len(word) > 10:
        raise TenantsError("a limit is a whole number from 1 to 1000000000, or '-' for none")
    return int(word)


def require(path: str) -> None:
    """Ends the process with a message where a key file is named that cannot be used."""
    if path:
        try:
            read_file(path)
        except TenantsError as error:
            raise SystemExit(f"radixfleet: {error}") from None
