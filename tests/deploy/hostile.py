"""A peer that sends what it likes: raw sockets, random, broken and oversized messages. Leaves judging to tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import msgspec
import zmq

from shared.messages.request import GenerateRequest, SamplingParams
from shared.transport import MAX_FRAMES, MAX_MESSAGE_BYTES

Message = list[bytes]


@contextmanager
def raw_dealer(endpoint: str, identity: bytes) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context.instance().socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 2000)
        raw.setsockopt(zmq.IDENTITY, identity)
        raw.setsockopt(zmq.SNDHWM, 0)
        raw.connect(endpoint)
        yield raw


def random_messages(rng: random.Random, count: int) -> list[Message]:
    """One to three frames of random bytes, none of which is a message of any edge by chance."""
    return [[b"\xc1" + rng.randbytes(rng.randrange(200)), *_random_frames(rng)] for _ in range(count)]


def _random_frames(rng: random.Random) -> list[bytes]:
    return [rng.randbytes(rng.randrange(50)) for _ in range(rng.randrange(3))]


def truncated_messages(message: msgspec.Struct) -> list[Message]:
    """Every true prefix of an encoded message, the empty one included."""
    whole = msgspec.msgpack.encode(message)
    return [[whole[:length]] for length in range(len(whole))]


def oversized_messages() -> list[Message]:
    """Too many frames, and frames that are small enough each and too large together."""
    half = bytes(MAX_MESSAGE_BYTES // 2)
    return [[b"x"] * (MAX_FRAMES + 1), [half, half, b"x"]]


def foreign_messages(union: Any, rng: random.Random) -> list[Message]:
    """Well-formed msgpack that no message of the union is: wrong tags, types, lengths and depth."""
    tags = {kind.__struct_config__.tag for kind in get_args(union)}
    bad: list[Any] = [[tag] for tag in range(200) if tag not in tags]
    bad += [[tag, {"a": object_}] for tag in tags for object_ in (None, 1.5, [[]])]
    bad += [None, 3, "text", {"tag": 1}, [], [None], [[[[]]]], [2**63, 1], [-1]]
    rng.shuffle(bad)
    return [[msgspec.msgpack.encode(item)] for item in bad]


def mutated_requests(rng: random.Random, count: int) -> list[Message]:
    """Generate requests of which one byte or one field was changed: what decodes is wrong in its meaning."""
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    messages: list[Message] = []
    for number in range(count):
        ids = rng.randbytes(rng.choice([0, 1, 3, 4, 64, 67]))
        request = GenerateRequest(f"evil{number}", f"nobody/{number}", ids, sampling)
        data = bytearray(msgspec.msgpack.encode(request))
        for _ in range(rng.randrange(4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        messages.append([bytes(data)])
    return messages
