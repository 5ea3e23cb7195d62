"""`Levels`: the levels of a store: memory, and the tiers below it."""

from __future__ import annotations

import time
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex

from kvkeep.store.tiers.loss_log import Loss
from kvkeep.store.tiers.record import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from kvkeep.store.tiers.front import FrontMemory, FrontOrder
    from kvkeep.store.tiers.loss_log import LossLog
    from kvkeep.store.tiers.planner import Planner
    from kvkeep.store.tiers.tier import Tier

__all__ = ["LevelNames", "Levels"]

_PROBES = (1, 16, 64, 256)  # blocks per query: few at first, because most prompts are missing
_NEVER = Loss("", "never", None, "")


class LevelNames(tuple[str, ...]):
    """The names of all levels, fastest first; a level beyond them has the name of the last.

    A block may have been found in a tier that was attached after the names were read.
    """

    __slots__ = ()

    def __getitem__(self, level: SupportsIndex) -> str:  # type: ignore[override]
        """Return the name of ``level``."""
        return super().__getitem__(min(int(level), len(self) - 1))


class _Table(NamedTuple):
    """The tiers at one moment, and what follows from them."""

    tiers: tuple[Tier, ...]
    active: tuple[Tier, ...]
    levels: tuple[tuple[int, Tier], ...]
    mixed: bool
    expiring: tuple[FrontMemory | Tier, ...]
    names: LevelNames


