"""What people give an integration in JSON: checked, and not shown where it may hold a password."""

from __future__ import annotations

from difflib import get_close_matches
from threading import TIMEOUT_MAX  # seconds that can be waited for: some hundred years
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, told, whole
from kvkeep.core.geometry.units import parse_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["count_of", "refuse_unknown", "seconds_of", "tiers_of", "truth_of"]


def refuse_unknown(given: Iterable[object], known: Sequence[str], has: str, there_are: str) -> None:
    """Raise `InvalidValue` if ``given`` has a name that is not in ``known``, with the nearest ones.

    The message is "``has`` 'nme'; ``there_are`` name, size; did you mean 'name'?". Names are
    written as `repr` writes them: a client cannot begin a line of the log.
    """
    unknown = sorted(set(given) - set(known), key=repr)
    if not unknown:
        return
    near = [close for name in unknown for close in get_close_matches(str(name)[:99], known, 1)]
    raise InvalidValue(
        f"{has} {', '.join(map(repr, unknown))}; {there_are} {', '.join(known)}"
        + (f"; did you mean {', '.join(map(repr, dict.fromkeys(near)))}?" if near else "")
    )


def truth_of(name: str, value: object) -> bool:
    """``value``, which is true or false; else `InvalidValue`."""
    if not isinstance(value, bool):
        raise InvalidValue(f"{name} is {value!r}; true or false is needed")
    return value


def tiers_of(given: object) -> tuple[str, ...]:
    """URLs of tiers, fastest first. `InvalidValue` for what is none, without saying what."""
    if (
        not isinstance(given, list | tuple)
        or not given
        or not all(isinstance(tier, str) for tier in given)
    ):
        raise InvalidValue(
            'tiers are a list of URLs, fastest first, as ["memory://8GiB"]; something else is given'
        )
    return tuple(given)


def count_of(name: str, value: object, low: int, high: int | None = None) -> int:
    """A whole number in ``low`` … ``high``, or a text for it, as ``"4k"``; else `InvalidValue`."""
    if isinstance(value, str):
        try:
            value = parse_count(value)
        except InvalidValue as error:
            raise InvalidValue(f"{name}: {error}") from error
    return whole(name, value, low, high)


def seconds_of(name: str, value: object) -> float:
    """A time that can be waited for, 0 as well; else `InvalidValue`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= TIMEOUT_MAX
    ):
        raise InvalidValue(f"{name} is {told(value)}; a number of seconds is needed")
    return float(value)
