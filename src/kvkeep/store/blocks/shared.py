"""Stores that are shared by name within a process."""

from __future__ import annotations

import copy
import os
import threading
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvkeep.core.errors import IllegalStep, InvalidValue, listed
from kvkeep.store.backends import TierURL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvkeep.store.backends import Backend
    from kvkeep.store.tiers import TieredStore

__all__ = ["ClosedUse", "SharedStores", "places_of"]

S = TypeVar("S")


@dataclass(slots=True)
class _Open(Generic[S]):
    """The open store of one name and the number of its users; closed if that is 0.

    The lock is held while the store is opened or closed.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    store: S | None = None
    given: Mapping[str, object] = field(default_factory=dict)
    users: int = 0


class SharedStores(Generic[S]):
    """The open stores of one class, by name.

    A forked process starts with none. Thread safety: all methods. Opening one name does not wait
    for another name.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._named: dict[str, _Open[S]] = {}

    def take(self, name: object, given: Mapping[str, object], make: Callable[[], S]) -> S:
        """Return a shallow copy of the store ``name`` for a new user; ``make`` opens it if closed.

        Each user closes its copy alone, and calls `give_back` once.

        Raises:
            InvalidValue: the store is open with another configuration than ``given``.
        """
        if not isinstance(name, str) or not name:
            raise InvalidValue(f"the name of a shared store is {name!r}; a text is needed")
        with self._lock:
            one = self._named.setdefault(name, _Open())
        with one.lock:
            if one.store is None:
                one.store, one.given = make(), given
            else:
                self._check(name, one.given, given)
            one.users += 1
            return copy.copy(one.store)

    def give_back(self, name: str, close: Callable[[S], bool]) -> bool:
        """Remove a user. The last one calls ``close`` for its result; others return True."""
        one = self._named[name]
        with one.lock:
            one.users -= 1
            if one.users:
                return True
            store, one.store = one.store, None
            assert store is not None, "a store was given back more often than it was taken"
            return close(store)

    def _check(self, name: str, before: Mapping[str, object], now: Mapping[str, object]) -> None:
        for what in before:
            if before[what] != now[what]:
                at, was, given = _where(what, before[what], now[what])
                there, here = repr(was), repr(given)
                if there == here:  # URLs are shown without their options
                    here = "the same with other options"
                raise InvalidValue(
                    f"the shared {self._kind} {name!r} is open with {at}={there}, and {here} is "
                    "requested; give the same configuration or another name"
                )


def places_of(tiers: Sequence[str | Backend]) -> tuple[_Place, ...]:
    """Wrap tiers so that they can be compared, and printed without secrets."""
    if isinstance(tiers, str):
        raise InvalidValue("tiers are a list of URLs, fastest first, and not one text")
    return tuple(_Place(tier) for tier in listed("tiers", tiers, "URLs or backends"))


@dataclass(frozen=True, repr=False)
class _Place:
    """A tier, compared by its URL or by equality of the backend; its repr has no password."""

    tier: str | Backend

    def __repr__(self) -> str:
        return TierURL(self.tier).safe if isinstance(self.tier, str) else repr(self.tier)


def _where(what: str, before: Any, now: Any) -> tuple[str, object, object]:
    """Return the field or tier that differs where possible, else ``what``, with both values."""
    if is_dataclass(before) and is_dataclass(now) and type(before) is type(now):
        for one in fields(before):
            was, given = getattr(before, one.name), getattr(now, one.name)
            if was != given:
                return f"{what}.{one.name}", was, given
    if isinstance(before, tuple) and isinstance(now, tuple) and len(before) == len(now):
        at = next(at for at, was in enumerate(before) if was != now[at])
        return f"{what}[{at}]", before[at], now[at]
    return what, before, now


class ClosedUse:
    """Stands in for the tiers in a closed handle of a shared store.

    Other users may still have the store open: only statistics and checks are passed on.
    """

    def __init__(self, tiered: TieredStore) -> None:
        self._tiered = tiered

    def __getattr__(self, name: str) -> object:
        if name in ("front", "tiers", "stats", "check"):
            return getattr(self._tiered, name)
        raise IllegalStep("the store is closed: this handle of a shared store was closed")