class Levels:
    """Finds blocks over all levels. Level 0 is memory, the others are ``tiers``, fastest first.

    Tiers may be attached and detached while they are used (`arrange`). So a level that was found,
    or planned, a moment ago may be that of another tier now: for reads it says only which tier to
    ask first, and a move then goes to a neighbour. There always is a tier if there ever was one.

    ``using`` is called with the arguments of `used`, before the order of blocks changes.

    Thread safety: all methods.
    """

    def __init__(
        self,
        memory: FrontMemory,
        tiers: Sequence[Tier],
        planner: Planner,
        losses: LossLog,
        using: Callable[[Sequence[bytes], Container[bytes]], object] = lambda _blocks, _new: None,
    ) -> None:
        self.memory = memory
        self.planner = planner
        self.losses = losses
        self._using = using
        self.arrange(tiers)
        planner.policy.attend(self.price_of)

    def arrange(self, active: Sequence[Tier], leaving: Sequence[Tier] = ()) -> None:
        """Have these tiers from now on, fastest first; those ``leaving`` are read, not written."""
        tiers = (*active, *leaving)
        places: tuple[FrontMemory | Tier, ...] = (self.memory, *tiers)
        self._table = _Table(
            tiers,
            tuple(active),
            tuple(enumerate(tiers, start=1)),
            len({tier.codec.exact for tier in tiers}) == 2,
            tuple(one for one in places if one.catalogue.ttl is not None),
            LevelNames((self.memory.name, *(tier.name for tier in tiers))),
        )
        self.planner.resize(len(active))

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that can be read, at this moment."""
        return self._table.tiers

    @property
    def active(self) -> tuple[Tier, ...]:
        """The leading ones of them, which are also written."""
        return self._table.active

    @property
    def mixed(self) -> bool:
        """Whether some tiers are exact and others are not."""
        return self._table.mixed

    @property
    def names(self) -> LevelNames:
        """The names of all levels, fastest first."""
        return self._table.names

    def tier(self, level: int) -> Tier:
        """Return the tier at ``level``, 1 or lower; the last one, if there are fewer by now."""
        tiers = self.tiers
        return tiers[min(level, len(tiers)) - 1]

    def target(self, level: int) -> Tier:
        """Return the tier that moves to ``level`` are written to, as `tier`, but not one leaving.

        So a move that was planned before a tier was detached goes to another one.
        """
        active = self.active
        return active[min(level, len(active)) - 1]

    def number(self, name: str) -> int | None:
        """Return the level of the tier ``name`` that is written; None: there is none any more."""
        return next((at for at, one in enumerate(self.active, start=1) if one.name == name), None)

    def level_of(self, block: bytes) -> int | None:
        """Return the fastest level known to serve ``block`` now, None for none; no I/O."""
        if block in self.memory:
            return 0
        for level, tier in self._table.levels:
            if tier.serves(block):
                return level
        return None

    def price_of(self, level: int) -> float:
        """Return the price at which the write budget of tier ``level`` lasts, 0 without one."""
        tiers = self.tiers
        budget = tiers[level - 1].backend.budget if level <= len(tiers) else None
        return 0.0 if budget is None else budget.price()

    def holders(self, block: bytes) -> list[int]:
        """Return all levels known to hold ``block``, fastest first; no I/O."""
        levels = [0] if block in self.memory else []
        return levels + [level for level, tier in self._table.levels if tier.knows(block)]

    def locate(self, blocks: Sequence[bytes], until: float | None = None) -> list[int]:
        """Return the level of each leading block, up to the first that is missing.

        Tiers that may hold unknown blocks are queried, until ``until`` (monotonic seconds) at most.
        """
        levels = [0] * self.memory.catalogue.leading(blocks)
        probed: dict[int, int] = {}  # position → level
        probes = 0
        while len(levels) < len(blocks):
            at = len(levels)
            level = self.level_of(blocks[at])
            if level is None:
                level = probed.get(at)
            if level is None:
                end = at + _PROBES[min(probes, len(_PROBES) - 1)]
                probes += 1
                probed |= self._probe(blocks[at:end], at, until)
                level = probed.get(at)
            if level is None:
                break
            levels.append(level)
        for tier in self.tiers:
            if not tier.queried and tier.breaker.any_blocks("read", "lookup"):
                tier.counters.count(skipped_calls=1)
        return levels

    def locate_each(self, blocks: Sequence[bytes], until: float | None = None) -> list[int | None]:
        """Return the level of each block, None for a missing one; queries tiers as `locate` does.

        Each tier is queried once, about all blocks that it may hold and faster ones lack.
        """
        found = [self.level_of(block) for block in blocks]
        for level, tier, until_here in self._to_query(until):
            missing = [at for at, known in enumerate(found) if known is None]
            if not missing:
                break
            here = tier.probe([blocks[at] for at in missing], until_here)
            for at in missing:
                if blocks[at] in here:
                    found[at] = level
        return found

    def _probe(self, blocks: Sequence[bytes], at: int, until: float | None) -> dict[int, int]:
        """Query the tiers, fastest first, each about the blocks that faster ones lack."""
        found: dict[int, int] = {}
        for level, tier, until_here in self._to_query(until):
            rest = blocks[len(found) :]
            here = tier.probe(rest, until_here)
            for _ in takewhile(here.__contains__, rest):
                found[at + len(found)] = level
            if len(found) == len(blocks):
                break
        return found

    def _to_query(self, until: float | None) -> Iterator[tuple[int, Tier, float | None]]:
        """Yield the tiers to query, and until when: each leaves time for those behind it."""
        tiers = [(level, tier) for level, tier in self._table.levels if tier.queried]
        for number, (level, tier) in enumerate(tiers):
            now = time.monotonic()
            share = None if until is None else now + (until - now) / (len(tiers) - number)
            yield level, tier, share

    def losses_of(self, blocks: Sequence[bytes], since: float | None) -> list[Loss | None]:
        """Return what happened to each block, None where it can be read; see `TieredStore`."""
        healthy: list[Tier] = []
        failing: list[tuple[Tier, Loss]] = []
        for tier in self.tiers:
            trouble = tier.health.trouble(since)
            if trouble is None:
                healthy.append(tier)
            else:
                failing.append((tier, trouble))
        return [self._loss(block, healthy, failing) for block in blocks]

    def _loss(
        self, block: bytes, healthy: list[Tier], failing: list[tuple[Tier, Loss]]
    ) -> Loss | None:
        if block in self.memory or any(tier.knows(block) for tier in healthy):
            return None
        last = self.losses.of(block)
        for tier, trouble in failing:
            if trouble.detail == "breaker" and not tier.health.unread(block):
                continue  # the breaker of another part of the backend is open
            # A tier that lost the block itself does not have it, whether it answers or not.
            lost_here = last is not None and last.tier == tier.name and not tier.knows(block)
            if tier.may_hold(block) and not lost_here:
                return trouble
        for place in self._table.expiring:
            ended = place.catalogue.expired_at(block)
            if ended is not None:
                return Loss(place.name, "removed", ended, "ttl")
        return last or _NEVER

    def requested(self, blocks: Sequence[bytes], raw_bytes: int) -> None:
        """Report a prompt to all policies: its blocks that were found or are stored now."""
        if self.planner.fit_due:
            self.planner.fit(self._room(raw_bytes + HEADER_BYTES))
        self.planner.requested(blocks)
        self.memory.catalogue.requested(blocks)
        for tier in self.tiers:
            tier.catalogue.requested(blocks)

    def _room(self, record_bytes: int) -> list[int | None]:
        """Return how many blocks fit into each level; None where there is no budget.

        The size of a block is the average in that level, or ``record_bytes`` if it holds none.
        """
        room: list[int | None] = []
        tiers = self.active
        capacities = [self.memory.capacity, *(tier.backend.capacity for tier in tiers)]
        catalogues: list[FrontOrder] = [self.memory.catalogue, *(tier.catalogue for tier in tiers)]
        for capacity, catalogue in zip(capacities, catalogues, strict=True):
            held = len(catalogue)
            size = catalogue.total_bytes // held if held else record_bytes
            room.append(None if capacity is None else capacity // max(1, size))
        return room

    def used(self, blocks: Sequence[bytes], new: Container[bytes] = ()) -> None:
        """Record in every level that a prompt used ``blocks``; it stored those in ``new``."""
        if blocks:
            self._using(blocks, new)
            self.memory.catalogue.used(blocks, new=new)
            for tier in self.tiers:
                tier.used(blocks, new)
