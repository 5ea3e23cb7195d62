"""`PromptHolds`: keeps the beginning of a prompt in the tiers while the rest is written."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from kvkeep.core.keys import SPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvkeep.store.tiers.known import KnownBlocks
    from kvkeep.store.tiers.levels import Levels
    from kvkeep.store.tiers.tier import Tier

__all__ = ["PromptHolds"]


class PromptHolds:
    """Keeps the beginning of a prompt from eviction in each tier, until the rest is written there.

    Blocks are written first to last, so the first would be evicted first, and without them the rest
    is never found. Leading blocks that the tier had before are held, too. Of a prompt larger than
    the tier, as many blocks as fit are held; the first of them have priority (`WriteOrder`). After
    several writes to a tier, which its writers may have reordered, the prompt's order is recorded
    there (`Tier.reorder`).

    Thread safety: all methods.
    """

    def __init__(self, levels: Levels, blocks: Sequence[bytes]) -> None:
        self._tiers = {tier.name: tier for tier in levels.tiers}
        self._blocks = blocks
        self._lock = threading.Lock()
        self._count: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self._held: dict[str, dict[bytes, None]] = {}
        self._ends: dict[str, int] = {}  # position from which a tier has no room for blocks
        self._positions: dict[bytes, int] = {}  # of the blocks; made when they are needed

    def add(self, tier: Tier, block: bytes) -> Callable[[bool], None]:
        """Register a write of ``block`` to ``tier``; return the callback for its end."""
        self._begin(tier)
        with self._lock:
            self._count[tier.name] += 1
            self._left[tier.name] += 1
            held = self._held[tier.name]
            if block not in held:
                held[block] = None
                tier.catalogue.hold_ahead(block)

        def ended(saved: bool) -> None:
            if not saved:
                with self._lock:
                    if self._held[tier.name].pop(block, block) is None:
                        tier.catalogue.free([block])
            self._end(tier.name)

        return ended

    def begin(self) -> None:
        """Hold leading blocks in all tiers; call it before a block is added to memory.

        The block may cause demotions, and those evict blocks in any tier.
        """
        for tier in self._tiers.values():
            self._begin(tier)

    def _begin(self, tier: Tier) -> None:
        with self._lock:
            if tier.name in self._left:
                return
            self._count[tier.name], self._held[tier.name], self._left[tier.name] = 0, {}, 1
            tier.order.prompts[self] = None
        # Only as many as fit: holding more would leave no room for the first blocks.
        fits = tier.catalogue.fits(self._blocks[0][:SPACE_BYTES])
        held: list[bytes] = []
        try:
            tier.catalogue.hold(self._blocks[:fits], held)
        finally:
            with self._lock:
                self._held[tier.name].update(dict.fromkeys(held))

    def _end(self, name: str) -> None:
        with self._lock:
            self._left[name] -= 1
            if self._left[name]:
                return
            held = self._held.pop(name)
        tier = self._tiers[name]
        try:
            if self._count[name] > 1:
                tier.reorder(self._blocks)
        finally:
            tier.order.prompts.pop(self, None)
            tier.catalogue.free(held)

    # --- the order of writes: called by `WriteOrder` ---------------------------------------------

    def excludes(self, tier: str, block: bytes) -> bool:
        """Whether ``tier`` has no room for ``block``, because it had none for an earlier one."""
        with self._lock:
            end = self._ends.get(tier)
            return end is not None and self._position(block, -1) > end

    def precedes_any(self, block: bytes, others: Iterable[bytes]) -> bool:
        """Whether any of ``others`` is behind ``block`` in the prompt."""
        with self._lock:
            at = self._position(block, len(self._blocks))
            return any(self._position(other, -1) > at for other in others)

    def give_up(self, tier: str, known: KnownBlocks, block: bytes, needed: int) -> list[bytes]:
        """Forget held blocks behind ``block``, last ones first, until ``needed`` bytes are free.

        Returns them; the caller deletes them. Blocks that are pinned, or that others hold, stay.
        Blocks behind the first of them, or behind ``block`` if there are too few, are excluded.
        """
        with self._lock:
            at = self._position(block, -1)
            held = self._held.get(tier)
            if at < 0 or held is None:
                return []
            behind = [one for one in held if self._position(one, -1) > at]
            behind.sort(key=self._positions.__getitem__, reverse=True)
            gone = known.give_up(behind, needed)
            for one in gone:
                del held[one]
            end = self._position(gone[-1], at) - 1 if gone else at
            self._ends[tier] = min(end, self._ends.get(tier, end))
            return gone

    def _position(self, block: bytes, otherwise: int) -> int:
        if not self._positions:
            self._positions = {block: at for at, block in enumerate(self._blocks)}
        return self._positions.get(block, otherwise)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Take no more blocks; the holds in each tier end with the last write to it."""
        for name in list(self._left):
            self._end(name)
