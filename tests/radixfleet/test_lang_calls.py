"""Calls of HTTP APIs and Python functions in the middle of a program, and values used before they exist."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from radixfleet import ApiCallError, LanguageError, allow_api_hosts, forbid_api_hosts, function, gen
from tests.radixfleet.fake_model_server import END, FakeServer, wait_until


class _Api(BaseHTTPRequestHandler):
    server: Any

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.server.asked.append((url.path, parse_qs(url.query), dict(self.headers)))
        if url.path == "/slow":
            self.server.release.wait(20)
        if url.path.startswith("/drip"):
            self._drip(b"x-more: y\r\n" if url.path == "/drip-head" else b"\r\nword ")
            return
        status = {"/broken": 500, "/moved": 302}.get(url.path, 200)
        body = b"x" * 2000 if url.path == "/long" else json.dumps({"sky": "sunny"}).encode()
        self.send_response(status)
        self.send_header("location", "http://elsewhere.example/")
        self.end_headers()
        for at in range(0, len(body), 500):
            self.wfile.write(body[at : at + 500])

    def _drip(self, piece: bytes) -> None:
        self.connection.sendall(b"HTTP/1.1 200 OK\r\n")
        with contextlib.suppress(OSError):  # until the client has had enough
            while not self.server.release.wait(0.05):
                self.connection.sendall(piece)


@pytest.fixture
def api() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Api)
    server.daemon_threads = True
    server.asked = []
    server.release = threading.Event()
    server.host = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.release.set()
    forbid_api_hosts()
    server.shutdown()
    server.server_close()
    thread.join(5)


def weather(host: str, path: str = "/forecast", **wishes: Any) -> Any:
    @function
    def program(s: Any, city: str) -> None:
        s += f"{city}: " + gen("weather", api_url=f"http://{host}{path}", params={"city": city}, **wishes)
        s += " so" + gen("plan")

    return program


def test_the_answer_becomes_text(fake: FakeServer, api: Any) -> None:
    allow_api_hosts(api.host)
    state = weather(api.host, api_headers={"x-key": "k"}).run(city="Hang zhou & co")
    assert state["weather"] == '{"sky": "sunny"}'
    assert state.text().startswith('Hang zhou & co: {"sky": "sunny"} so')
    [(path, query, headers)] = api.asked
    assert (path, query) == ("/forecast", {"city": ["Hang zhou & co"]})
    assert headers["x-key"] == "k"
    assert fake.prompts() == ['Hang zhou & co: {"sky": "sunny"} so']


def test_hosts_must_be_allowed(fake: FakeServer, api: Any) -> None:
    with pytest.raises(ApiCallError, match=r"not on the allow-list.*allow_api_hosts\('127.0.0.1:\d+'\)"):
        weather(api.host).run(city="x")
    allow_api_hosts("127.0.0.1", "api.example.com")
    with pytest.raises(ApiCallError, match="allow-list"):
        weather(api.host).run(city="x")
    with pytest.raises(ApiCallError, match="must be an http or https address"):
        function(lambda s: s.__iadd__(gen("x", api_url="file:///etc/passwd"))).run()
    assert api.asked == []
    for wrong in ("http://x/", "a/b", ""):
        with pytest.raises(ValueError, match="not a host"):
            allow_api_hosts(wrong)


def test_limits_and_failures(fake: FakeServer, api: Any) -> None:
    allow_api_hosts(api.host, timeout=5, max_bytes=1000)
    with pytest.raises(ApiCallError, match="longer than 1000 bytes"):
        weather(api.host, "/long").run(city="x")
    assert weather(api.host, "/long", api_max_bytes=5000).run(city="x")["weather"] == "x" * 2000
    with pytest.raises(ApiCallError, match="status 500"):
        weather(api.host, "/broken").run(city="x")
    with pytest.raises(ApiCallError, match="status 302"):
        weather(api.host, "/moved").run(city="x")
    with pytest.raises(ApiCallError, match=r"did not answer within 0\.2 s"):
        weather(api.host, "/slow", api_timeout=0.2).run(city="x")
    api.shutdown()
    api.server_close()
    with pytest.raises(ApiCallError, match=r"the call to 127\.0\.0\.1 failed"):
        weather(api.host).run(city="x")


def test_max_tokens_cuts_the_answer(fake: FakeServer) -> None:
    @function
    def program(s: Any) -> None:
        s += "x" + gen("facts", max_tokens=3, api_url=lambda: "one two three four")

    assert program.run()["facts"] == "one two three"


def test_functions_as_calls(fake: FakeServer) -> None:
    @function
    def program(s: Any) -> None:
        s += gen("a", api_url=lambda n, where: {"n": n, "where": where}, params={"n": 3, "where": "杭州"})
        s += gen("b", api_url=lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        program.run()
    state = program.run_batch([{}], on_error="keep")[0]
    assert state["a"] == '{"n": 3, "where": "杭州"}'
    with pytest.raises(ValueError, match="needs api_url"):
        gen("x", params={})


def test_values_in_f_strings_before_they_exist(fake: FakeServer) -> None:
    fake.answers["To: "] = "Rome" + END

    @function
    def program(s: Any) -> None:
        dest = gen("dest")
        mood = gen("mood", max_tokens=1)
        s += f"To: {dest}!"
        s += f" Again {dest} and {mood}." + f"{dest!s}"

    state = program.run()
    assert state.text() == f"To: Rome! Again Rome and {state['mood']}.Rome"
    assert len(fake.generations()) == 2


def test_a_value_needed_before_its_place_is_made_beside_the_text(fake: FakeServer) -> None:
    together = threading.Barrier(2, timeout=10)
    fake.delay = lambda prompt: together.wait() and None if prompt == "I go." else None
    seen: dict[str, str] = {}

    @function
    def program(s: Any) -> None:
        s += "I go."
        dest, date = gen("dest", max_tokens=2), gen("date", max_tokens=2, seed=3)
        s += gen(
            "weather", api_url=lambda **given: seen.update(given) or "fine", params={"to": dest, "on": f"[{date}]"}
        )
        s += f" {dest}" + gen("plan", max_tokens=1)

    state = program.run()
    assert seen == {"to": state["dest"], "on": f"[{state['date']}]"}
    assert state.text() == f"I go.fine {state['dest']}{state['plan']}"
    assert sorted(fake.prompts()[:2]) == ["I go.", "I go."]


def test_gens_are_bound_by_run(fake: FakeServer) -> None:
    @function
    def program(s: Any) -> None:
        s += "User: " + gen("user_input") + "\nBot:" + gen("bot", max_tokens=1)

    state = program.run(user_input="hi")
    assert fake.prompts() == ["User: hi\nBot:"]
    assert state["user_input"] == "hi"
    states = program.run_batch([{"user_input": "a"}, {"user_input": "b"}])
    assert [state["user_input"] for state in states] == ["a", "b"]


def test_values_cannot_be_used_like_texts() -> None:
    value = gen("x")
    for use in (lambda: bool(value), lambda: list(value), lambda: f"{value:>9}"):
        with pytest.raises(TypeError, match="has no value yet"):
            use()


def test_a_mark_from_elsewhere_means_nothing(fake: FakeServer) -> None:
    secret = gen("secret", api_url=lambda: "hidden")

    @function
    def program(s: Any, text: str) -> None:
        s += text + gen("a")
        s += f"{secret}"

    forged = f"\ue0000000000000000000:{secret.number}\ue001"
    state = program.run(text=forged)
    assert fake.prompts() == [forged]
    assert state.text().endswith("hidden")


def test_calls_run_while_the_model_writes(fake: FakeServer, api: Any) -> None:
    allow_api_hosts(api.host)
    fake.delay = lambda prompt: wait_until(lambda: len(api.asked) > ("second" in prompt))

    @function
    def program(s: Any) -> None:
        s += "first" + gen("a", max_tokens=1)
        s += "second" + gen("b") + gen("facts", api_url=f"http://{api.host}/one")
        s += gen("more", api_url=f"http://{api.host}/two", params={"a": s["a"]})

    @function
    def later(s: Any) -> None:
        a = gen("a", max_tokens=1)
        s += "first" + gen("plain", api_url=f"http://{api.host}/one") + f"{a}" + "second" + gen("b")
        s += gen("more", api_url=f"http://{api.host}/two", params={"a": a})

    for one in (program, later):
        assert one.run()["more"] == '{"sky": "sunny"}'
        assert [path for path, _, _ in api.asked] == ["/one", "/two"]
        api.asked.clear()


def test_functions_are_called_in_order(fake: FakeServer) -> None:
    called: list[str] = []

    @function
    def program(s: Any) -> None:
        s += "x" + gen("a", api_url=lambda: called.append("a") or "a")
        s += gen("b", api_url=lambda: called.append("b") or "b") + gen("c")

    program.run()
    assert called == ["a", "b"]


def test_text_is_computed_ahead_while_a_call_runs(fake: FakeServer) -> None:
    def slow(topic: str) -> str:
        wait_until(lambda: len(fake.prefills()) == 1)
        return topic

    @function
    def program(s: Any) -> None:
        topic = gen("topic", max_tokens=1)
        s += f"About {topic}. " + "And a long constant text that is worth computing ahead of time. " * 4
        s += gen("facts", api_url=slow, params={"topic": topic}) + gen("end")

    state = program.run()
    assert state["facts"] == state["topic"]
    assert len(fake.prefills()) == 1


def test_a_lost_mark_is_an_error(fake: FakeServer) -> None:
    from radixfleet.lang import marks

    text = f"{gen('x')}"
    marks._recent.clear()

    @function
    def program(s: Any) -> None:
        s += text

    with pytest.raises(LookupError, match="no longer exists"):
        program.run()


def test_unknown_values_of_a_trace_have_none_here(fake: FakeServer) -> None:
    from radixfleet.lang.ir import Known

    @function
    def program(s: Any) -> None:
        s += Known("x")

    with pytest.raises(LanguageError, match="has no value here"):
        program.run()


def test_one_time_out_covers_an_answer_that_drips(fake: FakeServer, api: Any) -> None:
    allow_api_hosts(api.host, timeout=0.4)
    for path in ("/drip-head", "/drip-body"):
        with pytest.raises(ApiCallError, match=r"did not answer within 0\.4 s"):
            weather(api.host, path).run(city="x")


def test_async_functions_as_calls(fake: FakeServer) -> None:
    async def look_up(city: str) -> dict[str, str]:
        return {"city": city}

    @function
    def program(s: Any) -> None:
        s += gen("found", api_url=look_up, params={"city": "Rome"})

    assert program.run()["found"] == '{"city": "Rome"}'


@pytest.mark.parametrize("limit", [{"api_timeout": 1.0}, {"api_max_bytes": 9}, {"api_headers": {"x": "y"}}])
def test_limits_of_http_calls_are_none_of_functions(limit: Any) -> None:
    with pytest.raises(ValueError, match="not for Python functions"):
        gen("w", api_url=str, **limit)


def test_addresses_and_headers_that_cannot_be_sent(fake: FakeServer, api: Any) -> None:
    allow_api_hosts(api.host)

    @function
    def program(s: Any, url: str) -> None:
        s += gen("w", api_url=url)

    with pytest.raises(ApiCallError, match=r"gen\('w'\): api_url is no address: 'http://\[::1'"):
        program.run(url="http://[::1")
    with pytest.raises(ApiCallError, match="failed"):
        weather(api.host, api_headers={"x-key": "€"}).run(city="x")
