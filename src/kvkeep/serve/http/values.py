"""`check_values` bounds the number of values in a JSON body; `texts_in` and `text_size` its texts.

A JSON parser creates a Python object per value and holds the interpreter meanwhile: five megabytes
of ``[[1], [1], …]`` would stop the event loop for seconds. So values are counted first, in the
bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["check_values", "text_size", "texts_in"]

_MOST_CONTAINERS = 32_768
"""Objects and lists; 4,096 messages of four parts each have fewer."""
_MOST_TEXTS = 131_072
"""Strings, including names of fields."""
_MOST_VALUES = 1 << 20
"""Values in lists and objects, mostly tokens."""
_FEW_BYTES = 32_768
"""A body of no more bytes cannot exceed any of these limits."""


def check_values(data: bytes) -> None:
    """Raise `InvalidValue` for a body with too many values.

    Cost: a fast upper bound for most bodies; an exact count takes about 50 ms for 8 MiB.
    """
    if len(data) <= _FEW_BYTES:
        return
    if (
        _containers(data) <= _MOST_CONTAINERS
        and data.count(b'"') <= 2 * _MOST_TEXTS
        and data.count(b",") <= _MOST_VALUES
    ):
        return
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # the quotes left delimit strings
    _at_most("strings", bare.count(b'"') // 2, _MOST_TEXTS)
    outside = b"".join(bare.split(b'"')[::2])
    _at_most("objects and lists", _containers(outside), _MOST_CONTAINERS)
    _at_most("values", outside.count(b","), _MOST_VALUES)


def texts_in(value: object) -> Iterator[str]:
    """Yield every text in a decoded JSON value at any depth, names of fields included.

    In no particular order. Cost: a step for each value, about 0.1 s for the most that
    `check_values` allows, so run it off the event loop for a large body.
    """
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            yield from item
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            waiting.extend(part for part in item if isinstance(part, str | dict | list | tuple))


def text_size(value: object) -> int:
    """Return the number of characters of `texts_in`: what a tokenizer or a template may get."""
    return sum(map(len, texts_in(value)))


def _containers(data: bytes) -> int:
    count: Callable[[bytes], int] = data.count
    return count(b"[") + count(b"{")


def _at_most(what: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidValue(f"the body has {count:,} {what}; a request has at most {most:,}")
