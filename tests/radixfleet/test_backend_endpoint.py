"""The endpoint: what it sends, what it keeps, and how failures of the line look."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from radixfleet import BackendError, BackendTimeout, RuntimeEndpoint
from radixfleet.backend.base import IdsPart, Prompt, TextPart
from radixfleet.backend.sampling import Sampling
from radixfleet.backend.tokens import Tokens
from radixfleet.engine_calls import generate, generate_async
from radixfleet.runtime import flags_of
from tests.radixfleet.fake_model_server import FakeServer

PLAIN = Prompt((TextPart("one two"),))


@contextmanager
def answering(status: int, body: bytes, content_type: str = "application/json") -> Iterator[Any]:
    """A server with one answer for everything; it counts connections."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            server.connections += 1

        def log_message(self, format: str, *args: Any) -> None:
            """Nobody reads it."""

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            server.seen.append(dict(self.headers))
            self.send_response(status)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.connections, server.seen = 0, []
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(5)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (400, b'{"error": {"message": "bad regex"}}', "bad regex"),
        (422, b'{"detail": "field missing"}', "field missing"),
        (500, b'{"error": "just text"}', "just text"),
        (503, b"upstream is down", "upstream is down"),
        (404, b"{}", "HTTP status 404"),
    ],
)
def test_words_of_a_refusal(status: int, body: bytes, words: str) -> None:
    with answering(status, body) as server:
        endpoint = RuntimeEndpoint(server.url)
        with pytest.raises(BackendError, match=words) as failure:
            endpoint.flush_cache()
        assert failure.value.status == status
        with pytest.raises(BackendError, match=words):
            list(endpoint.stream(PLAIN, Sampling(), "tag"))
        endpoint.close()


def test_connections_are_reused_and_the_key_is_sent() -> None:
    with answering(200, b'{"text": ["a"]}') as server:
        endpoint = RuntimeEndpoint(server.url + "/", api_key="secret")
        for _ in range(5):
            endpoint.flush_cache()
        endpoint.close()
        assert server.connections == 1
        assert [headers["authorization"] for headers in server.seen] == ["Bearer secret"] * 5


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (b"data: nonsense\n\n", "not JSON in the stream"),
        (b"data: [1]\n\n", "not an object"),
        (b'data: {"text": "a", "output_ids": [1], "meta_info": {"completion_tokens": 1}}\n\n', "before the answer was"),
        (b"data: [DONE]\n\n", "before the answer was"),
        (b'data: {"error": {"message": "lost", "status": 500}}\n\n', "lost"),
    ],
)
def test_broken_streams(stream: bytes, words: str) -> None:
    with answering(200, stream, "text/event-stream") as server:
        endpoint = RuntimeEndpoint(server.url)
        with pytest.raises(BackendError, match=words):
            list(endpoint.stream(PLAIN, Sampling(), "tag"))
        endpoint.close()


def test_no_answer(fake: FakeServer) -> None:
    release = threading.Event()
    fake.delay = lambda prompt: release.wait(10) and None
    endpoint = RuntimeEndpoint(fake.url, timeout=0.1)
    with pytest.raises(BackendTimeout):
        endpoint.generate(PLAIN, Sampling(), "tag")
    release.set()
    endpoint.close()


def test_an_aborted_request_is_an_error(fake: FakeServer) -> None:
    endpoint = RuntimeEndpoint(fake.url)
    endpoint.abort("tag")
    with pytest.raises(BackendError, match="aborted"):
        endpoint.generate(PLAIN, Sampling(), "tag")
    endpoint.close()


def test_prompts_of_mixed_parts(fake: FakeServer) -> None:
    endpoint = RuntimeEndpoint(fake.url)
    ids = tuple(fake.encode("xyz"))
    parts = (TextPart("a "), TextPart("b"), IdsPart(ids, "xyz"), TextPart(" c"), IdsPart(ids, "xyz"))
    answer = endpoint.generate(Prompt(parts), Sampling(max_new_tokens=1), "tag")
    expected = [*fake.encode("a b"), *ids, *fake.encode(" c"), *ids]
    assert fake.generations()[0]["input_ids"] == expected
    assert answer.prompt_ids == tuple(expected)
    endpoint.close()


