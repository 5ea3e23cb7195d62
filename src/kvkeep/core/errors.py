"""Every error that kvkeep raises on purpose.

    KVKeepError
    ├── InvalidValue (ValueError)   an argument is wrong: what was given, what would be right
    │   └── UnsupportedModel        a model or a configuration that cannot be served
    ├── IllegalStep (RuntimeError)  a step that the object's present state does not allow
    ├── OutOfPages (MemoryError)    the pool cannot supply the pages; nothing changed
    ├── OutOfSlots (MemoryError)    no slot can be had; nothing changed
    ├── QueueFull (RuntimeError)    the queue is full; this request was not accepted
    ├── OutOfRoom (MemoryError)     a tier has no space for a record; nothing changed
    ├── BackendFailed (OSError)     a tier's backend could not do its work: the tier counts a miss
    ├── NotCached (LookupError)     what was named is not in the cache
    └── MissingExtra (ImportError)  an optional package is needed: which extra to install

Each also inherits the built-in that fits, so ``except ValueError`` does what a reader expects.
An ``AssertionError`` out of kvkeep is a fault of kvkeep.
"""

from __future__ import annotations

import importlib
import math
import operator
from itertools import islice
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import ModuleType

T = TypeVar("T")
_MOST_OF_A_KEY = 4096  # characters

__all__ = [
    "BackendFailed",
    "IllegalStep",
    "InvalidValue",
    "KVKeepError",
    "MissingExtra",
    "NotCached",
    "OutOfPages",
    "OutOfRoom",
    "OutOfSlots",
    "QueueFull",
    "UnsupportedModel",
    "check_type",
    "choice",
    "did_you_mean",
    "key_in",
    "listed",
    "number",
    "reason",
    "require",
    "require_engine",
    "switch",
    "told",
    "whole",
]


class KVKeepError(Exception):
    """The root of the tree: everything kvkeep raises on purpose."""


class InvalidValue(KVKeepError, ValueError):
    """An argument is wrong; the message names what was given and what would be right."""


class UnsupportedModel(InvalidValue):
    """A model, a model directory or a configuration that kvkeep cannot serve."""


class IllegalStep(KVKeepError, RuntimeError):
    """A step that is illegal in the present state; the object is unchanged."""


class OutOfPages(KVKeepError, MemoryError):
    """The pool cannot supply the pages that an operation needs; nothing changed.

    ``needed`` and ``available`` are in pages.
    """

    def __init__(self, needed: int, available: int, total: int) -> None:
        self.needed = needed
        self.available = available
        self.total = total
        super().__init__(
            f"{needed} pages are needed and {available} can be had (free or evictable) "
            f"of {total}; close sequences, or give the pool more pages"
        )

    def __reduce__(self) -> tuple[type[OutOfPages], tuple[int, int, int]]:
        return type(self), (self.needed, self.available, self.total)  # pickled between processes


class OutOfSlots(KVKeepError, MemoryError):
    """Every slot is running, hard-pinned or being copied from; nothing changed."""

    def __init__(self, running: int, total: int) -> None:
        self.running = running
        self.total = total
        super().__init__(
            f"no slot can be had: of {total}, {running} are running and {total - running} are "
            f"hard-pinned or being copied from; release leases, unpin, or have more slots"
        )

    def __reduce__(self) -> tuple[type[OutOfSlots], tuple[int, int]]:
        return type(self), (self.running, self.total)  # pickled between processes


class QueueFull(KVKeepError, RuntimeError):
    """The queue of requests is full; this request was not accepted. Try again later."""


class OutOfRoom(KVKeepError, MemoryError):
    """A tier has no space for a record of ``needed`` bytes; nothing changed."""

    def __init__(self, needed: int, where: str = "the tier") -> None:
        self.needed = needed
        self.where = where
        super().__init__(f"{where} has no room for {needed} bytes")

    def __reduce__(self) -> tuple[type[OutOfRoom], tuple[int, str]]:
        return type(self), (self.needed, self.where)  # pickled between processes


class BackendFailed(KVKeepError, OSError):
    """A tier's backend could not do its work; above the tier this is a miss, counted."""

    def __str__(self) -> str:
        # OSError puts "[Errno N]" in front; the message names the cause in words.
        return self.strerror or super().__str__()


class NotCached(KVKeepError, LookupError):
    """The prefix that was named is not in the cache."""


class MissingExtra(KVKeepError, ImportError):
    """An optional package is missing; the message says which extra brings it."""


def require(module: str, extra: str) -> ModuleType:
    """Import ``module``, or raise `MissingExtra` naming the ``extra`` that brings it.

    ``extra`` brings all that the caller needs, so that nobody is told of one extra after the other.
    """
    return _required(module, f"install it with: pip install 'kvkeep[{extra}]'")


def require_engine(module: str, engine: str) -> ModuleType:
    """Import ``module``, or raise `MissingExtra` saying that kvkeep runs inside ``engine`` here."""
    return _required(module, f"kvkeep runs inside {engine} here, which no extra installs")


