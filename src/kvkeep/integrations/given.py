"""What people give an integration in JSON: checked, and not shown where it may hold a password."""

from __future__ import annotations

from threading import TIMEOUT_MAX  # seconds that can be waited for: some hundred years

from kvkeep.errors import InvalidValue

__all__ = ["seconds_of", "tiers_of"]


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


def seconds_of(name: str, value: object) -> float:
    """A time that can be waited for, 0 as well; else `InvalidValue`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= TIMEOUT_MAX
    ):
        raise InvalidValue(f"{name} is {value!r}; a number of seconds is needed")
    return float(value)
