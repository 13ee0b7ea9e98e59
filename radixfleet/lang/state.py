"""ProgramState: what a program's function gets as `s`, and what run() returns.

Leaves evaluation to executor; here is how reading, appending and forking look to an author.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from radixfleet.lang.executor import Executor
from radixfleet.lang.fork import ForkGroup, check_size, warm_prefix
from radixfleet.lang.ir import Assign, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd


class ProgramState:
    """Append with `s += ...`, read with `s["name"]`. Reading waits, and raises what went wrong."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.ret_value: Any = None
        self.arguments: dict[str, Any] = {}

    def __iadd__(self, expression: Any) -> ProgramState:
        if expression is None:
            raise TypeError("None was appended to the state")
        self._executor.submit(expression)
        return self

    def __getitem__(self, name: str) -> Any:
        return self._executor.read(name).value

    def __setitem__(self, name: str, value: Any) -> None:
        self._executor.submit(Assign(name, value))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._executor.has(name)

    def __repr__(self) -> str:
        return f"ProgramState({self._executor.transcript.text()!r})"

    def get_var(self, name: str) -> Any:
        return self[name]

    def set_var(self, name: str, value: Any) -> None:
        self[name] = value

    async def get(self, name: str) -> Any:
        """`s[name]` for an event loop, which is not blocked meanwhile."""
        return (await self._executor.read_async(name)).value

    def get_meta_info(self, name: str) -> dict[str, Any]:
        """What the server told about a generation: token counts, why it ended, log-probabilities."""
        return dict(self._executor.read(name).meta)

    def text(self) -> str:
        """Everything said so far, the chat template's words included. Waits for what was appended."""
        self._executor.settle()
        return self._executor.transcript.text()

    def messages(self) -> list[dict[str, str]]:
        """The turns of the conversation so far. Waits for what was appended."""
        self._executor.settle()
        return self._executor.transcript.messages()

    def sync(self) -> None:
        """Wait for everything appended so far. Raises what went wrong."""
        self._executor.settle()

    def error(self) -> BaseException | None:
        """The state's error, once everything appended was evaluated; None if all is well."""
        self._executor.look()
        self._executor.error_seen = True
        return self._executor.error

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """All text appended inside becomes the variable."""
        self._executor.submit(ScopeBegin(name))
        try:
            yield
        finally:  # a program that catches what was raised inside goes on outside
            self._executor.submit(ScopeEnd(name))

    @contextmanager
    def _turn(self, role: str) -> Iterator[None]:
        self._executor.submit(RoleBegin(role))
        try:
            yield
        finally:  # a program that catches what was raised inside goes on outside
            self._executor.submit(RoleEnd(role))

    def system(self) -> Any:
        """`with s.system(): ...`: what is appended inside is the system message."""
        return self._turn("system")

    def user(self) -> Any:
        return self._turn("user")

    def assistant(self) -> Any:
        return self._turn("assistant")

    def fork(self, size: int = 1, position_ids_offset: Any = None) -> ForkGroup:
        """`size` states that go on from here on their own, and at the same time. The offset has no effect."""
        check_size(size)
        self._executor.settle()
        if size > 1:
            warm_prefix(self._executor)
        return ForkGroup([self._child() for _ in range(size)], self._executor)

    @contextmanager
    def copy(self) -> Iterator[ProgramState]:
        """A single fork."""
        yield self._child()

    def _child(self) -> ProgramState:
        child = ProgramState(self._executor.fork())
        child.arguments = self.arguments
        return child

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Text as it appears, of everything or of one variable. Raises what goes wrong on the way."""
        executor = self._executor
        executor.ask_as_author()
        for chunk in executor.log.follow(executor.ended(var_name)):
            if chunk.text and var_name in (None, chunk.name):
                yield chunk.text

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """The same in an event loop; with `return_meta_data` pairs of text and what the server told so far."""
        executor = self._executor
        executor.ask_as_author()
        async for chunk in executor.log.follow_async(executor.ended(var_name)):
            if var_name not in (None, chunk.name):
                continue
            if return_meta_data:
                yield chunk.text, chunk.meta
            elif chunk.text:
                yield chunk.text

    def over(self, action: Callable[[Executor], Any]) -> Any:
        """For those who run programs: act on what evaluates this state."""
        return action(self._executor)
