"""Flags given as an object reach the server like keywords; keywords go before them."""

from __future__ import annotations

import pytest

from radixfleet import Engine, Runtime, ServerArgs
from radixfleet.local_server import ServerFailed


def test_flags_of_the_object_are_flags_of_the_server() -> None:
    given = ServerArgs(model_path="/no/such/model", disable_radix_cache=True)
    assert given.model_path == "/no/such/model"  # type: ignore[attr-defined]
    assert repr(given) == "ServerArgs(model_path='/no/such/model', disable_radix_cache=True)"
    for start in (Runtime, Engine):
        with pytest.raises(ServerFailed, match="/no/such/model"):
            start(server_args=given)
    with pytest.raises(ServerFailed, match="/nor/this"):
        Runtime(server_args=given, model_path="/nor/this")
    with pytest.raises(ServerFailed, match="unknown flag --no-such-flag"):
        Engine(server_args=ServerArgs(no_such_flag=1))
