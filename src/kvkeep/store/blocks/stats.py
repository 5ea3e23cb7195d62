"""Results and statistics of stores."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from kvkeep.core.errors import BackendFailed, IllegalStep, number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvkeep.store.tiers import Miss, TieredStore, TierStats

__all__ = [
    "Lookup",
    "Put",
    "StoreCounters",
    "StoreStats",
    "closed_is_illegal",
    "runs_of",
    "seconds_of",
    "tier_runs",
]


class closed_is_illegal:  # noqa: N801 - it reads as a context manager
    """Raise `IllegalStep` if another thread closed the store during the operation."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BackendFailed):
            raise IllegalStep("the store was closed by another thread") from error


def seconds_of(name: str, value: object, *, ends: bool = False) -> float:
    """Check a time in seconds given by a caller; with ``ends``, it must be positive and finite.

    A time longer than a thread can wait, some hundred years, is cut to that.

    Raises:
        InvalidValue: ``value`` is no such number.
    """
    needed = "a time above zero that ends" if ends else "a number"
    above = 0 if ends else None
    seconds = number(name, value, f"{needed}, in seconds,", above=above, ends=ends)
    return min(seconds, threading.TIMEOUT_MAX / 2)  # half: it is added to the clock


@dataclass(frozen=True, slots=True)
class Put:
    """The result of a put: how many tokens were stored, skipped or dropped.

    Attributes:
        tokens: newly stored.
        skipped: stored before; their bytes were not touched.
        dropped: not stored for lack of room.
        partial: not stored because they are in no whole block, at either end (see ``tail``).
        failed: with ``replace``, the tiers that failed to delete older KV. This store does not read
            it any more; others may.
        unread: not stored because answers like this one are never read again.
    """

    tokens: int
    skipped: int
    dropped: int
    partial: int
    failed: tuple[str, ...] = field(default=(), repr=False)
    unread: int = 0


@dataclass(frozen=True, slots=True)
class Lookup:
    """The number of tokens stored as a prefix of a prompt, and ``(tier name, tokens)`` in order.

    Attributes:
        tokens: a `get` could return so many.
        tiers: of these tokens.
        stored_tokens: how far the layers that keep every token reach, in whole blocks: of
            snapshots, a state or a window may be missing there. Otherwise as many as ``tokens``.
        miss: why the first block behind ``tokens`` cannot be read; None if nothing is missing.
    """

    tokens: int
    tiers: tuple[tuple[str, int], ...]
    stored_tokens: int = field(default=-1, repr=False)
    miss: Miss | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.stored_tokens < 0:
            object.__setattr__(self, "stored_tokens", self.tokens)  # the dataclass is frozen

    def __int__(self) -> int:
        return self.tokens


def runs_of(parts: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Merge neighbouring ``(tier, tokens)`` of the same tier."""
    runs: list[tuple[str, int]] = []
    for name, tokens in parts:
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1] + tokens)
        else:
            runs.append((name, tokens))
    return tuple(runs)


@dataclass(frozen=True)
class StoreStats:
    """Counts of tokens since the store was opened, and the state of its tiers, fastest first.

    Callers of `get` requested ``asked_tokens`` and got ``hit_tokens``. `put` stored ``put_tokens``,
    skipped ``skipped_tokens`` that were stored before, and dropped ``dropped_tokens`` for lack of
    room. ``unread_tokens`` of answers were not stored because answers like them are never read
    again.
    """

    gets: int
    asked_tokens: int
    hit_tokens: int
    puts: int
    put_tokens: int
    skipped_tokens: int
    dropped_tokens: int
    unread_tokens: int
    tiers: tuple[TierStats, ...]

    @property
    def hit_rate(self) -> float:
        """``hit_tokens / asked_tokens``; 0 before the first get."""
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0

    def as_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        return asdict(self) | {"hit_rate": self.hit_rate}


class StoreCounters:
    """Running counts for `StoreStats`. Thread safety: all methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(
            ("gets", "asked_tokens", "hit_tokens",
             "puts", "put_tokens", "skipped_tokens", "dropped_tokens", "unread_tokens"), 0
        )  # fmt: skip

    def count(self, **more: int) -> None:
        """Add to several counts at once."""
        with self._lock:
            for name, amount in more.items():
                self._counts[name] += amount

    def stats(self, tiers: tuple[TierStats, ...]) -> StoreStats:
        """Return all counts at one moment, with these tiers."""
        with self._lock:
            return StoreStats(tiers=tiers, **self._counts)


def tier_runs(tiered: TieredStore, blocks: Sequence[bytes]) -> list[tuple[int, str]]:
    """Return the tiers that ``blocks`` would be read from, in runs: the end of each, and a name."""
    memory, tiers = tiered.memory, tiered.tiers
    runs: list[tuple[int, str]] = []
    at = 0
    while at < len(blocks):
        name, end = memory.name, at + 1
        if blocks[at] in memory:
            end = at + max(1, memory.catalogue.leading(blocks[at:]))
        elif tiers:
            (held,) = tiered.holders(blocks[at : at + 1])
            tier = tiers[min(held[0], len(tiers)) - 1] if held and held[0] else tiers[-1]
            name, there = tier.name, 1
            if held and tier.serves_all:
                there = tier.catalogue.leading(blocks[at:])
            while end < at + there and blocks[end] not in memory:
                end += 1
        if runs and runs[-1][1] == name:
            runs.pop()
        runs.append((end, name))
        at = end
    return runs
