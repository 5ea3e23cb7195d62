"""`FetchPlanner`: which blocks of waiting conversations to move before a request needs it.

Some go back into memory before their conversation returns; others are written down before they have
to leave memory. A store performs the moves with bytes in the background
(`kvkeep.store.tiers.fetch_back`), a replay on numbers (`kvkeep.bench.replay.tiers`).
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.core.keys import SPACE_BYTES
from kvkeep.core.returns import AGES, BUCKETS, bucket_of
from kvkeep.store.tiers.planner import HEADROOM, Copy, Demote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvkeep.core.returns import Wait
    from kvkeep.store.tiers.block_waits import BlockWaits
    from kvkeep.store.tiers.catalogue import Catalogue
    from kvkeep.store.tiers.planner import Planner

__all__ = ["PAUSE", "Fetch", "FetchMoves", "FetchPlanner"]

PAUSE: Final = 1.0
"""Seconds between two rounds of fetches, at least."""
_MARGIN: Final = 2.0
"""How much more a block is worth than the one evicted for it, so that they do not change places."""
_MOST: Final = 4096  # conversations
_MOST_BLOCKS: Final = 1 << 17  # of all conversations
_MOST_AT_ONCE: Final = 4096  # blocks a round
_MOST_FAILED: Final = 4  # conversations of which a block could not be fetched, a round
_MOST_AHEAD: Final = 0.25  # of the blocks in memory that may be written ahead


class Fetch(NamedTuple):
    """Blocks of a waiting conversation that tiers have and memory has not, in the prompt's order.

    ``worth`` is what keeping them is worth, in returns a second. ``levels`` are those of the tiers,
    ``sizes`` the bytes of the records in memory.
    """

    worth: float
    blocks: list[bytes]
    levels: list[int]
    sizes: list[int]


class _Waiting(NamedTuple):
    blocks: Sequence[bytes]
    sizes: Sequence[int] | int


class FetchPlanner:
    """Plans what to fetch back: conversations that are worth most first, each from its beginning.

    Thread safety: all methods. Memory: up to 4,096 conversations and 131,072 blocks, of which it
    keeps references; beyond, those that wait longest are not fetched. Cost: a plan takes 1 µs a
    conversation and 0.05 µs a block.
    """

    def __init__(self, waits: BlockWaits) -> None:
        self._waits = waits
        self._lock = threading.Lock()
        self._known: OrderedDict[Wait, _Waiting] = OrderedDict()
        self._blocks = 0
        self.due = math.inf
        """When to plan again if no request comes before, by the clock of the waits."""

    def left(self) -> float:
        """Return the seconds until `due`, 0 if that has passed."""
        return max(0.0, self.due - self._waits.clock())

    def interrupted(self) -> None:
        """Plan again after `PAUSE`: not all that was planned could be fetched."""
        self.due = min(self.due, self._waits.clock() + PAUSE)

    def __len__(self) -> int:
        """Return the number of conversations that are known."""
        return len(self._known)

    def begin(self, wait: Wait, blocks: Sequence[bytes], sizes: Sequence[int | None]) -> None:
        """Record that the conversation of ``wait`` waits at ``blocks``.

        ``sizes`` are the bytes of their records in memory, None where memory lacks a block. Such a
        block is as large as the others if these are all alike; else it is not fetched, nor are
        those behind it.
        """
        known = {size for size in sizes if size is not None}
        if not known:
            return
        if len(known) == 1:
            new = _Waiting(tuple(blocks), known.pop())
        else:
            there = [size for size in sizes[: _first_none(sizes)] if size is not None]
            new = _Waiting(tuple(blocks[: len(there)]), there)
        with self._lock:
            self._known[wait] = new
            self._blocks += len(new.blocks)
            while len(self._known) > _MOST or self._blocks > _MOST_BLOCKS:
                self._drop(next(iter(self._known)))

    def _drop(self, wait: Wait) -> None:
        self._blocks -= len(self._known.pop(wait).blocks)

    def plan(self, memory: Catalogue, level_of: Callable[[bytes], int | None]) -> list[Fetch]:
        """Return what could be fetched back, most valuable first; 4,096 blocks at most.

        ``level_of`` returns the level that serves a block now, None if there is none. Sets `due`.
        """
        with self._lock:
            for wait in [wait for wait in self._known if wait.over]:
                self._drop(wait)
            known = list(self._known.items())
        now = self._waits.clock()
        self.due = math.inf
        found: list[tuple[float, _Waiting, int]] = []
        for wait, waiting in known:
            begin = memory.leading(waiting.blocks)
            if begin == len(waiting.blocks) or not level_of(waiting.blocks[begin]):
                continue
            found.append((self._waits.worth(wait), waiting, begin))
            bucket = bucket_of(now - wait.since)
            if bucket + 1 < BUCKETS:
                self.due = min(self.due, wait.since + AGES[bucket + 1])
        self.due = max(self.due, now + PAUSE)
        found.sort(key=lambda one: -one[0])
        plan: list[Fetch] = []
        room = _MOST_AT_ONCE
        for worth, waiting, begin in found:
            if not room:
                break
            fetch = _fetch(worth, waiting, begin, room, level_of)
            room -= len(fetch.blocks)
            plan.append(fetch)
        return plan

    def leaving(
        self, memory: Catalogue, has_copy: Callable[[bytes], bool], most_worth: float
    ) -> Iterator[bytes]:
        """Yield blocks that memory is going to evict and no tier has.

        These are of conversations that are worth ``most_worth`` at most, the least valuable first,
        each from its end on. ``has_copy`` returns whether a tier has a block. Blocks that are held
        or pinned, or for which a conversation of more worth waits, are left out.
        """
        with self._lock:
            known = [(wait, one.blocks) for wait, one in self._known.items() if not wait.over]
        worths = [(self._waits.worth(wait), blocks) for wait, blocks in known]
        found = [one for one in worths if one[0] <= most_worth]
        found.sort(key=lambda one: one[0])
        for _, blocks in found:
            here = blocks[: memory.leading(blocks)]
            for block in reversed(memory.waiting.evictable(here)):
                if not has_copy(block) and self.worth_of(block) <= most_worth:
                    yield block

    def worth_of(self, block: bytes) -> float:
        """Return what ``block`` is worth to the conversation that makes most of it; 0 for none."""
        wait, _ = self._waits.best(block)
        return 0.0 if wait is None else self._waits.worth(wait)


def _first_none(sizes: Sequence[int | None]) -> int:
    return next((at for at, size in enumerate(sizes) if size is None), len(sizes))


def _fetch(
    worth: float,
    waiting: _Waiting,
    begin: int,
    most: int,
    level_of: Callable[[bytes], int | None],
) -> Fetch:
    """Return the blocks from ``begin`` on that only tiers have, up to the first that is lost."""
    fetch = Fetch(worth, [], [], [])
    for at in range(begin, len(waiting.blocks)):
        level = level_of(waiting.blocks[at])
        if level is None or len(fetch.blocks) == most:
            break
        if level:
            size = waiting.sizes if isinstance(waiting.sizes, int) else waiting.sizes[at]
            fetch.blocks.append(waiting.blocks[at])
            fetch.levels.append(level)
            fetch.sizes.append(size)
    return fetch


class FetchMoves(ABC):
    """Fetches blocks back into memory, as long as they are worth more than what goes for them.

    Where evicted blocks have to be written to a tier first, it writes those ahead that go next.

    Subclasses implement the abstract methods.
    """

    def __init__(self, fetches: FetchPlanner, planner: Planner, memory: Catalogue) -> None:
        self.fetches = fetches
        self._planner = planner
        self._memory = memory
        self._ahead: dict[bytes, int] = {}  # written ahead and in memory → the tier that has it

    def fetch_back(self) -> int:
        """Do one round of fetches; return how many blocks were fetched.

        Where memory or a quota is full, a block is fetched if it is worth twice as much as the
        next victim. A conversation of which a block cannot be fetched is left for the next round;
        after four of them, so are all others.
        """
        count = failed = 0
        for fetch in self.fetches.plan(self._memory, self.level_of):
            for block, level, size in zip(fetch.blocks, fetch.levels, fetch.sizes, strict=True):
                if fetch.worth <= self._bar(block, size):
                    break
                if not self._planner.promote(block, level).stays:
                    break
                if block in self._memory:
                    continue
                if not self.fetch(block, level, size):
                    failed += 1
                    break
                self._memory.waiting.fetched(block)
                count += 1
            if failed == _MOST_FAILED:
                break
        if failed:
            self.fetches.interrupted()
        return count

    def _bar(self, block: bytes, size: int) -> float:
        """Return what ``block`` of ``size`` bytes has to be worth more than, to be fetched."""
        waiting, space = self._memory.waiting, block[:SPACE_BYTES]
        over = self._memory.over_quota(space, size)
        if over < 0:
            return math.inf  # it never fits
        if not over and self.has_room(size):
            return 0.0
        least = waiting.least(space if over else None)
        return math.inf if least is None else _MARGIN * max(0.0, least)

    def write_ahead(self) -> int:
        """Do one round of writes of what memory evicts next; return how many were written.

        Nothing is written while memory takes a tenth more, nor where evictions write nothing.
        """
        capacity = self._memory.budget or 0
        least = self._memory.waiting.least()
        if (
            least is None
            or not self._planner.excess(capacity, capacity)
            or self.has_room(int(capacity * HEADROOM))
        ):
            return 0
        bar = _MARGIN * max(0.0, least)
        self._leave_again(bar)
        count = 0
        room = _MOST_AHEAD * len(self._memory) - len(self._ahead)
        for block in self.fetches.leaving(self._memory, self.has_copy, bar):
            move = self._planner.save(block)
            if not isinstance(move, Demote):
                continue
            if count >= room:
                break
            if not self.copy(Copy(block, move.target)):
                self.fetches.interrupted()
                break
            self._ahead[block] = move.target
            count += 1
        return count

    def _leave_again(self, bar: float) -> None:
        """Let tiers delete what was written ahead and is worth keeping in memory by now.

        What left memory is forgotten, and what came back since and left its tier for that.
        """
        for block, level in list(self._ahead.items()):
            if block not in self._memory or not self.has_copy(block):
                del self._ahead[block]
            elif bar and self.fetches.worth_of(block) > _MARGIN * bar:
                if self._planner.leaves(level):
                    self.move_out(block, level)
                del self._ahead[block]

    @abstractmethod
    def level_of(self, block: bytes) -> int | None:
        """Return the fastest level that serves ``block`` now, None for none."""

    @abstractmethod
    def has_copy(self, block: bytes) -> bool:
        """Whether a tier has ``block``, or is about to write or delete it."""

    @abstractmethod
    def has_room(self, size: int) -> bool:
        """Whether memory takes a record of ``size`` bytes without evicting another."""

    @abstractmethod
    def fetch(self, block: bytes, level: int, size: int) -> bool:
        """Read ``block`` from tier ``level`` into memory; False if the round has to end."""

    @abstractmethod
    def copy(self, move: Copy) -> bool:
        """Write a block that stays in memory to a tier; False if the round has to end."""

    @abstractmethod
    def move_out(self, block: bytes, level: int) -> None:
        """Delete ``block``, which memory has, from tier ``level``."""
