"""What a store is asked, answers and reports."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import inf, isnan
from numbers import Real
from typing import TYPE_CHECKING

from kvkeep.core.errors import BackendFailed, IllegalStep, InvalidValue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvkeep.store.tiers import TierStats

__all__ = [
    "Lookup",
    "Put",
    "StoreCounters",
    "StoreStats",
    "closed_is_illegal",
    "runs_of",
    "seconds_of",
]


@contextmanager
def closed_is_illegal() -> Iterator[None]:
    """Raise `IllegalStep` where memory says that it was closed while it was being used."""
    try:
        yield
    except BackendFailed as error:
        raise IllegalStep("the store was closed by another thread") from error


def seconds_of(name: str, value: object, *, ends: bool = False) -> float:
    """A time as callers give it, in seconds; one that ``ends`` is above zero and not infinite.

    What is longer than a thread can wait is as long as that: some hundred years.

    Raises:
        InvalidValue: it is none.
    """
    number = float("nan")
    if not isinstance(value, bool) and isinstance(value, Real):
        number = float(value)
    if isnan(number) or (ends and not 0 < number < inf):
        kind = "a time above zero that ends" if ends else "a number"
        raise InvalidValue(f"{name} is {value!r}; {kind}, in seconds, is needed")
    return min(number, threading.TIMEOUT_MAX / 2)  # a time of day may come on top


@dataclass(frozen=True, slots=True)
class Put:
    """What became of the tokens that were put.

    Attributes:
        tokens: kept now.
        skipped: stored before; their bytes were not touched.
        dropped: for which there was no room.
        partial: at the ends, in no whole block, so not kept (see ``tail``).
        failed: with ``replace``, the tiers that may hold older KV still, because they failed. This
            store does not read it; others may.
    """

    tokens: int
    skipped: int
    dropped: int
    partial: int
    failed: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Lookup:
    """Tokens stored as a prefix of a prompt, and where: ``(tier name, tokens)`` in order."""

    tokens: int
    tiers: tuple[tuple[str, int], ...]

    def __int__(self) -> int:
        return self.tokens


def runs_of(parts: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """``(tier, tokens)`` of blocks in order, neighbours of one tier as one."""
    runs: list[tuple[str, int]] = []
    for name, tokens in parts:
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1] + tokens)
        else:
            runs.append((name, tokens))
    return tuple(runs)


@dataclass(frozen=True)
class StoreStats:
    """A store at one moment: tokens since the start, and its tiers, fastest first.

    ``hit_tokens`` of ``asked_tokens`` were returned by `get`; ``put_tokens`` were kept by `put`,
    ``skipped_tokens`` were stored before, ``dropped_tokens`` found no room.
    """

    gets: int
    asked_tokens: int
    hit_tokens: int
    puts: int
    put_tokens: int
    skipped_tokens: int
    dropped_tokens: int
    tiers: tuple[TierStats, ...]

    @property
    def hit_rate(self) -> float:
        """Returned tokens / asked tokens; 0 before anything was asked."""
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return asdict(self) | {"hit_rate": self.hit_rate}


class StoreCounters:
    """The counts of `StoreStats`, added up. Thread safety: all methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(
            ("gets", "asked_tokens", "hit_tokens",
             "puts", "put_tokens", "skipped_tokens", "dropped_tokens"), 0
        )  # fmt: skip

    def count(self, **more: int) -> None:
        """Add to some of them at once."""
        with self._lock:
            for name, amount in more.items():
                self._counts[name] += amount

    def stats(self, tiers: tuple[TierStats, ...]) -> StoreStats:
        """All of them at one moment."""
        with self._lock:
            return StoreStats(tiers=tiers, **self._counts)
