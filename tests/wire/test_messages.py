"""The wire's rules: every message round-trips, tags are unique, the schema changes only on purpose."""

import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec
import pytest

from shared.messages import control, edges, kv, request, step, stream
from shared.messages.base import Message

MODULES: list[ModuleType] = [control, request, stream, step, kv]
SNAPSHOT = Path(__file__).with_name("schema.json")


def all_messages() -> dict[str, type[Message]]:
    found = {}
    for module in MODULES:
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, Message) and kind.__module__ == module.__name__:
                found[name] = kind
    return found


def describe(kind: type[Message]) -> list[str]:
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    fields = [f"{f.encode_name}: {type(f.type).__name__}" + ("" if f.required else " = default") for f in info.fields]
    return [f"tag {info.tag}", *fields]


def edge_unions() -> dict[str, Any]:
    return {n: u for n, u in vars(edges).items() if n.startswith(("From", "To")) or ("To" in n and n[0].isupper())}


def test_schema_matches_the_snapshot() -> None:
    """A change here changes the wire: only append fields with defaults, then write the snapshot again."""
    now = {name: describe(kind) for name, kind in sorted(all_messages().items())}
    assert now == json.loads(SNAPSHOT.read_text()), f"to accept the change: python {__file__}"


def test_tags_are_unique() -> None:
    tags = [k.__struct_config__.tag for k in all_messages().values() if k.__struct_config__.tag is not None]
    assert len(tags) == len(set(tags))


@pytest.mark.parametrize("name", sorted(all_messages()))
def test_frozen_positional_and_bounded(name: str) -> None:
    config = all_messages()[name].__struct_config__
    assert config.frozen
    assert config.array_like
    assert config.omit_defaults


def test_full_messages_round_trip() -> None:
    sampling = request.SamplingParams(max_tokens=3, stop_token_ids=(1, 2), logit_bias_ids=b"1234")
    samples: list[tuple[Any, Message]] = [
        (edges.FromTokenizer, request.GenerateRequest("r", "f/1", b"\1\0\0\0", sampling, stop_strings=("a", "你"))),
        (
            edges.ToWorker,
            step.StepCommand(
                1, 2, b"abcd", (step.PrefillRow(0, b"abcd"),), opens=(step.SlotOpen(0, sampling, 4, 0, b""),)
            ),
        ),
        (edges.FromWorker, step.StepResult(1, 2, 3, b"abcd", scores=(step.RowScores(0, stream.Scores(1, b"abcd")),))),
        (
            edges.DetokenizerToTokenizer,
            stream.TextChunks((stream.TextChunk("r", 0, b"", "é", stream.Finish(stream.FinishReason.STOP, 2)),)),
        ),
        (
            edges.ToTokenizer,
            request.SystemStatus(
                1, True, 2, 3, workers=(request.WorkerStatus("w", "cpu", True, False, 1, 1, 0, 1, 0, 0, 0.1),)
            ),
        ),
    ]
    for union, message in samples:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union) == message


def test_older_peers_messages_decode() -> None:
    """What lacks the newest fields still decodes: they have defaults."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([4, 9]), type=edges.ToWorker) == control.Pong(9)
    assert msgspec.msgpack.decode(
        msgspec.msgpack.encode([4, 9, True, "", "new field"]), type=edges.ToWorker
    ) == control.Pong(9)


def test_every_edge_refuses_strangers() -> None:
    unions = edge_unions()
    assert len(unions) >= 9
    for name, union in unions.items():
        members = get_args(union) or (union,)
        strangers = [k for k in all_messages().values() if k not in members and k.__struct_config__.tag is not None]
        for kind in strangers:
            data = msgspec.msgpack.encode([kind.__struct_config__.tag])
            with pytest.raises(msgspec.ValidationError):
                msgspec.msgpack.decode(data, type=union)
            assert name


if __name__ == "__main__":
    now = {name: describe(kind) for name, kind in sorted(all_messages().items())}
    SNAPSHOT.write_text(json.dumps(now, indent=1) + "\n")
