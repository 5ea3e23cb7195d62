"""Tiers in replay: the planner and the catalogues of the store, over places that are numbers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.errors import InvalidValue, whole
from kvkeep.eviction import POLICIES
from kvkeep.tiers.catalogue import Catalogue
from kvkeep.tiers.plan import Planner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.tiers import TieringPolicy

__all__ = ["Level", "LevelStats", "TierSimulator", "Touched"]


@dataclass(frozen=True, slots=True)
class Level:
    """A tier to be simulated.

    ``blocks`` is the room it has, ``eviction`` the name of its policy, as in a tier's URL.
    """

    name: str
    blocks: int
    eviction: str = "lru"
    bandwidth_bytes_s: float | None = None


@dataclass(frozen=True, slots=True)
class Touched:
    found: tuple[int, ...]

    @property
    def blocks(self) -> int:
        return sum(self.found)


@dataclass(frozen=True, slots=True)
class LevelStats:
    name: str
    blocks: int
    capacity: int
    hits: int
    writes: int
    evictions: int
    demotions: int


class _Place:
    def __init__(self, level: Level, clock: Callable[[], float]) -> None:
        self.level = level
        self.room = level.blocks
        self.catalogue = Catalogue(POLICIES[level.eviction], clock=clock, budget=level.blocks)
        self.hits = self.writes = self.evictions = self.demotions = 0


class TierSimulator:
    def __init__(
        self,
        levels: Sequence[Level],
        policy: TieringPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places = [_Place(level, clock) for level in levels]
        self._front, *self._below = self._places
        self.planner = Planner(policy, len(self._below))

    def request(self, keys: Sequence[bytes]) -> Touched:
        found = [0] * len(self._places)
        front = self._front.catalogue
        located = self._locate(keys)
        self._asked(keys[:located])
        count = 0
        for block in keys[:located]:
            if block in front:
                found[0] += 1
            else:
                level = next((l for l, p in enumerate(self._below, 1) if block in p.catalogue), 0)
                if not level:
                    break
                found[level] += 1
                if self.planner.promotes(level, block):
                    self._promote(block, level)
            count += 1
        if count:
            self._used(keys[:count])
            for block in keys[:count]:
                for level in self.planner.read(block):
                    if block in front:
                        self._add(level, [block])
        for place, hits in zip(self._places, found, strict=True):
            place.hits += hits
        self._put(keys[count:])
        return Touched(tuple(found))

    def _locate(self, keys: Sequence[bytes]) -> int:
        count = 0
        while count < len(keys):
            before = count
            for place in self._places:
                count += place.catalogue.leading(keys[count:])
            if count == before:
                break
        return count

    def _asked(self, blocks: Sequence[bytes]) -> None:
        if self.planner.due():
            self.planner.fit([place.room for place in self._places])
        self.planner.asked(blocks)
        for place in self._places:
            place.catalogue.asked(blocks)

    def _put(self, blocks: Sequence[bytes]) -> None:
        if not blocks:
            return
        self._asked(blocks)
        planner = self.planner
        touches = [planner.put(block) for block in blocks]
        self._add(0, blocks[: self._front.room])
        for level in range(1, len(self._places)):
            admitted = [
                block
                for block, count in zip(blocks, touches, strict=True)
                if planner.admits(level, count)
            ]
            self._add(level, admitted[: self._places[level].room])
        self._used(blocks, new=blocks)
        self._demote_ahead()

    def _promote(self, block: bytes, level: int) -> None:
        self._add(0, [block])
        if self.planner.leaves(level):
            self._places[level].catalogue.forget(block)
        self._demote_ahead()

    def _add(self, level: int, blocks: Sequence[bytes]) -> None:
        place = self._places[level]
        catalogue = place.catalogue
        blocks = [block for block in blocks if block not in catalogue]
        needed = len(blocks) - (place.room - catalogue.total_bytes)
        if needed > 0:
            self._evict(level, needed)
        catalogue.add_all(blocks, 1)
        place.writes += len(blocks)

    def _demote_ahead(self) -> None:
        excess = 0
        if HEAD: excess = self.planner.excess(self._front.room, self._front.catalogue.total_bytes)
        if excess:
            self._evict(0, excess)

    def _evict(self, level: int, needed: int) -> None:
        place = self._places[level]
        victims = place.catalogue.victims(needed)
        place.evictions += len(victims)
        down: dict[int, list[bytes]] = {}
        for block in victims:
            target = self.planner.demotes(level, block)
            if target is not None:
                down.setdefault(target, []).append(block)
        for target, blocks in down.items():
            before = self._places[target].writes
            self._add(target, blocks)
            place.demotions += self._places[target].writes - before

    def _used(self, blocks: Sequence[bytes], new: Sequence[bytes] = ()) -> None:
        fresh = set(new)
        for place in self._places:
            place.catalogue.used(blocks, new=fresh)

    def writes(self, level: int) -> int:
        return self._places[level].writes


HEAD = False
