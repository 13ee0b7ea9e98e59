"""The one validation layer: bodies, numbers, ids, names. Everything it refuses names the field.

Leaves lengths of prompts to limits and turning wishes into SamplingParams to sampling.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from services.tokenizer import fields
from services.tokenizer.errors import ApiError, invalid

T = TypeVar("T")
N = TypeVar("N", int, float)

NEUTRAL = (b"null", b"false", b'""', b"[]", b"{}")
SWITCHES = {"web_search_options"}  # an empty object asks for it, too
_AT_PATH = re.compile(r" - at `\$\.?(.*)`$")
_RAW_FIELDS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
MAX_RID_CHARS = 256
MAX_KEY_CHARS = 4096


def decode(body: bytes, kind: type[T], refused: Mapping[str, str]) -> tuple[T, list[str]]:
    """The body as `kind`, and the names nobody here knows. Raises ApiError."""
    try:
        raw = _RAW_FIELDS.decode(body)
        refuse_fields({name: _meant(name, bytes(value).strip()) for name, value in raw.items()}, refused)
        value = msgspec.json.decode(body, type=kind)
        unknown = fields.unknown(raw, kind, refused)  # looks into what the decoder skipped
    except msgspec.ValidationError as error:
        raise bad_shape(error) from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"The body is not valid JSON: {error}", code="invalid_json") from None
    return value, unknown


def convert(value: dict[str, Any], kind: type[T], refused: Mapping[str, str], path: str) -> tuple[T, list[str]]:
    """A nested object as `kind`, as `decode` does it for the body."""
    refuse_fields({name: bool(item) for name, item in value.items()}, refused, path)
    try:
        known = known_fields(kind)
        return msgspec.convert(value, kind), [f"{path}{name}" for name in sorted(value.keys() - known - refused.keys())]
    except msgspec.ValidationError as error:
        raise bad_shape(error, path) from None


def known_fields(kind: type[Any]) -> set[str]:
    return set(kind.__struct_encode_fields__)


def refuse_fields(given: Mapping[str, bool], refused: Mapping[str, str], path: str = "") -> None:
    """400 for a known field that cannot be honoured; neutral values (null, false, empty) are fine."""
    for name, meant in given.items():
        if meant and name in refused:
            raise invalid(
                f"{path}{name} cannot be honoured: {refused[name]}.", f"{path}{name}", "unsupported_parameter"
            )


def _meant(name: str, value: bytes) -> bool:
    if name == "modalities" and b"".join(value.split()) == b'["text"]':
        return False
    return value not in NEUTRAL or (name in SWITCHES and value == b"{}")


def bad_shape(error: msgspec.ValidationError, path: str = "") -> ApiError:
    """msgspec's complaint, with the path it found as the parameter."""
    text = str(error)
    match = _AT_PATH.search(text)
    if match is not None:
        param = path + match[1]
        return invalid(f"{param}: {text[: match.start()]}.", param.partition("[")[0] or None, "invalid_type")
    missing = re.search(r"missing required field `(\w+)`", text)
    if missing is not None:
        return invalid(f"{path}{missing[1]} is required.", path + missing[1], "missing_required_parameter")
    return invalid(f"{text}.", path.rstrip(".") or None, "invalid_type")


def in_range(name: str, value: N | None, low: float, high: float, *, above: bool = False) -> N | None:
    """`value` if low <= value <= high (`above`: low < value). Raises ApiError naming the field."""
    if value is None:
        return None
    if value != value or value > high or value < low or (above and value == low):
        bounds = f"greater than {_bound(low)}" if above else f"at least {_bound(low)}"
        upper = f" and at most {_bound(high)}" if high < math.inf else ""
        raise invalid(f"{name} must be {bounds}{upper}, not {_shown(value)}.", name, "out_of_range")
    return value


def token_ids(name: str, values: Iterable[int], vocab_size: int, most: int | None = None) -> tuple[int, ...]:
    """Ids that the model has. Raises ApiError: everything that could reach a worker is bounded on both sides."""
    ids = tuple(values)
    if most is not None and len(ids) > most:
        raise invalid(f"{name} holds {len(ids)} ids; at most {most} are allowed.", name, "out_of_range")
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise invalid(
            f"{name} holds {_shown(bad)}; ids of this model go from 0 to {vocab_size - 1}.", name, "out_of_range"
        )
    return ids


def strings(name: str, value: str | Sequence[str] | None, most: int, most_chars: int) -> tuple[str, ...]:
    """One string or a list of them, none empty."""
    if value is None:
        return ()
    texts = (value,) if isinstance(value, str) else tuple(value)
    if len(texts) > most:
        raise invalid(f"{name} holds {len(texts)} entries; at most {most} are allowed.", name, "out_of_range")
    for text in texts:
        if not text:
            raise invalid(f"{name} must not hold an empty string.", name, "invalid_value")
        if len(text) > most_chars:
            raise invalid(
                f"{name} holds an entry of {len(text)} characters; at most {most_chars}.", name, "out_of_range"
            )
    return texts


def request_id(rid: str, name: str = "rid") -> str:
    """A caller's id: short and visible."""
    if not rid or len(rid) > MAX_RID_CHARS or not rid.isprintable():
        raise invalid(f"{name} must be 1 to {MAX_RID_CHARS} printable characters.", name, "invalid_value")
    return rid


def per_item(name: str, value: T | list[T] | None, count: int, default: T) -> list[T]:
    """One value for all items of a batch, or a list with one for each."""
    if isinstance(value, list):
        if len(value) != count:
            raise invalid(f"{name} has {len(value)} entries for a batch of {count}.", name, "invalid_value")
        return [default if item is None else item for item in value]
    return [default if value is None else value] * count


def _bound(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _shown(value: float) -> str:
    text = str(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a number beyond 64 bits"
    return text[:40]


def bounded_key(name: str, value: str | None) -> str:
    """A cache key of bounded length."""
    value = value or ""
    if len(value) > MAX_KEY_CHARS:
        raise invalid(f"{name} has {len(value)} characters; at most {MAX_KEY_CHARS} are allowed.", name, "out_of_range")
    return value
