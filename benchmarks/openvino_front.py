"""A small OpenAI front before OpenVINO GenAI's continuous batching, so that peers.py can ask it as it asks the others.

Runs in that peer's own environment: openvino-genai, aiohttp, tokenizers and jinja2, nothing of RadixFleet's. One thread
steps the pipeline; answers are streamed a token at a time. Leaves fields that the load client never sends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import openvino
import openvino_genai as genai
from aiohttp import web
from tokenizers import Tokenizer

PRECISION = "bf16"
Json = dict[str, Any]


@dataclass
class Request:
    """One prompt on its way through the pipeline; `tokens` gets lists of ids, then None."""

    ids: list[int]
    config: Any
    tokens: asyncio.Queue[list[int] | None] = field(default_factory=asyncio.Queue)
    handle: Any = None


class Engine:
    """The pipeline and the thread that steps it."""

    def __init__(self, model: Path, cache_gib: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = cache_gib
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = 64
        self._pipeline = genai.ContinuousBatchingPipeline(
            str(model), scheduler, "CPU", {"INFERENCE_PRECISION_HINT": PRECISION}
        )
        self._waiting: queue.Queue[Request] = queue.Queue()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request: Request) -> None:
        self._waiting.put(request)

    def _run(self) -> None:
        running: list[Request] = []
        number = 0
        while True:
            while not running or not self._waiting.empty():
                request = self._waiting.get()
                ids = openvino.Tensor(np.array([request.ids], dtype=np.int64))
                request.handle = self._pipeline.add_request(number, ids, request.config)
                running.append(request)
                number += 1
            self._pipeline.step()
            running = [request for request in running if not self._deliver(request)]

    def _deliver(self, request: Request) -> bool:
        """Hands on what is new; whether that was the end."""
        while request.handle.can_read():
            for output in request.handle.read().values():
                self._loop.call_soon_threadsafe(request.tokens.put_nowait, list(output.generated_ids))
        if request.handle.get_status() == genai.GenerationStatus.RUNNING:
            return False
        self._loop.call_soon_threadsafe(request.tokens.put_nowait, None)
        return True


class Front:
    """The two routes of the OpenAI API."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "tokenizer_config.json").read_text())
        self._eos = json.loads((folder / "config.json").read_text())["eos_token_id"]
        self._template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(config["chat_template"])

    async def complete(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        return await self._answer(http, body, body["prompt"], lambda text: {"text": text})

    async def chat(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        prompt = self._template.render(messages=body["messages"], add_generation_prompt=True)
        return await self._answer(http, body, prompt, lambda text: {"delta": {"content": text}})

    async def _answer(self, http: web.Request, body: Json, prompt: str, choice: Any) -> web.StreamResponse:
        request = Request(self._tokenizer.encode(prompt, add_special_tokens=False).ids, self._config(body))
        self._engine.submit(request)
        ids: list[int] = []
        if not body.get("stream"):
            text = "".join([piece async for piece in self._pieces(request, ids)])
            choices = [{"index": 0, "text": text, "message": {"role": "assistant", "content": text}}]
            return web.json_response({"choices": choices, "usage": self._usage(request, ids)})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        async for piece in self._pieces(request, ids):
            await self._send(response, {"created": int(time.time()), "choices": [{"index": 0, **choice(piece)}]})
        await self._send(response, {"choices": [], "usage": self._usage(request, ids)})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _pieces(self, request: Request, ids: list[int]) -> AsyncIterator[str]:
        """Text as it becomes complete; fills `ids`."""
        told = ""
        while (new := await request.tokens.get()) is not None:
            ids += new
            text = self._tokenizer.decode([i for i in ids if i != self._eos])
            if len(text) > len(told) and not text.endswith("\ufffd"):
                yield text[len(told) :]
                told = text

    async def _send(self, response: web.StreamResponse, event: Json) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _usage(self, request: Request, ids: list[int]) -> Json:
        return {"prompt_tokens": len(request.ids), "completion_tokens": len(ids)}

    def _config(self, body: Json) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = body.get("max_tokens", 16)
        config.do_sample = False
        config.ignore_eos = bool(body.get("ignore_eos"))
        config.set_eos_token_id(self._eos)
        if "response_format" in body:
            schema = json.dumps(body["response_format"]["json_schema"]["schema"])
            config.structured_output_config = genai.StructuredOutputConfig(json_schema=schema)
        return config


async def serve(options: argparse.Namespace) -> None:
    front = Front(Engine(options.model, options.cache_gib), options.template)
    app = web.Application(client_max_size=16 << 20)
    app.add_routes([web.post("/v1/completions", front.complete), web.post("/v1/chat/completions", front.chat)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", options.port).start()
    print(f"inference precision: {PRECISION}; listening on {options.port}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--template", type=Path, required=True, help="folder with tokenizer and chat template")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cache-gib", type=int, default=4)
    asyncio.run(serve(parser.parse_args()))