def _required(module: str, advice: str) -> ModuleType:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is installed, one of its own imports is not
        missing = MissingExtra(f"{package} is needed here; {advice}", name=error.name)
    raise missing  # outside `except`: the traceback ends in one error, not in two


def told(value: object) -> str:
    """Return the repr of ``value`` for a message, 80 characters at most. Never raises.

    Python refuses to write integers of more than 4,300 digits, and a foreign ``__repr__`` may fail.
    """
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a stranger's __repr__, or a huge number within a value
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:79]}…"


def whole(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """Return ``value`` as an int in ``low`` … ``high``, or raise `InvalidValue` with ``name``.

    Takes NumPy integers. Refuses bools and floats, which would be rounded silently.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or (low is not None and number < low) or (high is not None and number > high):
        bounds = (
            f" in {low} … {high}" if high is not None else f" of at least {low}" * (low is not None)
        )
        raise InvalidValue(f"{name} is {told(value)}; a whole number{bounds} is needed")
    return number


def number(
    name: str,
    value: object,
    needed: str = "a number",
    *,
    above: float | None = None,
    ends: bool = False,
) -> float:
    """Return ``value`` as a float, or raise `InvalidValue` with ``name`` and what is ``needed``.

    Takes every real number ``above`` a bound and, with ``ends``, finite. Refuses bools, text, NaN.
    """
    figure = math.nan
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            figure = float(value)
        except OverflowError:  # an integer
            figure = math.inf
    outside = above is not None and figure <= above
    if math.isnan(figure) or outside or (ends and math.isinf(figure)):
        raise InvalidValue(f"{name} is {told(value)}; {needed} is needed")
    return figure


def switch(name: str, value: object) -> bool:
    """Return ``value``, True or False, or raise `InvalidValue` with ``name``."""
    if value is True or value is False:
        return value
    raise InvalidValue(f"{name} is {told(value)}; True or False is needed")


def check_type(name: str, value: object, kind: Any, needed: str) -> None:
    """Raise `InvalidValue` with ``name``, and in words what is ``needed``, for another type."""
    if not isinstance(value, kind):
        raise InvalidValue(f"{name} is {told(value)}; {needed} is needed")


def listed(name: str, values: object, needed: str) -> list[Any]:
    """Return ``values`` as a list, or raise `InvalidValue` with ``name`` if they are no row.

    Refuses text, bytes and dictionaries, whose items are something else.
    """
    cause: Exception | None = None
    if not isinstance(values, str | bytes | bytearray | memoryview | dict):
        try:
            return list(values)  # type: ignore[call-overload, no-any-return]
        except Exception as error:  # noqa: BLE001 - a stranger's iterator
            cause = error
    raise InvalidValue(f"{name} is {told(values)}; {needed} are needed") from cause


def key_in(where: str, text: str) -> str:
    """Return the API key in ``text``, without the blanks around it; ``where`` it is from.

    Raises `InvalidValue` for a text that is none: an empty key would let everybody in.
    """
    key = text.strip()
    if not key or len(key) > _MOST_OF_A_KEY or not (key.isascii() and key.isprintable()):
        raise InvalidValue(
            f"{where} holds no API key: a key is one line of printable ASCII; without a key, leave "
            "it out"
        )
    return key


def choice(kind: str, name: object, choices: Mapping[str, T]) -> T:
    """Return what ``name`` stands for in ``choices``, or raise `InvalidValue` that lists them."""
    if isinstance(name, str) and name in choices:
        return choices[name]
    near = did_you_mean(name, choices) if isinstance(name, str) else ""
    raise InvalidValue(f"no {kind} {told(name)}; there are {', '.join(choices)}{near}")


def did_you_mean(given: str | Iterable[str], known: Iterable[str]) -> str:
    """Return the end of a message about unknown names: ``"; did you mean 'size'?"``, or "".

    Names are compared without regard to case, and - as _. Cost: about a microsecond for each pair;
    of ``given`` only the first eight count, and their first 99 characters.
    """
    from difflib import get_close_matches  # noqa: PLC0415 - only for a mistake

    names = {name.lower().replace("-", "_"): name for name in known}
    near: dict[str, None] = {}
    for name in islice([given] if isinstance(given, str) else given, 8):
        plain = name[:99].lower().replace("-", "_")
        near.update(dict.fromkeys(names[one] for one in get_close_matches(plain, names, 1)))
    return f"; did you mean {', '.join(map(repr, near))}?" if near else ""


def reason(error: BaseException) -> str:
    """Return why an operation failed, in one line, for the end of a message.

    An error of the system is told in words alone, without its number and its path, which the
    message names.
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, UnicodeDecodeError):
        return f"it is no UTF-8 text, at byte {error.start}"
    return " ".join(str(error).split()) or type(error).__name__
