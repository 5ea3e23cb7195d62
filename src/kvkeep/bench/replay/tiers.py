"""Tiers in replay: planner and catalogues of `TieredStore`, over places that are numbers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.eviction import POLICIES
from kvkeep.store.tiers.catalogue import Catalogue
from kvkeep.store.tiers.plan import Planner

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from kvkeep.store.tiers import TieringPolicy

__all__ = ["Level", "LevelStats", "TierSimulator", "Touched"]


@dataclass(frozen=True, slots=True)
class Level:
    """A tier to be simulated: a name for people, and how many ``blocks`` it has room for.

    ``eviction`` is the name of its policy, as ``policy=`` in a tier's URL.
    """

    name: str
    blocks: int
    eviction: str = "lru"

    def __post_init__(self) -> None:
        whole(f"blocks of {self.name}", self.blocks, 1)
        if self.eviction not in POLICIES:
            raise InvalidValue(
                f"no eviction policy {self.eviction!r}; there are {', '.join(POLICIES)}"
            )


@dataclass(frozen=True, slots=True)
class Touched:
    """What a request found: leading blocks, by the level that each came from, memory first."""

    found: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """Leading blocks that were found."""
        return sum(self.found)


@dataclass(frozen=True, slots=True)
class LevelStats:
    """A level at one moment, in blocks; the last four are totals.

    ``hits`` were found here, ``writes`` came here (in memory: by reading them, too), ``evictions``
    had to go, ``demotions`` of these moved one down.
    """

    name: str
    capacity: int
    blocks: int
    hits: int
    writes: int
    evictions: int
    demotions: int


class TierSimulator:
    """A store's tiers without bytes, threads and time: each block is a number, each move is done.

    What moves where is asked of `Planner`, what goes first of `Catalogue`, at the steps at which
    `TieredStore` asks them; nothing of either is written again here. Every place keeps up: nothing
    is dropped and nothing fails. Therefore memory is used to the last block; ``ahead`` keeps a
    tenth of it free where evicted blocks move down, as the store has to.

    ``levels`` begins with memory. ``policy`` may keep a state: it is not for a second one.
    ``clock`` gives seconds. ``lost`` is told of blocks that had to go from a level and are nowhere
    else. Blocks are named as in the store: 16 bytes of a namespace, then a key
    that is chained.

    Thread safety: none. Cost: 5 to 10 µs a block.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        policy: TieringPolicy,
        clock: Callable[[], float] = time.monotonic,
        *,
        ahead: bool = False,
        lost: Callable[[int, list[bytes]], None] | None = None,
    ) -> None:
        if not levels:
            raise InvalidValue("there is no level; memory, at least, is needed")
        self._lost = lost
        self.ahead = ahead
        self.planner = Planner(policy, len(levels) - 1)
        self._places = [_Place(level, clock) for level in levels]
        self._memory = self._places[0].catalogue

    def request(self, keys: Sequence[bytes]) -> Touched:
        """A prompt made of these blocks comes: its beginning is read, what is not there is put."""
        touched = self.find(keys)
        self.put(keys[touched.blocks :])
        return touched

    # --- reading, as TieredStore.read ------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> Touched:
        """Read leading blocks, up to the first that is nowhere."""
        levels = self._locate(keys)
        self._asked(keys[: len(levels)])
        found = [0] * len(self._places)
        count = 0
        above = [block for block, level in zip(keys, levels, strict=False) if not level]
        for block in above:
            self._memory.hold(block)
        for block, level in zip(keys, levels, strict=False):
            if level and not self._read(block, level):
                break  # what came up pushed it out
            found[level] += 1
            count += 1
        for block in above:
            self._memory.free(block)
        for place, hits in zip(self._places, found, strict=True):
            place.hits += hits
        blocks = keys[:count]
        self._used(blocks)
        for block in blocks:
            for level in self.planner.read(block):
                if block in self._memory:
                    self._add(level, [block])
        return Touched(tuple(found))

    def _locate(self, keys: Sequence[bytes]) -> list[int]:
        levels: list[int] = []
        for block in keys:
            level = self.level_of(block)
            if level is None:
                break
            levels.append(level)
        return levels

    def level_of(self, block: bytes) -> int | None:
        """Where ``block`` is, the fastest of these; None: nowhere."""
        for level, place in enumerate(self._places):
            if block in place.catalogue:
                return level
        return None

    def _read(self, block: bytes, level: int) -> bool:
        """Read ``block`` from below memory; whether it is still there."""
        place = self._places[level]
        if block not in place.catalogue:
            return False
        if self.planner.promotes(level, block):
            self._add(0, [block])
            if self.planner.leaves(level):
                place.catalogue.forget(block)
            self._demote_ahead()
        return True

    # --- writing, as TieredStore.write -----------------------------------------------------------

    def put(self, keys: Sequence[bytes]) -> None:
        """Keep blocks, in order; what is there already is used."""
        if not keys:
            return
        self._asked(keys)
        if all(self.level_of(block) is None for block in keys):
            self._add(0, keys)  # all at once: it is much faster, and comes to the same
            self._write_below([(block, self.planner.put(block)) for block in keys])
            self._used(keys, set(keys))
        else:
            self._put_each(keys)
        self._demote_ahead()

    def _put_each(self, blocks: Sequence[bytes]) -> None:
        """Keep blocks of which some are there, behind a gap; then all of them are used."""
        new, alone = set(), []
        for place in self._places[1:]:
            place.keep(blocks[: place.level.blocks])  # a prompt keeps its own beginning
        for block in blocks:
            touches = self.planner.put(block)
            level = self.level_of(block)
            if level:
                continue  # what lies below alone is not read to be written
            if level is None:
                self._add(0, [block])
                new.add(block)
            self._write_below([(block, touches)], keep=True)
            if not any(block in place.catalogue for place in self._places[1:]):
                self._memory.hold(block)  # what follows must not push it out
                alone.append(block)
            self._demote_ahead()
        for block in alone:
            self._memory.free(block)
        self._used(blocks, new)
        for place in self._places[1:]:
            place.let_go()

    def _write_below(self, blocks: Sequence[tuple[bytes, int]], *, keep: bool = False) -> None:
        """Blocks in memory, with their touches, go to the tiers that admit them."""
        for level in range(1, len(self._places)):
            admits = partial(self.planner.admits, level)
            self._add(level, [block for block, touches in blocks if admits(touches)], keep=keep)

    # --- making room -----------------------------------------------------------------------------

    def _add(self, level: int, blocks: Sequence[bytes], *, keep: bool = False) -> None:
        """Have ``level`` hold ``blocks``, as many as it can, and keep them until it may let go."""
        place = self._places[level]
        catalogue, room = place.catalogue, place.level.blocks
        blocks = [block for block in blocks if block not in catalogue][:room]
        short = len(blocks) + catalogue.total_bytes - room
        if short > 0:
            self._evict(level, short)
            blocks = blocks[: room - catalogue.total_bytes]  # some may be kept
        catalogue.add_all(blocks, 1)
        if keep:
            place.keep(blocks)
        place.writes += len(blocks)

    def _demote_ahead(self) -> None:
        if self.ahead:
            memory = self._places[0]
            excess = self.planner.excess(memory.level.blocks, self._memory.total_bytes)
            if excess:
                self._evict(0, excess)

    def _evict(self, level: int, needed: int) -> None:
        place = self._places[level]
        victims = place.catalogue.victims(needed)
        place.evictions += len(victims)
        down: dict[int, list[bytes]] = {}
        stay: list[bytes] = []
        for block in victims:
            target = self.planner.demotes(level, block)
            if target is None:
                stay.append(block)
            elif block not in self._places[target].catalogue:
                down.setdefault(target, []).append(block)
        if self._lost is not None:
            gone = [block for block in stay if self.level_of(block) is None]
            if gone:
                self._lost(level, gone)
        for target, blocks in down.items():
            place.demotions += len(blocks)
            self._add(target, blocks)

    # --- who is told -----------------------------------------------------------------------------

    def _asked(self, blocks: Sequence[bytes]) -> None:
        if not blocks:
            return
        if self.planner.due():
            self.planner.fit([place.level.blocks for place in self._places])
        self.planner.asked(blocks)
        for place in self._places:
            place.catalogue.asked(blocks)

    def _used(self, blocks: Sequence[bytes], new: Container[bytes] = ()) -> None:
        for place in self._places:
            place.catalogue.used(blocks, new=new)

    # --- looking ---------------------------------------------------------------------------------

    def writes(self, level: int) -> int:
        """Blocks that came to ``level`` so far."""
        return self._places[level].writes

    def stats(self) -> list[LevelStats]:
        """All levels at this moment, memory first."""
        return [
            LevelStats(
                place.level.name,
                place.level.blocks,
                len(place.catalogue),
                place.hits,
                place.writes,
                place.evictions,
                place.demotions,
            )
            for place in self._places
        ]

    def check(self) -> None:
        """Recount; an AssertionError is a fault of kvkeep."""
        for place in self._places:
            place.catalogue.check()
            assert place.catalogue.total_bytes == len(place.catalogue) <= place.level.blocks

    def __repr__(self) -> str:
        levels = ", ".join(f"{place.level.name} {place.level.blocks}" for place in self._places)
        return f"<TierSimulator {levels}, {self.planner.policy!r}>"


class _Place:
    """A level, what it holds and what it counted."""

    def __init__(self, level: Level, clock: Callable[[], float]) -> None:
        self.level = level
        # Of one byte each: bytes are blocks here.
        self.catalogue = Catalogue(POLICIES[level.eviction], clock=clock, budget=level.blocks)
        self.hits = self.writes = self.evictions = self.demotions = 0
        self._kept: list[bytes] = []

    def keep(self, blocks: Sequence[bytes]) -> None:
        """What is here of ``blocks`` does not go before `let_go`."""
        self.catalogue.hold_all(blocks, self._kept)

    def let_go(self) -> None:
        """Whatever was kept may go again."""
        self.catalogue.free_all(self._kept)
        self._kept = []
