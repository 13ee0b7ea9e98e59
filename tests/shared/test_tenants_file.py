"""The key file: its form, its rights, and that no message shows a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.tenants import Tenant, TenantsError, from_keys, parse, read_file, require

GOOD = """
# name   key        requests tokens namespace
alice    sk-alice-1 600      200000
bob      sk-bob-1   -        -      research   # shares with carol
carol    sk-carol-1 -        5      research
alice    sk-alice-2 600      200000
"""


def write(tmp_path: Path, text: str, mode: int = 0o600) -> str:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_tenants_of_a_file(tmp_path: Path) -> None:
    assert read_file(write(tmp_path, GOOD)) == (
        Tenant("alice", ("sk-alice-1", "sk-alice-2"), 600, 200000),
        Tenant("bob", ("sk-bob-1",), namespace="research"),
        Tenant("carol", ("sk-carol-1",), 0, 5, "research"),
    )
    assert from_keys(["a", "b"]) == (Tenant("key-1", ("a",)), Tenant("key-2", ("b",)))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("alice", "line 1: a line is"),
        ("alice secret 1 2 three four", "a line is"),
        ("al/ice secret", "a name is"),
        ("alice secret 0", "a limit is"),
        ("alice secret -1", "a limit is"),
        ("alice secret 1e9", "a limit is"),
        ("alice secret ٣", "a limit is"),
        ("alice secret " + "9" * 5000, "a limit is"),
        ("alice secret - - sh@red", "a namespace is"),
        ("alice sécret", "a key is"),
        ("alice " + "secret" * 100, "a key is"),
        ("alice secret\nbob secret", "twice"),
        ("", "names no tenant"),
        ("# alice secret\n  \n", "names no tenant"),
        ("alice #secret", "line 1: a line is"),
        ("alice secret 5\nalice secret2 6", "line 2: alice stands there twice"),
    ],
)
def test_what_cannot_be_used_is_said_without_the_key(line: str, complaint: str) -> None:
    with pytest.raises(TenantsError) as caught:
        parse(line.splitlines())
    assert complaint in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_key_may_hold_what_else_begins_a_comment() -> None:
    [tenant] = parse(["alice sk#1  5 7 # and so on"])
    assert tenant == Tenant("alice", ("sk#1",), 5, 7)


@pytest.mark.parametrize(
    ("mode", "good"), [(0o600, True), (0o400, True), (0o640, True), (0o644, False), (0o660, False)]
)
def test_rights_of_the_file(tmp_path: Path, mode: int, good: bool) -> None:
    path = write(tmp_path, GOOD, mode)
    if good:
        assert read_file(path)
    else:
        with pytest.raises(TenantsError, match="chmod"):
            read_file(path)


def test_a_missing_file_ends_the_process_with_a_message(tmp_path: Path) -> None:
    require("")
    with pytest.raises(SystemExit, match="No such file"):
        require(str(tmp_path / "none"))
