"""One store for each name in a process: the same for everybody who asks for it."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvkeep.backends import TierURL
from kvkeep.errors import IllegalStep, InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvkeep.backends import Backend
    from kvkeep.tiers import TieredStore

__all__ = ["ClosedUse", "SharedStores", "places_of"]

S = TypeVar("S")


@dataclass(slots=True)
class _Open(Generic[S]):
    """One name. Its lock is held while its store is opened and closed; ``users`` of 0: closed."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    store: S | None = None
    given: Mapping[str, object] = field(default_factory=dict)
    users: int = 0


class SharedStores(Generic[S]):
    """Stores of one kind by name.

    Thread safety: all methods. Opening one name does not wait for another.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._named: dict[str, _Open[S]] = {}

    def take(self, name: object, given: Mapping[str, object], make: Callable[[], S]) -> S:
        """The store called ``name``, made by ``make`` if nobody has it open; one more user.

        A copy of it that shares all but its own end: to be given back with `give_back`, once.

        Raises:
            InvalidValue: it is open, and what was ``given`` for it differs.
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
        """One user less; the last one has it closed. What ``close`` says, else True."""
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
                at, was, asked = _where(what, before[what], now[what])
                there, here = repr(was), repr(asked)
                if there == here:  # URLs are shown without their options
                    there, here = f"{there} and some options", "with others"
                raise InvalidValue(
                    f"the shared {self._kind} {name!r} is open with {at}={there}, and {here} is "
                    "asked for; give what it has, or another name"
                )


def places_of(tiers: Sequence[str | Backend]) -> tuple[_Place, ...]:
    """Tiers as they are compared, and shown without secrets."""
    if isinstance(tiers, str):
        return (_Place(tiers),)  # it is refused where it is opened
    return tuple(_Place(tier) for tier in tiers)


class _Place:
    """A tier: equal by its URL, or as an object; shown without password."""

    def __init__(self, tier: str | Backend) -> None:
        self._tier = tier

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and self._tier == other._tier

    def __hash__(self) -> int:
        return hash(self._tier)

    def __repr__(self) -> str:
        return TierURL(self._tier).safe if isinstance(self._tier, str) else repr(self._tier)


def _where(what: str, before: Any, now: Any) -> tuple[str, object, object]:
    """What differs: a field of a namespace or a geometry, one of the tiers, else the whole."""
    if is_dataclass(before) and is_dataclass(now) and type(before) is type(now):
        for one in fields(before):
            was, asked = getattr(before, one.name), getattr(now, one.name)
            if was != asked:
                return f"{what}.{one.name}", was, asked
    if isinstance(before, tuple) and isinstance(now, tuple) and len(before) == len(now):
        at = next(at for at, was in enumerate(before) if was != now[at])
        return f"{what}[{at}]", before[at], now[at]
    return what, before, now


class ClosedUse:
    """What a user of a shared store has in place of its tiers after closing it.

    Others may use them still: it tells what they tell, and does nothing.
    """

    def __init__(self, tiered: TieredStore) -> None:
        self._tiered = tiered

    def __getattr__(self, name: str) -> object:
        if name in ("front", "tiers", "stats", "check"):
            return getattr(self._tiered, name)
        raise IllegalStep("the store is closed: this user of it, by a shared name, has closed it")