def test_texts_are_tokenised_once(fake: FakeServer) -> None:
    endpoint = RuntimeEndpoint(fake.url)
    prompt = Prompt((IdsPart((0,), "x"), TextPart(" again")))
    for _ in range(3):
        endpoint.generate(prompt, Sampling(), "tag")
    assert len(fake.calls("/tokenize")) == (1 if fake.scripts is None else 0)  # ours tokenises mixed prompts itself
    endpoint.close()


def test_the_servers_tokenizer(fake: FakeServer) -> None:
    endpoint = RuntimeEndpoint(fake.url)
    tokenizer = endpoint.get_tokenizer()
    assert tokenizer.encode("hello world") == fake.encode("hello world")
    assert tokenizer.decode(fake.encode("hello world")) == "hello world"
    endpoint.close()


def test_a_server_that_knows_no_server_info(fake: FakeServer) -> None:
    fake.info_status = 404
    endpoint = RuntimeEndpoint(fake.url)
    assert not endpoint.has_scripts
    assert len(fake.calls("/get_server_info")) == 1
    assert not endpoint.has_scripts
    assert len(fake.calls("/get_server_info")) == 1
    endpoint.close()
    fake.info_status = 503
    busy = RuntimeEndpoint(fake.url)
    with pytest.raises(BackendError):
        assert busy.has_scripts
    fake.info_status = 200
    assert busy.has_scripts is (fake.scripts is True)
    busy.close()


def test_clipping_never_cuts_a_character() -> None:
    class Broken(Tokens):
        def __init__(self) -> None:
            """No server."""

        def of_texts(self, texts: Any, *, special: bool = True, opening: bool = False) -> Any:
            return [tuple(range(9))]

        def text_of(self, lists: Any) -> list[str]:
            return ["half ��"]

    assert Broken().clip("whatever", 3) == "half "
    assert Broken().clip("whatever", 9) == "whatever"


def test_engine_calls(fake: FakeServer) -> None:
    endpoint = RuntimeEndpoint(fake.url)
    params = {"max_new_tokens": 3}
    answer = generate(endpoint, "one", params, {"input_ids": None, "rid": "r"})
    assert fake.calls("/generate")[0] == {"text": "one", "sampling_params": params, "rid": "r"}
    events = list(generate(endpoint, "one", params, {"stream": True}))
    assert events[-1]["text"] == answer["text"]

    async def main() -> None:
        assert (await generate_async(endpoint, ["one", "two"], params, {}))[0]["text"] == answer["text"]
        events = [event async for event in await generate_async(endpoint, "one", params, {"stream": True})]
        assert events[-1]["text"] == answer["text"]
        fake.broken_stream = True
        with pytest.raises(BackendError, match="the worker was lost"):
            _ = [event async for event in await generate_async(endpoint, "one", params, {"stream": True})]

    asyncio.run(main())
    endpoint.close()


def test_flags_of_keywords() -> None:
    given = {"model_path": "/m", "disable_radix_cache": True, "port": 1, "api_key": None, "deterministic": False}
    assert flags_of(given) == ["--model-path", "/m", "--disable-radix-cache", "--port", "1"]


def test_template_names_have_no_effect() -> None:
    with pytest.warns(UserWarning, match="the model's own template"):
        RuntimeEndpoint("http://127.0.0.1:1", chat_template_name="chatml").close()


def test_schemas_and_lists_become_our_own() -> None:
    from radixfleet.backend.sampling import schema_text, texts

    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, str]:
            return {"type": "string"}

    assert json.loads(schema_text(Model) or "") == {"type": "string"}
    assert schema_text('{"a": 1}') == '{"a": 1}'
    assert texts(["a", "b"]) == ("a", "b")
    assert texts("a") == ("a",)
