"""Marks in texts that stand for expressions: how f"{dest}" can mention a value that does not exist yet.

A mark holds a random number of this process, so text from elsewhere never passes for one. An expression is kept
alive by whoever wrote it; the mark alone does not.
"""

from __future__ import annotations

import re
import secrets
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixfleet.lang.ir import Expr

_KEY = secrets.token_hex(8)
_PATTERN = re.compile(f"\ue000{_KEY}:([0-9]+)\ue001")
_CHANGED = (
    "a text that mentions a gen() was changed, as by upper() or json.dumps(); its value does not exist yet: "
    "append the gen() and read it from the state instead"
)
_RECENT = 4096  # marks of expressions written inside the f-string itself, which nothing else holds

_known: weakref.WeakValueDictionary[int, Expr] = weakref.WeakValueDictionary()
_recent: deque[Expr] = deque(maxlen=_RECENT)
_lock = threading.Lock()


def mark(expression: Expr) -> str:
    """The text that stands for the expression in this process."""
    with _lock:
        _known[expression.number] = expression
        _recent.append(expression)
    return f"\ue000{_KEY}:{expression.number}\ue001"


def split(text: str) -> list[Any]:
    """Texts between marks, and the marked expressions. Raises ValueError for a mark that was changed."""
    if _KEY not in text.lower():
        return [text] if text else []
    items: list[Any] = []
    at = 0
    for match in _PATTERN.finditer(text):
        items += [text[at : match.start()], _expression(int(match[1]))]
        at = match.end()
    items.append(text[at:])
    if any(isinstance(item, str) and _KEY in item.lower() for item in items):
        raise ValueError(_CHANGED)
    return [item for item in items if not isinstance(item, str) or item]


def _expression(number: int) -> Expr:
    with _lock:
        found = _known.get(number)
    if found is None:
        raise LookupError("a text mentions a gen() that no longer exists; keep the gen() in a variable")
    return found
