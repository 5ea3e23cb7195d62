"""Options that users of an engine write as JSON: checked, with the nearest name for a wrong one.

`EngineOptions` are those of every engine with a `BlockStore` below it; an integration adds its own
in a subclass, each declared with `option` and the function that checks it. No message repeats a
value that may hold a password.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import islice
from threading import TIMEOUT_MAX  # the longest time a thread can wait: some hundred years
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from kvkeep.core.errors import InvalidValue, did_you_mean, told
from kvkeep.core.geometry.units import parse_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = [
    "FLUSH_S", "LOOKUP_S", "EngineOptions", "checked", "option", "seconds_of",
    "text_of", "tiers_of", "truth_of",
]  # fmt: skip

T = TypeVar("T")
LOOKUP_S: Final = 0.5
"""For a query of tiers that other processes write to; then what is known counts."""
FLUSH_S: Final = 10.0
"""For writing queued blocks at shutdown."""
_MOST_NAMED = 8  # unknown names in a message


def option(default: T, check: Callable[[str, Any], object]) -> T:
    """Declare a field of an options dataclass; ``check(name, value)`` returns the value to use."""
    declared: T = field(default=default, metadata={"check": check})
    return declared


def checked(cls: type, given: Mapping[str, object], has: str, there_are: str) -> dict[str, Any]:
    """Check ``given`` against the fields of ``cls`` and return its keyword arguments.

    Raises:
        InvalidValue: an unknown name (see `_refuse_unknown`), or a wrong value.
    """
    checks = {one.name: one.metadata["check"] for one in fields(cls)}
    _refuse_unknown(given, [*checks], has, there_are)
    return {name: checks[name](name, value) for name, value in given.items()}


def _refuse_unknown(
    given: Iterable[object], known: Sequence[str], has: str, there_are: str
) -> None:
    """Raise `InvalidValue` if ``given`` has a name that is not in ``known``, with the nearest ones.

    The message is "``has`` 'nme'; ``there_are`` name, size; did you mean 'name'?". Names are quoted
    by `repr`, so that a client cannot start a new line of the log; and of many only some are named,
    because a client may send a million while an engine's scheduler waits.
    """
    found = list(islice((name for name in given if name not in known), _MOST_NAMED + 1))
    if not found:
        return
    unknown = sorted(found[:_MOST_NAMED], key=repr)
    raise InvalidValue(
        f"{has} {', '.join(map(repr, unknown))}"
        + (" and others" if len(found) > _MOST_NAMED else "")
        + f"; {there_are} {', '.join(known)}"
        + did_you_mean(map(str, unknown), known)
    )


def truth_of(name: str, value: object) -> bool:
    """Return ``value``, which must be true or false."""
    if not isinstance(value, bool):
        raise InvalidValue(f"{name} is {told(value)}; true or false is needed")
    return value


def text_of(name: str, value: object) -> str:
    """Return ``value``, which must be text."""
    if not isinstance(value, str):
        raise InvalidValue(f"{name} is {told(value)}; text is needed")
    return value


def tiers_of(name: str, value: object) -> tuple[str, ...]:
    """Return URLs of tiers, fastest first. The message of an error does not quote ``value``."""
    if (
        not isinstance(value, list | tuple)
        or not value
        or not all(isinstance(tier, str) for tier in value)
    ):
        raise InvalidValue(
            f'{name} are a list of URLs, fastest first, as ["memory://8GiB"]; something else is '
            "given"
        )
    return tuple(value)


def seconds_of(name: str, value: object) -> float:
    """Return a timeout in seconds, 0 included; as a number, or as text such as ``"500ms"``."""
    if isinstance(value, str):
        try:
            value = parse_wait(value)
        except InvalidValue as error:
            raise InvalidValue(f"{name}: {error}") from error
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= TIMEOUT_MAX
    ):
        most = f" up to {TIMEOUT_MAX:.0f}" if isinstance(value, int | float) and value > 0 else ""
        raise InvalidValue(f"{name} is {told(value)}; a number of seconds{most} is needed")
    return float(value)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of every engine that keeps its KV in a `BlockStore`.

    Attributes:
        tiers: URLs of the store's tiers, fastest first; see docs/store.md.
        revision: a name for the weights, if their files do not identify them.
        tenant: separates this engine's KV from that of engines with other tenants.
        load_timeout: seconds for one load; what has not arrived by then is a miss.
    """

    tiers: tuple[str, ...] = option(("memory://1GiB",), tiers_of)
    revision: str = option("", text_of)
    tenant: str = option("", text_of)
    load_timeout: float = option(5.0, seconds_of)

    @classmethod
    def from_json(cls, given: Mapping[str, object], where: str) -> Self:
        """Check options given in ``where``, the name of an engine's setting.

        Raises:
            InvalidValue: an unknown option, or a value that an option cannot have.
        """
        return cls(**checked(cls, given, f"{where} has", "kvkeep's options are"))
