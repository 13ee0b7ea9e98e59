"""Signals of `serve`: the first one asks to stop, the second one insists. Leaves the stopping to the launcher."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """`stop` is set by the first signal; `insist` is called by every later one."""

    def __init__(self, insist: Callable[[], None]) -> None:
        self.stop = asyncio.Event()
        self.insisted: int | None = None
        self._insist = insist
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup and shells in the background say so
                loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self.stop.is_set():
            self.insisted = number
            self._insist()
        self.stop.set()
