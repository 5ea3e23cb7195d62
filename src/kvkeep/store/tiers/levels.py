"""`Levels`: the levels of a store: memory, and the tiers below it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvkeep.store.tiers.loss_log import Loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvkeep.store.tiers.front import FrontMemory, FrontOrder
    from kvkeep.store.tiers.loss_log import LossLog
    from kvkeep.store.tiers.tier import Tier
    from kvkeep.store.tiers.tiering import Planner

__all__ = ["LevelPins", "Levels"]

_PROBES = (1, 16, 64, 256)  # blocks per query: few at first, because most prompts are missing
_NEVER = Loss("", "never", None, "")


class Levels:
    """Finds blocks over all levels. Level 0 is memory, the others are ``tiers``, fastest first.

    ``using`` is called with the arguments of `used`, before the order of blocks changes.

    Thread safety: all methods.
    """

    def __init__(
        self,
        memory: FrontMemory,
        tiers: Sequence[Tier],
        planner: Planner,
        losses: LossLog,
        using: Callable[[Sequence[bytes], bool], object],
    ) -> None:
        self.memory = memory
        self.planner = planner
        self.losses = losses
        self._using = using
        self.tiers = tuple(tiers)
        """Those below memory."""
        self.mixed = len({tier.codec.exact for tier in tiers}) == 2
        """Whether some tiers are exact and others are not."""

    def known(self, blocks: Sequence[bytes]) -> set[bytes]:
        """Return those of ``blocks`` that a level is known to serve now; no I/O."""
        known = {block for block in blocks if block in self.memory}
        return known.union(*[tier.serving(blocks) for tier in self.tiers])

    def _serving(self, blocks: Sequence[bytes]) -> list[int | None]:
        """Return the fastest level known to serve each of ``blocks`` now, None for none."""
        below: dict[bytes, int] = {}
        for level in range(len(self.tiers), 0, -1):
            below.update(dict.fromkeys(self.tiers[level - 1].serving(blocks), level))
        return [0 if block in self.memory else below.get(block) for block in blocks]

    def has_another_length(self, block: bytes, raw_bytes: int) -> bool:
        """Whether a level is known to hold ``block`` with another length of raw KV; no I/O."""
        lease = self.memory.lease(block)
        if lease is not None:
            length = len(lease.payload)
            lease.release()
            if length != raw_bytes:
                return True
        return any(not tier.fits(block, raw_bytes) and tier.known([block]) for tier in self.tiers)

    def holders(self, blocks: Sequence[bytes]) -> list[list[int]]:
        """Return all levels known to hold each of ``blocks``, fastest first; no I/O."""
        known = [{block for block in blocks if block in self.memory}]
        known += [tier.known(blocks) for tier in self.tiers]
        return [[level for level, here in enumerate(known) if block in here] for block in blocks]

    def locate(self, blocks: Sequence[bytes], until: float | None = None) -> list[int]:
        """Return the level of each leading block, up to the first that is missing.

        Tiers that may hold unknown blocks are queried, until ``until`` (monotonic seconds) at most.
        """
        levels = [0] * self.memory.catalogue.leading(blocks)
        sizes, end = iter(_PROBES), len(levels)
        while len(levels) == end < len(blocks):  # so far, no block is missing
            some = blocks[end : end + next(sizes, _PROBES[-1])]
            end += len(some)
            for level in self.locate_each(some, until):
                if level is None:
                    break
                levels.append(level)
        for tier in self.tiers:
            if not tier.queried and tier.calls.any_blocks("read", "lookup"):
                tier.counters.count(skipped_calls=1)
        return levels

    def locate_each(self, blocks: Sequence[bytes], until: float | None = None) -> list[int | None]:
        """Return the level of each block, None for a missing one; queries tiers as `locate` does.

        Each tier is queried once, about all blocks that it may hold and faster ones lack.
        """
        levels = self._serving(blocks)
        if None in levels:
            for level, tier, until_here in self._to_query(until):
                missing = [at for at, there in enumerate(levels) if there is None]
                if not missing:
                    break
                here = tier.probe([blocks[at] for at in missing], until_here)
                for at in missing:
                    if blocks[at] in here:
                        levels[at] = level
        return levels

    def _to_query(self, until: float | None) -> Iterator[tuple[int, Tier, float | None]]:
        """Yield the tiers to query, and until when: each leaves time for those behind it."""
        tiers = [(level, tier) for level, tier in enumerate(self.tiers, start=1) if tier.queried]
        for number, (level, tier) in enumerate(tiers):
            now = time.monotonic()
            share = None if until is None else now + (until - now) / (len(tiers) - number)
            yield level, tier, share

    def losses_of(self, blocks: Sequence[bytes], since: float | None) -> list[Loss | None]:
        """Return what happened to each block, None where it can be read; see `TieredStore`."""
        known = {tier: tier.known(blocks) for tier in self.tiers}
        troubles = {tier: tier.trouble(since) for tier in self.tiers}
        failing = [(tier, trouble) for tier, trouble in troubles.items() if trouble is not None]
        readable = {block for block in blocks if block in self.memory}
        readable.update(*[known[tier] for tier in self.tiers if troubles[tier] is None])
        return [
            None
            if block in readable
            else self._trouble(block, failing, known) or self._expired(block)
            or self.losses.of(block) or _NEVER
            for block in blocks
        ]  # fmt: skip

    def _trouble(
        self, block: bytes, failing: list[tuple[Tier, Loss]], known: dict[Tier, set[bytes]]
    ) -> Loss | None:
        """Return why a block that a tier may have cannot be read there now."""
        last = self.losses.of(block)
        for tier, trouble in failing:
            if trouble.detail == "breaker" and not tier.unreadable(block):
                continue  # the breaker of another part of the backend is open
            # A tier that lost the block itself does not have it, whether it answers or not.
            lost_here = last is not None and last.tier == tier.name and block not in known[tier]
            if (tier.may_have(block) or not tier.listed) and not lost_here:
                return trouble
        return None

    def _expired(self, block: bytes) -> Loss | None:
        places: tuple[FrontMemory | Tier, ...] = (self.memory, *self.tiers)
        for place in places:
            ended = place.catalogue.expired_at(block)
            if ended is not None:
                return Loss(place.name, "removed", ended, "ttl")
        return None

    def used(self, blocks: Sequence[bytes], *, stored: bool = False) -> None:
        """Record in every level that a prompt used ``blocks``; ``stored``: it was put.

        A put is no reuse of what it finds: it may be of the request that stored that.
        """
        if blocks:
            self._using(blocks, stored)
            self.memory.catalogue.used(blocks, stored=stored)
            for tier in self.tiers:
                tier.used(blocks, stored=stored)


class LevelPins:
    """Pins blocks in every level that has them; pins cover at most half of each level.

    A block counts as pinned if any level pinned it. Thread safety: all methods.
    """

    def __init__(self, levels: Levels) -> None:
        memory = levels.memory
        # The catalogue of each level, and the level's size in bytes.
        self._places: list[tuple[FrontOrder, int]] = [(memory.catalogue, memory.capacity)]
        self._places += [(tier.catalogue, tier.backend.capacity or 0) for tier in levels.tiers]

    def pin(self, blocks: Sequence[bytes], seconds: float) -> int:
        """Pin ``blocks`` in order; return how many leading ones are pinned."""
        pinned: set[bytes] = set()
        for catalogue, size in self._places:
            pinned.update(catalogue.pin(blocks, seconds, size // 2))
        return next((at for at, block in enumerate(blocks) if block not in pinned), len(blocks))

    def pin_all(self, blocks: Sequence[bytes], seconds: float) -> int:
        """Pin ``blocks`` as `pin` does, or none: then earlier pins of some are as they were.

        Returns how many leading blocks could be pinned.
        """
        before = [(catalogue, catalogue.pin_ends(blocks)) for catalogue, _ in self._places]
        count = self.pin(blocks, seconds)
        if count < len(blocks):
            for catalogue, ends in before:
                catalogue.restore_pins(blocks, ends)
        return count

    def unpin(self, blocks: Sequence[bytes]) -> int:
        """Allow ``blocks`` to be evicted again; return how many were pinned in some level."""
        return len({block for one, _ in self._places for block in one.unpin(blocks)})

    def pinned(self, blocks: Sequence[bytes]) -> set[bytes]:
        """Return those of ``blocks`` that are pinned in some level."""
        return {block for one, _ in self._places for block in one.pin_ends(blocks)}
