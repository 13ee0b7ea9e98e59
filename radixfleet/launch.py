"""`radixfleet serve`: socket, model, processes, ready line, end. Leaves each of them to its module.

listen -> resolve the model -> start children -> ready -> warm-up -> "fired up" -> ... -> signal -> drain in order
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

from radixfleet.app import MODULES, command, on_path, package_parent
from radixfleet.errors import CommandError
from radixfleet.listen import listen, url_of
from radixfleet.options import ServeOptions
from radixfleet.plan import Front, child_specs, tokenizer_names
from radixfleet.run_folder import RunFolderError, run_folder
from radixfleet.stop_signals import StopSignals
from radixfleet.supervise import PARENT_FD, ChildFailed, Supervisor

READY_LINE = "The server is fired up and ready to roll!"
DRAIN_MARGIN_S = 10.0  # beyond the drain time the services themselves keep
RAY_STAGE_S = 60.0  # tasks of other machines are cancelled first
STAGE_S = 10.0  # for services whose requests have all ended


def serve(options: ServeOptions, modules: Mapping[str, str] = MODULES) -> int:
    """Run until a signal; returns the exit code."""
    try:
        with listen(options.host, options.port, options.http_workers) as listeners:
            return asyncio.run(_Launch(options, listeners, modules).run())
    except (CommandError, ChildFailed, RunFolderError) as error:
        if str(error):
            say(f"error: {error}")
        return 1


def say(line: str) -> None:
    sys.stderr.write(f"radixfleet: {line}\n")
    sys.stderr.flush()


class _Stopped(Exception):
    """A signal came before there was anything to drain."""


class _Launch:
    """One run of the command."""

    def __init__(self, options: ServeOptions, listeners: Sequence[socket.socket], modules: Mapping[str, str]) -> None:
        self._options = options
        self._listeners = listeners
        self._certificate = options.variable("ssl_certfile")
        self._url = url_of(listeners, secure=bool(self._certificate))
        self._key = secrets.token_urlsafe(32)  # of the warm-up request, whatever keys there are
        self._modules = modules
        self._resolver: asyncio.subprocess.Process | None = None
        self._supervisor: Supervisor | None = None

    async def run(self) -> int:
        self._signals = StopSignals(self._insist)
        try:
            _check_files(self._options)
            model = await self._model_folder()
            if not self._options.variable("tokenizer_path") and not (model / "tokenizer.json").is_file():
                raise CommandError(f"{model} has no tokenizer.json; name a folder that has one with --tokenizer-path")
            with run_folder(self._options.run_dir) as folder:
                await self._live(model, folder)
        except _Stopped:
            pass
        if self._signals.insisted is not None:
            return 128 + self._signals.insisted
        return 0

    async def _live(self, model: Path, folder: Path) -> None:
        listeners = self._listeners
        front = Front([listener.fileno() for listener in listeners], listeners[0].getsockname()[:2], self._key)
        specs = child_specs(self._options, model, folder, front, self._modules)
        say("starting " + ", ".join(spec.name for spec in specs))
        self._supervisor = supervisor = Supervisor(specs, say, self._options.frozen_timeout)
        try:
            supervisor.start()
            await self._first(supervisor.ready())
            if not self._options.skip_server_warmup:
                from radixfleet.warmup import warm_up  # its HTTP client is imported while the services load

                await self._first(warm_up(self._url, self._key, self._certificate))
            supervisor.settled()
            self._announce()
            await self._first()
        except _Stopped:
            say("stopping; once more to stop at once")
            for listener in listeners:
                listener.close()
            await self._stop_in_order(supervisor)
        finally:
            await supervisor.close()

    async def _first(self, wanted: Awaitable[None] | None = None) -> None:
        """Wait for `wanted`. Raises _Stopped on a signal, ChildFailed when the services cannot go on."""
        assert self._supervisor is not None
        stop = asyncio.ensure_future(self._signals.stop.wait())
        task = None if wanted is None else asyncio.ensure_future(wanted)
        waiting: list[asyncio.Future[Any]] = [stop, self._supervisor.failed]
        if task is not None:
            waiting.append(task)
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                raise _Stopped
            if self._supervisor.failed.done():
                self._supervisor.failed.result()
            assert task is not None
            task.result()
        finally:
            stop.cancel()
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def _stop_in_order(self, supervisor: Supervisor) -> None:
        """The door first: its answers need everybody else until they have ended. The scheduler last: all ask it."""
        drain = float(self._options.variable("drain_timeout", "30")) + DRAIN_MARGIN_S
        workers = [name for name in supervisor.children if name.startswith("worker")]
        stages: Sequence[tuple[Sequence[str], float]] = (
            (tokenizer_names(len(self._listeners)), drain),
            ([*workers, "detokenizer"], RAY_STAGE_S if self._options.launcher == "ray" else STAGE_S),
            (["scheduler"], STAGE_S),
        )
        await supervisor.stop(stages)

    def _insist(self) -> None:
        say("stopping at once")
        if self._resolver is not None and self._resolver.returncode is None:
            os.killpg(self._resolver.pid, signal.SIGKILL)
        if self._supervisor is not None:
            self._supervisor.kill_all()

    def _announce(self) -> None:
        url = self._url
        body = {"model": "default", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        sys.stdout.write(
            f"{READY_LINE}\n    {url}\nTry:\n"
            f"    curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' {self._credentials()}\\\n"
            f"      -d '{json.dumps({**body, 'temperature': 0, 'stream': True})}'\n"
        )
        sys.stdout.flush()

    def _credentials(self) -> str:
        has_keys = self._options.variable("api_key") or self._options.variable("api_key_file")
        return "-H 'Authorization: Bearer KEY' " if has_keys else ""

    async def _model_folder(self) -> Path:
        """Resolved in a process of its own: conversion takes memory and must be interruptible at any time.

        Raises CommandError.
        """
        options = self._options
        arguments = command("radixfleet.models")
        if options.revision:
            arguments += ["--revision", options.revision]
        if options.model_path:
            arguments += ["--", options.model_path]
        read, write = os.pipe()  # its end of file tells the resolver that we are gone
        try:
            self._resolver = resolver = await asyncio.create_subprocess_exec(
                *arguments,
                stdout=asyncio.subprocess.PIPE,
                process_group=0,
                pass_fds=(read,),
                env={**on_path(os.environ, package_parent()), PARENT_FD: str(read)},
            )
            output = asyncio.ensure_future(resolver.communicate())
            stop = asyncio.ensure_future(self._signals.stop.wait())
            await asyncio.wait([output, stop], return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if not output.done():
                os.killpg(resolver.pid, signal.SIGINT)
            text, _ = await output
        finally:
            os.close(read)
            os.close(write)
        if self._signals.stop.is_set():
            raise _Stopped
        if resolver.returncode != 0:
            raise CommandError("")  # the resolver has said why
        return Path(text.decode().strip())


def _check_files(options: ServeOptions) -> None:
    """What the services would find missing only after the heavy work. Raises CommandError."""
    tokenizer = options.variable("tokenizer_path")
    if tokenizer and not Path(tokenizer).is_file() and not (Path(tokenizer) / "tokenizer.json").is_file():
        raise CommandError(f"--tokenizer-path {tokenizer}: no tokenizer.json there")
    for name in ("chat_template", "api_key_file", "ssl_certfile", "ssl_keyfile"):
        path = options.variable(name)
        if path and not Path(path).is_file():
            raise CommandError(f"--{name.replace('_', '-')} {path}: no such file")
