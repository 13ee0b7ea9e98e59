"""The OpenAI backend against a stand-in that notes what it is asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from radixfleet import BackendError, OpenAI, assistant, function, gen, select, system, user
from radixfleet.backend.errors import Unsupported


class _Handler(BaseHTTPRequestHandler):
    server: Any

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, body, dict(self.headers)))
        status, answer = self.server.answer(body)
        self.send_response(status)
        self.end_headers()
        if body.get("stream") and status == 200:
            for text in ("a", "b", "c"):
                event = {"choices": [{"delta": {"content": text}, "finish_reason": "stop" if text == "c" else None}]}
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            self.wfile.write(json.dumps(answer).encode())

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"id": "toy"}')


@pytest.fixture
def api() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.asked = []
    server.answer = lambda body: (200, {"choices": [{"message": {"content": "fine"}, "finish_reason": "stop"}]})
    server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(5)


@pytest.fixture
def backend(api: Any) -> Iterator[Callable[..., OpenAI]]:
    made: list[OpenAI] = []

    def make(model: str = "toy", **wishes: Any) -> OpenAI:
        made.append(OpenAI(model, base_url=api.url, api_key="key", **wishes))
        return made[-1]

    yield make
    for one in made:
        one.close()


@function
def chat(s: Any) -> None:
    s += system("Be brief.")
    s += user("Hi")
    s += assistant(gen("a", max_tokens=5, stop="!", seed=1))
    s += user("More")
    s += assistant(gen("b"))


def test_chat(api: Any, backend: Callable[..., OpenAI]) -> None:
    state = chat.run(backend=backend(), temperature=0.5)
    assert state["a"] == state["b"] == "fine"
    (path, first, headers), (_, second, _) = api.asked
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == "Bearer key"
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert (first["max_tokens"], first["stop"], first["seed"], first["temperature"]) == (5, ["!"], 1, 0.5)
    assert [message["content"] for message in second["messages"]] == ["Be brief.", "Hi", "fine", "More"]


def test_the_tokens_that_were_paid_for(api: Any, backend: Callable[..., OpenAI]) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    api.answer = lambda body: (200, {"choices": [{"message": {"content": "fine"}}], "usage": usage})
    one = backend()
    chat.run(backend=one)
    assert (one.token_usage.prompt_tokens, one.token_usage.completion_tokens) == (14, 6)
    one.token_usage.reset()
    assert one.token_usage.prompt_tokens == 0


def test_stream(api: Any, backend: Callable[..., OpenAI]) -> None:
    state = chat.run(backend=backend(), stream=True)
    assert list(state.text_iter("a")) == ["a", "b", "c"]
    assert state["b"] == "abc"


def test_completions(api: Any, backend: Callable[..., OpenAI]) -> None:
    api.answer = lambda body: (200, {"choices": [{"text": " Paris", "finish_reason": "length"}] * (body["n"])})

    @function
    def program(s: Any) -> None:
        s += "The capital is" + gen("a") + " and" + gen("b", n=2)

    state = program.run(backend=backend("davinci-002"))
    assert state["b"] == [" Paris", " Paris"]
    assert [body["prompt"] for _, body, _ in api.asked] == ["The capital is", "The capital is Paris and"]
    with pytest.raises(Unsupported, match="no chat template"):
        chat.run(backend=backend("davinci-002"))


@function(num_api_spec_tokens=64)
def character(s: Any) -> None:
    s += user("Write a character.")
    s += assistant("Name:" + gen("name", stop="\n") + "\nJob:" + gen("job", stop="\n") + "\nEnd.")
    s += user("Another?") + assistant(gen("last"))


def test_one_call_answers_several_generations(api: Any, backend: Callable[..., OpenAI]) -> None:
    written = "Sure!\nName: Ann\nJob: pilot\nEnd."
    api.answer = lambda body: (200, {"choices": [{"message": {"content": written}, "finish_reason": "stop"}]})
    state = character.run(backend=backend())
    assert (state["name"], state["job"]) == (" Ann", " pilot")
    assert state.messages()[1]["content"] == "Name: Ann\nJob: pilot\nEnd."
    assert state.get_meta_info("name")["finish_reason"] == {"type": "stop", "matched": "\n"}
    first, second = (body for _, body, _ in api.asked)
    assert first["messages"] == [{"role": "user", "content": "Write a character."}]
    assert first["max_tokens"] == 64
    assert "stop" not in first
    assert len(second["messages"]) == 3


def test_a_guess_that_does_not_fit_is_asked_for(api: Any, backend: Callable[..., OpenAI]) -> None:
    texts = iter([" Ann\nAge: 7", " pilot"])
    api.answer = lambda body: (200, {"choices": [{"text": next(texts), "finish_reason": "stop"}]})

    @function(num_api_spec_tokens=64)
    def program(s: Any) -> None:
        s += "Name:" + gen("name", stop="\n") + "\nJob:" + gen("job", stop="\n")

    state = program.bind().run(backend=backend("davinci-002"))
    assert (state["name"], state["job"]) == (" Ann", " pilot")
    assert [body["prompt"] for _, body, _ in api.asked] == ["Name:", "Name: Ann\nJob:"]
    assert api.asked[1][1]["stop"] == ["\n"]
    api.asked.clear()
    api.answer = lambda body: (200, {"choices": [{"message": {"content": "no"}, "finish_reason": "stop"}]})
    with pytest.raises(Unsupported, match="a turn of its own"):
        character.run(backend=backend())


def test_select_of_chat_models(api: Any, backend: Callable[..., OpenAI]) -> None:
    api.answer = lambda body: (200, {"choices": [{"message": {"content": '{"choice": "no"}'}}]})

    @function
    def program(s: Any) -> None:
        s += user("Sure?") + assistant(select("sure", ["yes", "no"]))

    assert program.run(backend=backend())["sure"] == "no"
    schema = api.asked[0][1]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["choice"]["enum"] == ["yes", "no"]
    api.answer = lambda body: (200, {"choices": [{"message": {"content": "perhaps"}}]})
    with pytest.raises(BackendError, match="none of the options: 'perhaps'"):
        program.run(backend=backend())


def test_select_of_completions(api: Any, backend: Callable[..., OpenAI]) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        choices = []
        for text in body["prompt"]:
            logprobs = {"text_offset": [0, 5], "tokens": ["Sure?", text[5:]]}
            choices.append({"text": text, "logprobs": {**logprobs, "token_logprobs": [None, -len(text)]}})
        return 200, {"choices": choices}

    api.answer = answer

    @function
    def program(s: Any) -> None:
        s += "Sure?" + select("sure", [" yes", " no"])

    assert program.run(backend=backend("davinci-002"))["sure"] == " no"


def test_what_the_api_cannot_do(api: Any, backend: Callable[..., OpenAI]) -> None:
    @function
    def program(s: Any, wish: dict[str, Any]) -> None:
        s += "x" + gen("a", **wish)

    for wish in ({"regex": "a+"}, {"ebnf": "x"}, {"xml_schema": "{}"}, {"top_k": 5}, {"stop_token_ids": [1]}):
        with pytest.raises(Unsupported, match=f"no {next(iter(wish))}"):
            program.run(wish=wish, backend=backend())
    program.run(wish={"json_schema": {"type": "object"}}, backend=backend())
    assert api.asked[-1][1]["response_format"]["json_schema"]["schema"] == {"type": "object"}

    @function
    def begun(s: Any) -> None:
        s += user("Hi") + assistant("Well, " + gen("a"))

    with pytest.raises(Unsupported, match="a turn of its own"):
        begun.run(backend=backend())
    with pytest.raises(Unsupported):
        backend().flush_cache()
    assert backend().get_server_info() == {"id": "toy"}


def test_errors_in_the_servers_words(api: Any, backend: Callable[..., OpenAI]) -> None:
    api.answer = lambda body: (401, {"error": {"message": "Incorrect API key provided."}})
    for stream in (False, True):
        with pytest.raises(BackendError, match="Incorrect API key") as failure:
            chat.run(backend=backend(), stream=stream).sync()
        assert failure.value.status == 401


def test_azure(api: Any, backend: Callable[..., OpenAI]) -> None:
    chat.run(backend=backend(is_azure=True, api_version="2024-10-21"))
    path, body, headers = api.asked[0]
    assert path == "/v1/chat/completions?api-version=2024-10-21"
    assert headers["api-key"] == "key"
    assert body["max_completion_tokens"] == 5
    with pytest.warns(UserWarning, match="no effect"):
        backend(chat_template="x")
