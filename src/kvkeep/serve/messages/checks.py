"""Checks of JSON values; each raises `InvalidValue` with the place of a wrong value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvkeep.core.errors import InvalidValue, told

__all__ = [
    "Refused", "blocks_at", "first_refused", "flag_at", "kind_of_block", "list_at", "number_at",
    "object_at", "text_at", "whole_at",
]  # fmt: skip

_ONLY_TEXT = "models here read and write text only"
_INT32 = 2**31 - 1

Refused = Mapping[str, tuple[Any, ...]]
"""Fields that are understood and cannot be honoured: why, and then the values that ask for nothing.

Null asks for nothing in every field.
"""


def first_refused(fields: Mapping[str, Any], refused: Refused) -> tuple[str, str] | None:
    """Return name and reason of the first field whose value asks for what cannot be honoured."""
    for name, (why, *neutral) in refused.items():
        value = fields.get(name)
        if value is not None and not any(_equal(value, item) for item in neutral):
            return name, f"cannot be honoured: {why}"
    return None


def _equal(value: object, neutral: object) -> bool:
    """Whether two JSON values are equal; unlike Python's 1 and True."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def blocks_at(place: str, value: object) -> list[tuple[str, dict[str, Any]]]:
    """Return the blocks of a content, each with its place; a text is one block."""
    if isinstance(value, str):
        if not value:
            raise InvalidValue(f"{place}: should have at least one character")
        return [(place, {"type": "text", "text": value})]
    if not isinstance(value, list):
        raise InvalidValue(f"{place}: should be a text or a list of blocks, got {told(value)}")
    found = []
    for number, block in enumerate(value):
        where = f"{place}.{number}"
        found.append((where, object_at(where, block)))
    return found


def kind_of_block(place: str, block: dict[str, Any], allowed: set[str]) -> str:
    """Return the type of a block; one of ``allowed``."""
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in allowed:
        what = f"; {_ONLY_TEXT}" if kind in {"image", "document"} else ""
        raise InvalidValue(
            f"{place}.type: should be one of {', '.join(sorted(allowed))} here, got {told(kind)}"
            f"{what}"
        )
    return kind


def object_at(place: str, value: object) -> dict[str, Any]:
    """Return a JSON object."""
    if not isinstance(value, dict):
        raise InvalidValue(f"{place}: should be a JSON object, got {told(value)}")
    return value


def list_at(place: str, value: object, most: int) -> list[Any]:
    """Return a list of at most ``most`` entries; null is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidValue(f"{place}: should be a list, got {told(value)}")
    if len(value) > most:
        raise InvalidValue(f"{place}: has {len(value):,} entries; at most {most:,}")
    return value


def text_at(place: str, value: object, *, empty: bool = False) -> str:
    """Return a text, which must not be empty unless ``empty`` is given."""
    if not isinstance(value, str) or not (value or empty):
        raise InvalidValue(f"{place}: should be a text, got {told(value)}")
    return value


def flag_at(place: str, value: object) -> bool:
    """Return a truth value; null is false."""
    if value is not None and not isinstance(value, bool):
        raise InvalidValue(f"{place}: should be true or false, got {told(value)}")
    return bool(value)


def whole_at(place: str, value: object, low: int) -> int:
    """Return a whole number, ``low`` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _INT32:
        raise InvalidValue(f"{place}: should be a whole number, {low} or more, got {told(value)}")
    return value


def number_at(place: str, value: object, low: float, high: float) -> float | None:
    """Return a number in ``low`` … ``high``; null is None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidValue(f"{place}: should be in {low} … {high}, got {told(value)}")
    return float(value)
