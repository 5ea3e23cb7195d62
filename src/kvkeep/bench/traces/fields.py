"""Values out of lines that others wrote: each is what it should be, or the line is a bad one."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.bench.traces.chain import chain_ids, fresh_ids
from kvkeep.bench.traces.files import BadLine
from kvkeep.bench.traces.request import MAX_TOKENS, units_of

if TYPE_CHECKING:
    from typing import NoReturn

    from kvkeep.bench.traces.request import UnitArray

__all__ = ["Fresh", "count", "json_object", "number", "optional_text", "shown", "unit_ids"]

_SHOWN = 60  # characters of a value in a reason
_MOST_TEXT = 512  # characters of a session, a namespace, a kind


def _refuse_constant(name: str) -> NoReturn:
    raise BadLine(f"{name} is no JSON")


_decode = json.JSONDecoder(parse_constant=_refuse_constant).raw_decode


def json_object(line: bytes) -> dict[str, Any]:
    """The object of a line; `BadLine` for anything else."""
    try:
        text = line.decode().strip()
        value, end = _decode(text)
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise BadLine("nested too deeply") from error
    except ValueError as error:
        raise BadLine(f"not JSON: {error}") from error
    if end != len(text):
        raise BadLine(f"not JSON: more follows at character {end}")
    if type(value) is not dict:
        raise BadLine(f"an object is needed, got {shown(value)}")
    return value


def shown(value: object) -> str:
    """A value for a reason; one that is long, in short."""
    try:
        text = repr(value[:_SHOWN] if isinstance(value, str | list) else value)
    except (RecursionError, ValueError):  # digits beyond Python's limit
        text = type(value).__name__
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def count(found: dict[str, Any], key: str, low: int = 0, high: int = MAX_TOKENS) -> int:
    """A whole number in ``low`` … ``high``; 5.0 is one, as some writers have it."""
    value = found.get(key)
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not low <= value <= high:
        if key not in found:
            raise BadLine(f"{key} is missing")
        raise BadLine(f"{key} is {shown(value)}; a whole number in {low} … {high} is needed")
    return value


def number(found: dict[str, Any], key: str) -> float:
    """A finite number."""
    value = found.get(key)
    if type(value) not in (int, float):
        if key not in found:
            raise BadLine(f"{key} is missing")
        raise BadLine(f"{key} is {shown(value)}; a number is needed")
    try:
        finite = float(value)  # type: ignore[arg-type]
    except OverflowError:
        finite = math.inf
    if not math.isfinite(finite):
        raise BadLine(f"{key} is {shown(value)}; a finite number is needed")
    return finite


def optional_text(found: dict[str, Any], key: str) -> str | None:
    """Text, or a whole number as text; None where there is none."""
    value = found.get(key)
    if value is None:
        return None
    if type(value) not in (int, str):
        raise BadLine(f"{key} is {shown(value)}; text or a whole number is needed")
    try:
        text = str(value)
    except ValueError as error:  # digits beyond Python's limit
        raise BadLine(f"{key} is too long a number") from error
    if len(text) > _MOST_TEXT:
        raise BadLine(f"{key} has at most {_MOST_TEXT} characters, got {len(text)}")
    return text


def unit_ids(
    found: dict[str, Any], key: str, tokens: int, unit_tokens: int, *, chained: bool, fresh: Fresh
) -> UnitArray:
    """The ids of a prompt's units, chained.

    There is one for each unit; where the last that is not full has none, it gets one of its own.
    ``chained`` says that they are already, and that none may occur twice, therefore.
    """
    ids = _whole_numbers(found, key)
    wanted = units_of(tokens, unit_tokens)
    if len(ids) != wanted and len(ids) != tokens // unit_tokens:
        raise BadLine(
            f"{key} has {len(ids)} ids; {tokens} tokens are {wanted} units of {unit_tokens}"
        )
    if not chained:
        ids = chain_ids(ids)
    elif len(set(found[key])) != len(ids):
        raise BadLine(f"{key} has an id twice: it stands for one unit's tokens alone, not chained")
    if len(ids) < wanted:
        ids = np.concatenate((ids, fresh.ids(1)))
    return ids


def _whole_numbers(found: dict[str, Any], key: str) -> UnitArray:
    values = found.get(key)
    if type(values) is not list:
        if key not in found:
            raise BadLine(f"{key} is missing")
        raise BadLine(f"{key} is {shown(values)}; a list of ids is needed")
    if not values:
        return np.empty(0, np.int64)
    try:
        ids = np.array(values)
    except (ValueError, OverflowError) as error:
        raise BadLine(f"{key} is not a list of ids: {shown(values)}") from error
    if ids.dtype != np.int64 or ids.ndim != 1 or min(values) < 0:
        raise BadLine(f"{key} has ids in 0 … 2⁶³-1 alone, got {shown(values)}")
    return ids


class Fresh:
    """Ids that no other prompt has, for what a trace does not tell; the same in each pass."""

    def __init__(self) -> None:
        self._made = 0

    def ids(self, count: int) -> UnitArray:
        """``count`` of them."""
        self._made += 1
        return fresh_ids(self._made, count)
