"""What people give an integration in JSON: checked, and not shown where it may hold a password."""

from __future__ import annotations

from threading import TIMEOUT_MAX  # seconds that can be waited for: some hundred years

from kvkeep.errors import InvalidValue, told, whole
from kvkeep.geometry.units import parse_count

__all__ = ["count_of", "seconds_of", "tiers_of"]


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
