"""A stand-in for a server: /generate, /tokenize and the rest over real HTTP, with a toy model.

Tokens are a blank with a word, a special token or one character, so texts tokenise differently apart and together.
The model answers what `answers` says for the end of the prompt, else words made from a hash of it.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, groupby
from typing import Any

from tests.radixfleet.fake_script import FakeScript, Refused

TOKEN = re.compile(r"<\|\w+\|>| ?\w+|\s|.", re.DOTALL)
LITERAL = re.compile(r" ?\w+|\s|.", re.DOTALL)
END = "<|im_end|>"
START = "<|im_start|>"


class FakeServer:
    """What it was asked (`requests`: path and body) and how it answers."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, str] = {}
        self.delay: Callable[[str], None] = lambda prompt: None
        self.logprob: Callable[[str, str], float] = _hashed_logprob
        self.refuse: dict[str, tuple[int, str]] = {}  # text of the prompt: status and words
        self.broken_stream = False
        self.deltas = False
        self.info_status = 200  # of /get_server_info
        self.scripts: bool | None = True  # None: a server that has never heard of them
        self.running = 0
        self.most_running = 0
        self.aborted: set[str] = set()
        self.lock = threading.Lock()
        self._ids: dict[str, int] = {}
        self._texts: list[str] = []
        self.url = ""

    def calls(self, path: str) -> list[dict[str, Any]]:
        with self.lock:
            return [body for asked, body in self.requests if asked == path]

    def generations(self) -> list[dict[str, Any]]:
        """Requests that generate something, or score."""
        return [body for body in self.calls("/generate") if not self.is_prefill(body)]

    def prefills(self) -> list[dict[str, Any]]:
        return [body for body in self.calls("/generate") if self.is_prefill(body)]

    @staticmethod
    def is_prefill(body: dict[str, Any]) -> bool:
        return body["sampling_params"].get("max_new_tokens") == 0 and not body.get("return_logprob")

    def encode(self, text: str, special: bool = True) -> list[int]:
        with self.lock:
            ids = []
            for token in (TOKEN if special else LITERAL).findall(text):
                key = token if special or not TOKEN.fullmatch(token) or "|" not in token else "literal" + token
                if key not in self._ids:
                    self._ids[key] = len(self._texts)
                    self._texts.append(token)
                ids.append(self._ids[key])
            return ids

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        text = "".join(self._texts[i] for i in ids)
        return re.sub(r"<\|\w+\|>", "", text) if skip_special else text

    def prompts(self) -> list[str]:
        """Texts of all prompts that something was generated from."""
        found = []
        for body in self.generations():
            for text in self.prompts_of(body):
                found.append(text)
        return found

    def prompts_of(self, body: dict[str, Any]) -> list[str]:
        if "prompt_parts" in body:
            return [self.decode(self.ids_of(body["prompt_parts"]), False)]
        if "text" in body:
            return [body["text"]] if isinstance(body["text"], str) else body["text"]
        lists = body["input_ids"] if isinstance(body["input_ids"][0], list) else [body["input_ids"]]
        return [self.decode(ids, False) for ids in lists]

    def ids_of(self, parts: list[dict[str, Any]]) -> list[int]:
        """Each run of texts as a whole, unless letters in it are to stay letters."""
        ids: list[int] = []
        for is_text, group in groupby(parts, lambda part: "text" in part):
            run = list(group)
            if not is_text:
                ids += [token for part in run for token in part["ids"]]
            elif any(part.get("literal") and re.search(r"<\|\w+\|>", part["text"]) for part in run):
                ids += [token for part in run for token in self.encode(part["text"], not part.get("literal"))]
            else:
                ids += self.encode("".join(part["text"] for part in run))
        return ids

    def generate(self, body: dict[str, Any]) -> Any:
        listed = isinstance(body.get("text"), list) or isinstance((body.get("input_ids") or [0])[0], list)
        if "prompt_parts" in body:
            body = {**body, "input_ids": self.ids_of(body["prompt_parts"])}
        prompts = body["text"] if "text" in body else body["input_ids"]
        prompts = prompts if listed else [prompts]
        ids = [self.encode(one) if isinstance(one, str) else one for one in prompts]
        n = body["sampling_params"].get("n") or 1
        answers = [self._answer(body, one, choice) for one in ids for choice in range(n)]
        return answers if listed or n > 1 else answers[0]

    def _answer(self, body: dict[str, Any], ids: list[int], choice: int) -> dict[str, Any]:
        params = body["sampling_params"]
        prompt = self.decode(ids, False)
        self.delay(prompt)
        written = self._write(prompt, params, choice)
        out, text, finish = self._cut(written, params)
        if body.get("rid") in self.aborted:
            finish = {"type": "abort", "message": "The request was aborted.", "status_code": None}
        meta: dict[str, Any] = {
            "id": body.get("rid"),
            "finish_reason": finish,
            "prompt_tokens": len(ids),
            "completion_tokens": len(out),
            "cached_tokens": 0,
        }
        if body.get("return_logprob"):
            meta["input_token_logprobs"] = self._rows(ids, max(body.get("logprob_start_len") or 0, 0))
            meta["output_token_logprobs"] = []
        answer = {"text": text, "output_ids": out, "meta_info": meta}
        if body.get("return_prompt_token_ids"):
            answer["prompt_token_ids"] = ids
        return answer

    def _write(self, prompt: str, params: dict[str, Any], choice: int) -> str:
        for end, text in self.answers.items():
            if prompt.endswith(end):
                return text
        seed = f"{prompt}{params.get('sampling_seed')}{choice}"
        digest = hashlib.sha256(seed.encode()).hexdigest()
        return " " + " ".join(digest[i : i + 4] for i in range(0, 24, 4)) + END

    def _cut(self, written: str, params: dict[str, Any]) -> tuple[list[int], str, dict[str, Any]]:
        stops = params.get("stop") or []
        limit = params.get("max_new_tokens", 128)
        out: list[int] = []
        for token in self.encode(written):
            if len(out) == limit:
                return out, self.decode(out), {"type": "length", "length": limit}
            out.append(token)
            text = self.decode(out)
            if self._texts[token] == END:
                return out, text, {"type": "stop", "matched": token}
            for stop in [stops] if isinstance(stops, str) else stops:
                if stop in text:
                    return out, text[: text.index(stop)], {"type": "stop", "matched": stop}
        return out, self.decode(out), {"type": "stop", "matched": None}

    def _rows(self, ids: list[int], start: int) -> list[list[Any]]:
        rows = []
        for at in range(start, len(ids)):
            before, token = self.decode(ids[:at], False), self._texts[ids[at]]
            rows.append([self.logprob(before, token) if at else None, ids[at], None])
        return rows


