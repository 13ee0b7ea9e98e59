"""One execution of a program: its function runs here, its expressions wherever executor takes them.

Whatever goes wrong is raised by run() or, in a stream, by the reading side; then nothing is left running.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import warnings
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from radixfleet.backend.base import Backend
from radixfleet.backend.sampling import Sampling
from radixfleet.lang.executor import Executor
from radixfleet.lang.optimizations import Optimizations
from radixfleet.lang.run import Run
from radixfleet.lang.shared_work import SharedWork
from radixfleet.lang.state import ProgramState
from radixfleet.lang.values import filled

if TYPE_CHECKING:
    from radixfleet.lang.program import Program


@dataclass(frozen=True)
class Settings:
    """How programs are run, whatever their arguments."""

    backend: Backend
    sampling: Sampling
    stream: bool = False
    inline: bool = False
    options: Optimizations = field(default_factory=Optimizations)


class Execution:
    """One run with its arguments bound. Raises TypeError for arguments that do not fit the function."""

    def __init__(
        self,
        program: Program,
        settings: Settings,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        shared: SharedWork | None = None,
    ) -> None:
        self._program = program
        own, bindings = split_arguments(program, args, kwargs)
        self._run = Run(
            backend=settings.backend,
            sampling=settings.sampling,
            stream=settings.stream,
            inline=settings.inline or not settings.options.concurrent,
            options=settings.options,
            bindings=bindings,
            guess_tokens=program.num_api_spec_tokens,
            shared=shared or SharedWork(),
        )
        self._executor = Executor(self._run)
        self.state = ProgramState(self._executor)
        self.state.arguments = own

    def run(self) -> ProgramState:
        """To the end. Raises what went wrong."""
        try:
            self._call()
        except BaseException as error:
            self._end(error)
            raise
        failure = self._end(None)
        if failure is not None:
            raise failure
        return self.state

    def run_kept(self) -> BaseException | None:
        """To the end; what went wrong is returned, and raised by whoever reads the state."""
        try:
            self._call()
        except Exception as error:
            return self._end(error)
        except BaseException as error:
            self._end(error)
            raise
        return self._end(None)

    def start(self) -> ProgramState:
        """In the background."""
        started = threading.Event()

        def body() -> None:
            self._run.author = threading.get_ident()
            started.set()
            self.run_kept()

        threading.Thread(target=body, name="radixfleet-author", daemon=True).start()
        started.wait()
        return self.state

    def cancel(self, *, wait: bool = True) -> None:
        self._run.cancel(wait=wait)

    def _call(self) -> None:
        self._run.author = threading.get_ident()
        result = self._program.function(self.state, **self.state.arguments)
        if inspect.iscoroutine(result):
            result = _finish(result, self._run)
        self.state.ret_value = result
        self._run.wait()
        if self._executor.error is None:
            self.state.ret_value = filled(self._executor, result)

    def _end(self, error: BaseException | None) -> BaseException | None:
        """Leave nothing running, and the first error where every read meets it."""
        if error is not None:
            self._executor.fail(error)  # before the requests that are ended for it tell of that
            self._run.cancel()
        else:
            error = self._run.unseen_error()
            if error is not None:
                self._executor.fail(error)
            else:
                self._warn_of_unused()
        with self._run.changed:
            self._run.author = None
        self._executor.log.wake()
        return error

    def _warn_of_unused(self) -> None:
        unused = sorted(set(self._run.bindings) - self._run.used_bindings)
        if unused:
            name = self._program.function.__name__
            warnings.warn(f"{name} has no parameter and ran no gen() named {', '.join(unused)}", stacklevel=2)


def split_arguments(
    program: Program, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the function, all by name, and values for gen()s. Raises TypeError as Python would."""
    given = {**program.bound, **kwargs}
    signature = inspect.signature(program.function)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    bindings = {} if takes_any else {name: value for name, value in given.items() if name not in program.arg_names}
    own = {name: value for name, value in given.items() if name not in bindings}
    bound = signature.bind(None, *args, **own)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    del arguments["s"]
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(parameter.name, {}))
        elif parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise TypeError(f"{program.function.__name__}: programs take their arguments by name")
    return arguments, bindings


def run(program: Program, settings: Settings, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ProgramState:
    """Run to the end, or start, where the settings say stream."""
    execution = Execution(program, settings, args, kwargs)
    return execution.start() if settings.stream else execution.run()


async def run_async(
    program: Program, settings: Settings, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ProgramState:
    """Run to the end on a thread of its own. Cancelling cancels the program."""
    execution = Execution(program, settings, args, kwargs)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def body() -> None:
        error: BaseException | None
        try:
            error = execution.run_kept()
        except BaseException as failure:
            error = failure
        if not loop.is_closed():
            loop.call_soon_threadsafe(_settle, done, error)

    thread = threading.Thread(target=body, name="radixfleet-author", daemon=True)
    thread.start()
    try:
        await done
    except asyncio.CancelledError:
        await asyncio.shield(loop.run_in_executor(None, execution.cancel))
        raise
    thread.join()  # it has nothing left to do
    return execution.state


def _settle(done: asyncio.Future[None], error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _finish(coroutine: Coroutine[Any, Any, Any], run: Run) -> Any:
    """The result of an async program, on a loop of its own: the caller's may be running on this very thread."""
    result: list[Any] = []
    failure: list[BaseException] = []

    def body() -> None:
        run.author = threading.get_ident()
        try:
            result.append(asyncio.run(coroutine))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body, name="radixfleet-async", daemon=True)
    thread.start()
    thread.join()
    run.author = threading.get_ident()
    if failure:
        raise failure[0]
    return result[0]
