"""Values of a traced program that only a run will know: they can be appended, mentioned and passed on, no more."""

from __future__ import annotations

from typing import Any, NoReturn

from radixfleet.lang.ir import Known


class TraceStopped(BaseException):
    """Not an Exception, so that no program takes it for one of its own."""


class Symbol(Known):
    """A value that only a run will know."""

    def _stop(self, *_: Any) -> NoReturn:
        raise TraceStopped(f"it looks at the {self.origin} {self.name!r}")

    __bool__ = __iter__ = __len__ = __int__ = __float__ = __index__ = __contains__ = _stop
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __ne__ = __getitem__ = __mul__ = __mod__ = _stop
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._stop()
