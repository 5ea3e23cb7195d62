"""`TierSimulator`: the moves of a `TieredStore`, performed on numbers."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.store.tiers.catalogue import Catalogue
from kvkeep.store.tiers.tier_returns import TierReturns
from kvkeep.store.tiers.tiering import Planner
from kvkeep.store.tiers.two_queues import tier_policies

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from kvkeep.store.tiers import TenantWeights, TieringPolicy

__all__ = ["Level", "LevelStats", "TierSimulator"]


@dataclass(frozen=True, slots=True)
class Level:
    """A simulated tier: its name, its capacity in blocks, and the name of its eviction policy."""

    name: str
    blocks: int
    eviction: str = "lru"

    def __post_init__(self) -> None:
        whole(f"blocks of {self.name}", self.blocks, 1)
        if self.eviction not in tier_policies():
            raise InvalidValue(
                f"no eviction policy {self.eviction!r}; there are {', '.join(tier_policies())}"
            )


@dataclass(frozen=True, slots=True)
class LevelStats:
    """A level at one moment, in blocks; those from ``hits`` on are totals.

    ``hits`` were found in this level, ``writes`` were added to it (to memory also by reads),
    ``evictions`` were deleted to make room, ``demotions`` of these moved one level down.
    """

    name: str
    capacity: int
    blocks: int
    hits: int
    writes: int
    evictions: int
    demotions: int


class TierSimulator:
    """The tiers of a store without bytes, threads and time.

    The moves and their order are those of a store (`Planner`), and so are the catalogues. No tier
    fails or lags behind, so memory is used to the last block; with ``ahead`` a tenth of it is kept
    free where evicted blocks move down, as a store does.

    Thread safety: none. Cost: 5 to 10 µs a block.

    Arguments:
        levels: memory first.
        policy: the tiering policy.
        clock: returns seconds.
        ahead: demote from memory before its room is needed.
        shares: weights by which tenants share each level; None: they do not.
        lost: called with a level and the blocks that it evicted and that no level has any more.

    Attributes:
        returns: follows conversations, if the ends of requests are reported to it.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        policy: TieringPolicy,
        clock: Callable[[], float] = time.monotonic,
        *,
        ahead: bool = False,
        shares: TenantWeights | None = None,
        lost: Callable[[int, list[bytes]], None] = lambda _level, _blocks: None,
    ) -> None:
        if not levels:
            raise InvalidValue("there is no level; memory, at least, is needed")
        self.ahead = ahead
        self._lost = lost
        self._new = False  # whether no block of the prompt that is put was stored before
        self._levels = [_SimulatedLevel(level, clock, shares) for level in levels]
        self.returns = TierReturns([one.catalogue for one in self._levels], clock)
        self._below = range(1, len(levels))
        self.planner = Planner(policy, len(levels) - 1)
        self.memory = self._levels[0].catalogue

    def request(self, blocks: Sequence[bytes]) -> list[int]:
        """Read the stored beginning of a prompt, and store the rest; returns as `find`."""
        found = self.find(blocks)
        self.put(blocks[sum(found) :])
        return found

    def find(self, blocks: Sequence[bytes]) -> list[int]:
        """Read leading ``blocks``; return how many came from each level, memory first."""
        levels: list[int] = []
        for block in blocks:
            level = self.level_of(block)
            if level is None:
                break
            levels.append(level)
        count = self._read(blocks, levels)
        found = [0] * len(self._levels)
        for level in levels[:count]:
            found[level] += 1
        for one, hits in zip(self._levels, found, strict=True):
            one.hits += hits
        return found

    def level_of(self, block: bytes) -> int | None:
        """Return the fastest level that has ``block``, None for none."""
        for level, one in enumerate(self._levels):
            if block in one.catalogue:
                return level
        return None

    # --- a read ----------------------------------------------------------------------------------

    def _read(self, blocks: Sequence[bytes], levels: Sequence[int]) -> int:
        """Read ``blocks``, which are at ``levels``; return how many leading ones were read."""
        mixed = any(levels) and not all(levels)
        above = [block for block, level in zip(blocks, levels, strict=False) if mixed and not level]
        held: list[bytes] = []
        self.memory.holds.hold_all(above, held)
        try:
            count = self._fetch(blocks, levels)
        finally:
            self.memory.holds.free_all(held)
        self._use(blocks[:count], ())
        for block in self.planner.read(blocks[:count]):
            for level in self._below:
                if block in self.memory:
                    self._add(level, [block])
        return count

    def _fetch(self, blocks: Sequence[bytes], levels: Sequence[int]) -> int:
        for count, (block, level) in enumerate(zip(blocks, levels, strict=False)):
            if level and not self.promote(block, level):
                return count  # evicted to make room for the blocks before it
        return len(levels)

    def promote(self, block: bytes, level: int) -> bool:
        """Read ``block`` from ``level``, into memory if it is to stay; False if it is not there."""
        source = self._levels[level].catalogue
        if block not in source:
            return False
        policy = self.planner.policy
        if policy.keeps_reads:
            self._add(0, [block])
            if policy.exclusive:
                source.forget(block)
            self._demote_ahead()
        return True

    # --- a put -----------------------------------------------------------------------------------

    def put(self, blocks: Sequence[bytes]) -> None:
        """Store ``blocks``, in order; for those already stored, note a use."""
        held: list[bytes] = []
        used: list[bytes] = []
        new: set[bytes] = set()
        with self._holding(blocks):
            try:
                while len(used) < len(blocks):
                    if used:
                        self._demote_ahead()
                    level, run = self._place(blocks, len(used))
                    admitted = self.planner.store(run)
                    used += run
                    if level is None:
                        new.update(run)
                    if not level:
                        self.memory.holds.hold_all(self._copy_down(run, admitted), held)
                self._use(used, new)
            finally:
                self.memory.holds.free_all(held)
        self._demote_ahead()

    @contextmanager
    def _holding(self, blocks: Sequence[bytes]) -> Iterator[None]:
        self._new = all(self.level_of(block) is None for block in blocks)
        below = [] if self._new else self._levels[1:]
        for one in below:
            one.hold(blocks[: one.level.blocks])  # as `PromptHolds` does
        try:
            yield
        finally:
            for one in self._levels[1:]:
                one.free()

    def _place(self, blocks: Sequence[bytes], at: int) -> tuple[int | None, Sequence[bytes]]:
        """Place blocks from position ``at`` on; return where they were, None: nowhere, and them."""
        # Without any stored block, one run gives the same result as one run per block.
        run = blocks if self._new else blocks[at : at + 1]
        level = None if self._new else self.level_of(run[0])
        if level is None:
            self._add(0, run)
        return level, run

    def _copy_down(self, run: Sequence[bytes], admitted: Sequence[bool]) -> Sequence[bytes]:
        """Write the admitted blocks of a run to tiers; return those that memory alone has."""
        alone = len(run) == 1
        blocks = [block for block, now in zip(run, admitted, strict=True) if now]
        for level in self._below:
            self._add(level, blocks)
            if alone:
                self._levels[level].hold(blocks)
        if not alone:
            return ()  # the run is the whole prompt: no later block needs it
        below = any(run[0] in self._levels[level].catalogue for level in self._below)
        return () if below else run

    def _demote_ahead(self) -> None:
        memory = self._levels[0]
        excess = self.planner.excess(memory.level.blocks, memory.catalogue.total_bytes)
        if self.ahead and excess:
            self._evict(0, excess)

    def _use(self, blocks: Sequence[bytes], new: Container[bytes]) -> None:
        self.returns.used(blocks, new)
        for one in self._levels:
            one.catalogue.used(blocks, new=new)

    # --- making room -----------------------------------------------------------------------------

    def _add(self, level: int, blocks: Sequence[bytes]) -> None:
        """Add ``blocks`` to ``level``, as many as it has room for."""
        one = self._levels[level]
        catalogue, room = one.catalogue, one.level.blocks
        blocks = [block for block in blocks if block not in catalogue][:room]
        short = len(blocks) + catalogue.total_bytes - room
        if short > 0:
            self._evict(level, short)
            blocks = blocks[: room - catalogue.total_bytes]  # held blocks are not evicted
        catalogue.add_all(blocks, 1)
        one.writes += len(blocks)

    def _evict(self, level: int, needed: int) -> None:
        one = self._levels[level]
        victims = one.catalogue.victims(needed)
        one.evictions += len(victims)
        down: dict[int, list[bytes]] = {}
        dropped: list[bytes] = []
        for block in victims:
            target, _ = self.planner.below(block, level)
            if target is None:
                dropped.append(block)
            elif block not in self._levels[target].catalogue:
                down.setdefault(target, []).append(block)
        for target, blocks in down.items():
            before = self._levels[target].writes
            self._add(target, blocks)
            one.demotions += self._levels[target].writes - before
            dropped += blocks
        gone = [block for block in dropped if self.level_of(block) is None]
        if gone:
            self._lost(level, gone)

    # --- figures ---------------------------------------------------------------------------------

    def stats(self) -> list[LevelStats]:
        """Return the figures of all levels at this moment, memory first."""
        return [
            LevelStats(
                one.level.name,
                one.level.blocks,
                len(one.catalogue),
                one.hits,
                one.writes,
                one.evictions,
                one.demotions,
            )
            for one in self._levels
        ]

    def check(self) -> None:
        """Recount everything; an AssertionError is a bug of kvkeep."""
        for one in self._levels:
            one.catalogue.check()
            assert one.catalogue.total_bytes == len(one.catalogue) <= one.level.blocks

    def __repr__(self) -> str:
        levels = ", ".join(f"{one.level.name} {one.level.blocks}" for one in self._levels)
        return f"<TierSimulator {levels}, {self.planner.policy!r}>"


class _SimulatedLevel:
    """A level, the catalogue of its blocks, of one byte each, and its counters."""

    def __init__(
        self, level: Level, clock: Callable[[], float], shares: TenantWeights | None
    ) -> None:
        self.level = level
        self.catalogue = Catalogue(
            tier_policies()[level.eviction], clock=clock, budget=level.blocks, shares=shares
        )
        self.hits = self.writes = self.evictions = self.demotions = 0
        self._held: list[bytes] = []

    def hold(self, blocks: Sequence[bytes]) -> None:
        """Protect those of ``blocks`` that are in this level from eviction until `free`."""
        self.catalogue.holds.hold_all(blocks, self._held)

    def free(self) -> None:
        """Allow all held blocks to be evicted again."""
        self.catalogue.holds.free_all(self._held)
        self._held = []
