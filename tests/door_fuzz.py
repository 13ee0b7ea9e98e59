"""Malformed bodies, heads and half-open connections, drawn from a seed; leaves the server and the verdict to callers.

An attack is complete (an answer or a closed connection must come) or breaks off (the client itself leaves).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PATIENCE_S = 60.0  # of an attack whose answer must come
CHAT = [{"role": "user", "content": "hello world"}]
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 2, "stop": ["x"], "temperature": 0}}),
    ("/generate", {"input_ids": [[5, 6], [7]], "stream": True, "sampling_params": {"max_new_tokens": 2}, "rid": "r"}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1, "echo": True, "n": 2}),
    ("/v1/completions", {"prompt": [5, 6], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "stop": ["x"], "logit_bias": {"7": 1}, "seed": 1}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "stream": True, "top_p": 0.5, "model": "default"}),
    ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [5]}),
    ("/tokenize", {"prompt": "hello"}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/apply_chat_template", {"messages": CHAT}),
    ("/open_session", {"capacity_of_str_len": 10, "timeout": 1}),
    ("/close_session", {"session_id": "s"}),
    ("/abort_request", {"rid": "nobody"}),
    ("/configure_logging", {"log_requests": False}),
)
ODD: tuple[Any, ...] = (
    *(None, True, "", "x", [], {}, [[]], {"a": {}}, 0, -1, 1.5, 2**31, 2**63, 2**64, 10**40, 1e308, -0.0),
    *("\x00", "\u2028", "\U0001f600", "<|im_end|>", "a" * 5000, ["x"] * 300, [None], {"": ""}, [True], "\u200b"),
)
LITERALS = (b"NaN", b"-Infinity", b'"\\ud800"', b'"\xff\xfe"', b"1e999", b"01", b"'x'", b"[" * 5000, b'{"a":' * 500)
METHODS = (b"GET", b"HEAD", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"TRACE", b"CONNECT", b"BREW", b"post", b"")
TARGETS = (
    b"*",
    b"/",
    b"//",
    b"/%00",
    b"/../../etc/passwd",
    b"http://x/health",
    b"/v1/models/%ff",
    b"/v1/models/" + b"a" * 3000,
)
HEADERS = (
    *(b"content-type: text/plain", b"content-type: application/json; charset=utf-16", b"content-encoding: gzip"),
    *(b"transfer-encoding: chunked", b"transfer-encoding: gzip, chunked", b"content-length: 5", b"content-length: -1"),
    *(b"content-length: 99999999999999999999", b"expect: 100-continue", b"upgrade: websocket", b"connection: upgrade"),
    *(
        b"x: " + b"y" * 9000,
        b"x" * 9000 + b": y",
        b"bad header",
        b": empty",
        b"x: \x00",
        b"host: ",
        b"x-request-id: \xff",
    ),
    *(b"authorization: Bearer ", b"traceparent: 00-zz", b"origin: null", b"x-custom-labels: {", b" folded: 1"),
)


@dataclass(frozen=True)
class Attack:
    """Bytes to send; `leave` is how the client breaks off, empty where it waits for the answer."""

    kind: str
    data: bytes
    leave: str = ""


@dataclass
class Tally:
    """What came back."""

    statuses: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def draw(dice: random.Random) -> Attack:
    """The next attack."""
    makers: tuple[Callable[[random.Random], Attack], ...] = (_changed_values, _broken_json, _odd_head, _half_open)
    return dice.choices(makers, weights=(4, 3, 2, 1))[0](dice)


async def strike(url: str, attack: Attack, tally: Tally, patience: float = PATIENCE_S) -> None:
    """Send it and take down what happens: a server error, or no answer in time, is wrong."""
    host, port = url.removeprefix("http://").split(":")
    tally.kinds[attack.kind] += 1
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(attack.data)
            await writer.drain()
            if attack.leave:
                _leave(writer, attack.leave)
                return
            async with asyncio.timeout(patience):
                answer = await _answer(reader)
            status = re.match(rb"HTTP/1\.[01] (\d{3})", answer)
            code = int(status[1]) if status else 0
            tally.statuses[code] += 1
            if code >= 500 or (answer and not status):
                tally.wrong.append(f"{attack.kind}: {answer[:300]!r} to {attack.data[:600]!r}")
    except TimeoutError:
        tally.wrong.append(f"{attack.kind}: no answer to {attack.data[:600]!r}")
    finally:
        writer.close()


async def storm(url: str, seed: int, count: int, at_once: int = 16, patience: float = PATIENCE_S) -> Tally:
    """So many attacks, some of them at the same time."""
    dice, tally = random.Random(seed), Tally()
    attacks = iter([draw(dice) for _ in range(count)])

    async def attacker() -> None:
        for attack in attacks:
            await strike(url, attack, tally, patience)

    await asyncio.gather(*(attacker() for _ in range(at_once)))
    return tally


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """One whole answer: until the server closes, or until its length or last chunk has come."""
    data = b""
    while piece := await reader.read(1 << 16):
        data += piece
        head, found, body = data.partition(b"\r\n\r\n")
        if not found:
            continue
        if data[9:12] == b"100":
            data = body
            continue
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        if (length and len(body) >= int(length[1])) or body.endswith(b"0\r\n\r\n") or data[9:12] in (b"204", b"304"):
            break
    return data


def _leave(writer: asyncio.StreamWriter, how: str) -> None:
    raw: socket.socket = writer.get_extra_info("socket")
    if how == "half" and writer.can_write_eof():
        writer.write_eof()
    elif how == "reset":
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _post(path: str, body: bytes, *headers: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = [
        b"POST " + path.encode() + b" HTTP/1.1",
        b"host: x",
        b"connection: close",
        b"content-type: application/json",
        b"content-length: %d" % size,
        *headers,
    ]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def _changed_values(dice: random.Random) -> Attack:
    """Valid JSON with wrong values, fields from elsewhere, fields gone."""
    path, body = dice.choice(BODIES)
    body = json.loads(json.dumps(body))
    for _ in range(dice.randrange(1, 4)):
        target = body
        while True:
            keys = list(target) if isinstance(target, dict) else list(range(len(target)))
            if not keys:
                break
            key = dice.choice(keys)
            inner = target[key]
            if isinstance(inner, dict | list) and inner and dice.random() < 0.6:
                target = inner
                continue
            if dice.random() < 0.15 and isinstance(target, dict):
                del target[key]
            else:
                target[key] = copy.deepcopy(dice.choice(ODD))
            break
        if dice.random() < 0.3:
            other = dice.choice(BODIES)[1]
            key = dice.choice(list(other))
            body[key] = copy.deepcopy(dice.choice((other[key], dice.choice(ODD))))
    return Attack("changed values", _post(path, json.dumps(body).encode()))


def _broken_json(dice: random.Random) -> Attack:
    path, body = dice.choice(BODIES)
    data = bytearray(json.dumps(body).encode())
    match dice.randrange(5):
        case 0:
            del data[dice.randrange(len(data)) :]
        case 1:
            for _ in range(dice.randrange(1, 6)):
                data[dice.randrange(len(data))] = dice.randrange(256)
        case 2:
            at = data.index(b":") + 1
            data[at : at + 1] = dice.choice(LITERALS)
        case 3:
            data = bytearray(dice.choice(LITERALS))
        case _:
            data = bytearray(dice.randbytes(dice.randrange(200)))
    return Attack("broken JSON", _post(path, bytes(data)))


def _odd_head(dice: random.Random) -> Attack:
    path, body = dice.choice(BODIES)
    whole = _post(path, json.dumps(body).encode(), *dice.sample(HEADERS, dice.randrange(1, 4)))
    match dice.randrange(6):
        case 0:
            whole = whole.replace(b"POST", dice.choice(METHODS), 1)
        case 1:
            whole = whole.replace(path.encode(), dice.choice(TARGETS), 1)
        case 2:
            whole = whole.replace(b"HTTP/1.1", dice.choice((b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"", b"JUNK")), 1)
        case 3:
            whole = dice.choice((b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", dice.randbytes(50)))
        case _:
            pass
    # What such a head announces may never come, so the end of what we send is told.
    return Attack("odd head", whole, leave=dice.choice(("half", "")) if _is_whole(whole) else "half")


def _is_whole(data: bytes) -> bool:
    """Whether a server can know that nothing more comes: one honest length, and no other framing."""
    head = data.partition(b"\r\n\r\n")[0].lower()
    odd = (b"transfer-encoding", b"expect", b"upgrade", b"connect ", b"junk", b"pri *")
    return head.count(b"content-length") == 1 and head.startswith(b"post /") and not any(word in head for word in odd)


def _half_open(dice: random.Random) -> Attack:
    path, body = dice.choice(BODIES)
    data = json.dumps(body).encode()
    whole = _post(path, data, length=len(data) + dice.choice((0, 0, 1, 1000)))
    return Attack("half-open", whole[: dice.randrange(len(whole))], leave=dice.choice(("close", "reset", "half")))