def _hashed_logprob(before: str, token: str) -> float:
    return -1.0 - hashlib.sha256(f"{before}|{token}".encode()).digest()[0] / 64


def chatml(body: dict[str, Any]) -> str:
    """The toy model's chat template, with a system message of its own."""
    messages = body["messages"]
    if messages and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": "You are a toy."}, *messages]
    text = "".join(f"{START}{m['role']}\n{m['content']}{END}\n" for m in messages)
    return text + (f"{START}assistant\n" if body.get("add_generation_prompt") else "")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""

    def do_GET(self) -> None:
        self._note({})
        if self.path == "/get_server_info":
            info = {"version": "toy", "max_total_num_tokens": 1000}
            scripts = self.server.fake.scripts
            self._json(info if scripts is None else {**info, "script": scripts}, self.server.fake.info_status)
        else:
            self._json({"model_path": "toy"})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        body = json.loads(raw) if raw else {}
        self._note(body)
        handler = {
            "/generate": self._generate,
            "/script": self._script,
            "/unpin": lambda asked: self._json({}),
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/apply_chat_template": lambda asked: self._json({"text": chatml(asked)}),
            "/abort_request": self._abort,
            "/flush_cache": lambda asked: self._json({"flushed": True}),
        }.get(self.path)
        if handler is None:
            self._json({"error": {"message": f"no such path: {self.path}"}}, 404)
        else:
            handler(body)

    def _note(self, body: dict[str, Any]) -> None:
        fake: FakeServer = self.server.fake
        if self.path == "/generate" and "prompt_parts" in body:
            body = {**body, "input_ids": fake.ids_of(body["prompt_parts"])}
        with fake.lock:
            fake.requests.append((self.path, body))

    def _generate(self, body: dict[str, Any]) -> None:
        fake: FakeServer = self.server.fake
        for text, (status, words) in fake.refuse.items():
            if any(text in prompt for prompt in fake.prompts_of(body)):
                self._json({"error": {"message": words, "type": "invalid_request_error"}}, status)
                return
        with fake.lock:
            fake.running += 1
            fake.most_running = max(fake.most_running, fake.running)
        try:
            answer = fake.generate(body)
        finally:
            with fake.lock:
                fake.running -= 1
        if body.get("stream"):
            self._stream(fake, answer)
        else:
            self._json(answer)

    def _stream(self, fake: FakeServer, answer: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        ids, meta = answer["output_ids"], answer["meta_info"]
        shown = ""
        for count in range(1, len(ids) + 1):
            last = count == len(ids)
            text = answer["text"] if last else fake.decode(ids[:count])[: len(answer["text"])]
            event = {
                "text": text[len(shown) :] if fake.deltas else text,
                "output_ids": ids[count - 1 : count] if fake.deltas else ids[:count],
                "meta_info": {
                    **meta,
                    "completion_tokens": count,
                    "finish_reason": meta["finish_reason"] if last else None,
                },
            }
            if "prompt_token_ids" in answer:
                event["prompt_token_ids"] = answer["prompt_token_ids"]
            shown = text
            if fake.broken_stream and count == 2:
                self.wfile.write(b'data: {"error": {"message": "the worker was lost"}}\n\n')
                return
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _script(self, body: dict[str, Any]) -> None:
        """Every step is noted as a /generate of its own, so that tests see what was generated."""
        events = FakeScript(self.server.fake, body, self._note_step).events()
        try:
            first = next(events)
        except Refused as refusal:
            self._json({"error": {"message": refusal.words, "type": "invalid_request_error"}}, refusal.status)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            for event in chain([first], events):
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        except Refused as refusal:
            error = {"message": refusal.words, "status": refusal.status}
            self.wfile.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def _note_step(self, body: dict[str, Any]) -> None:
        fake: FakeServer = self.server.fake
        with fake.lock:
            fake.requests.append(("/generate", body))

    def _tokenize(self, body: dict[str, Any]) -> None:
        fake: FakeServer = self.server.fake
        special = body.get("parse_special") is not False
        self._json({"tokens": [fake.encode(text, special) for text in body["prompt"]]})

    def _detokenize(self, body: dict[str, Any]) -> None:
        fake: FakeServer = self.server.fake
        self._json({"text": [fake.decode(ids) for ids in body["tokens"]]})

    def _abort(self, body: dict[str, Any]) -> None:
        self.server.fake.aborted.add(body["rid"])
        self._json({})

    def _json(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is part of some tests."""


@contextmanager
def fake_model_server() -> Iterator[FakeServer]:
    """A running server on a free port."""
    fake = FakeServer()
    server = _Server(("127.0.0.1", 0), _Handler)
    server.fake = fake  # type: ignore[attr-defined]
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Until something outside this thread has happened; fails if it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
