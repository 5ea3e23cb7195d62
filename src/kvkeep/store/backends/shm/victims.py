"""`Victims`: the records that were used least recently, by any process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvkeep.store.backends.shm import clock
from kvkeep.store.backends.shm import layout as at
from kvkeep.store.backends.shm.quotas import in_space

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.store.backends.shm.books import Books

__all__ = ["Victim", "Victims"]

_AT_LEAST: Final = 64
_SHARE: Final = 16  # of the records are chosen at once
_MADE: Final = 256  # victims made of the columns at a time
_SPACES: Final = 64  # namespaces whose choices are kept
_FRESH: Final = 1.0  # seconds after which a choice is made anew


class Victim(NamedTuple):
    """A record as it was when it was chosen."""

    entry: int
    generation: int
    used: int


class Victims:
    """Chooses victims in the order of their last use, many at once.

    A pass over the entries chooses the oldest sixteenth of the records, so a victim costs about
    sixteen entries' share of a pass, whatever the arena holds. Uses after that are noticed: the
    record has another time of use then and is no longer a victim, and all others are younger than
    those chosen. So the order is that of one list, without a list that each use would have to
    change under the lock.

    Thread safety: none; each caller holds a lock of its own.
    """

    def __init__(self, books: Books) -> None:
        self._books = books
        self._chosen: dict[bytes | None, tuple[float, Iterator[Victim]]] = {}

    def take(self, needed: int, space: bytes | None, most: int) -> list[Victim]:
        """Return the next victims of a namespace, or of all, for ``needed`` bytes.

        They are ``most`` records at most.
        Check each under the arena's lock (`still`) before it goes.
        """
        taken: list[Victim] = []
        at_time, chosen = self._chosen.pop(space, (0.0, iter(())))
        if time.monotonic() - at_time <= _FRESH:
            needed = self._next(chosen, needed, most, taken)
        if not taken:
            at_time, chosen = time.monotonic(), self._choose(space)
            self._next(chosen, needed, most, taken)
        for oldest in list(self._chosen)[: 1 - _SPACES]:  # `forget` may clear it meanwhile
            self._chosen.pop(oldest, None)
        self._chosen[space] = at_time, chosen
        return taken

    def _next(self, chosen: Iterator[Victim], needed: int, most: int, taken: list[Victim]) -> int:
        while needed > 0 and len(taken) < most:
            victim = next(chosen, None)
            if victim is None:
                break
            taken.append(victim)
            needed -= self._books.length[victim.entry]
        return needed

    def still(self, victim: Victim, now: int) -> bool:
        """Whether a record is as it was when it was chosen, and may go."""
        books, entry = self._books, victim.entry
        if books.named[entry] != victim.generation or books.used[entry] != victim.used:
            return False
        return not (books.leaving[entry] or books.pinned[entry] > now or books.is_held(entry))

    def forget(self) -> None:
        """Choose anew next time: entries were freed that were not to go before."""
        self._chosen.clear()

    def _choose(self, space: bytes | None) -> Iterator[Victim]:
        books, now = self._books, clock.now()
        high = books.words[at.HIGH]
        fit = (books.named_all[:high] != 0) & ~books.holders_all[:high].any(1)
        fit &= (np.asarray(books.pinned)[:high] <= now) & (np.asarray(books.leaving)[:high] == 0)
        if space is not None:
            fit &= in_space(books, space, high)
        entries = np.flatnonzero(fit)
        used = books.used_all[entries]
        many = max(_AT_LEAST, len(entries) // _SHARE)
        if many < len(entries):
            oldest = np.argpartition(used, many)[:many]
            entries, used = entries[oldest], used[oldest]
        order = np.argsort(used, kind="stable")
        entries, used = entries[order], used[order]
        generations = books.named_all[entries]
        return _one_by_one(entries, generations, used)


def _one_by_one(entries: np.ndarray, generations: np.ndarray, used: np.ndarray) -> Iterator[Victim]:
    for start in range(0, len(entries), _MADE):
        part = slice(start, start + _MADE)
        rows = (column[part].tolist() for column in (entries, generations, used))
        for row in zip(*rows, strict=True):
            if row[1]:  # else it was deleted during the pass, which holds no lock
                yield Victim(*row)
