"""`PromptHolds`: keeps the beginning of a prompt in the tiers while the rest is written."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from kvkeep.core.keys import SPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.store.tiers.levels import Levels
    from kvkeep.store.tiers.tier import Tier

__all__ = ["PromptHolds"]


class PromptHolds:
    """Keeps the beginning of a prompt from eviction in each tier, until the rest is written there.

    Blocks are written first to last, so the first would be evicted first, and without them the rest
    is never found. Leading blocks that the tier had before are held, too. Of a prompt larger than
    the tier, as many blocks as fit are held.

    A tier has several writers, so a later block may take the room that an earlier one needs: the
    later one is then given up (`give_up`). After several writes to a tier the prompt's order is
    recorded there (`Tier.reorder`).

    Thread safety: all methods.
    """

    def __init__(self, levels: Levels, blocks: Sequence[bytes]) -> None:
        self._tiers = {tier.name: tier for tier in levels.tiers}
        self._blocks = blocks
        self._lock = threading.Lock()
        self._count: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self._held: dict[str, list[bytes]] = {}
        self._positions: dict[bytes, int] = {}  # of the blocks; made by the first `give_up`

    def add(self, tier: Tier, block: bytes) -> Callable[[bool], None]:
        """Register a write of ``block`` to ``tier``; return the callback for its end."""
        self._begin(tier)
        with self._lock:
            self._count[tier.name] += 1
            self._left[tier.name] += 1

        def ended(saved: bool) -> None:
            if saved:
                self._hold(tier, [block])
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
            self._count[tier.name], self._held[tier.name], self._left[tier.name] = 0, [], 1
        # Only as many as fit: holding more would leave no room for the first blocks.
        fits = tier.catalogue.fits(self._blocks[0][:SPACE_BYTES])
        self._hold(tier, self._blocks[:fits])
        tier.prompts[self] = None

    def _hold(self, tier: Tier, blocks: Sequence[bytes]) -> None:
        tier.catalogue.hold_all(blocks, self._held[tier.name])

    def _end(self, name: str) -> None:
        with self._lock:
            self._left[name] -= 1
            over = not self._left[name]
        if over:
            if self._count[name] > 1:
                self._tiers[name].reorder(self._blocks)
            del self._tiers[name].prompts[self]
            self._tiers[name].catalogue.free_all(self._held.pop(name))

    def give_up(self, tier: Tier, block: bytes, needed: int) -> list[bytes]:
        """Forget held blocks behind ``block``, last ones first, until ``needed`` bytes are free.

        Returns them; the caller deletes them. Without ``block`` they would never be found. Blocks
        that are pinned, or that others hold, stay.
        """
        gone: list[bytes] = []
        with self._lock:
            held = self._held.get(tier.name)
            if not held:
                return gone
            if not self._positions:
                self._positions = {block: at for at, block in enumerate(self._blocks)}
            positions = self._positions
            at = positions.get(block, len(positions))
            behind = [one for one in held if positions[one] > at]
            for last in sorted(behind, key=positions.__getitem__, reverse=True):
                if needed <= 0:
                    break
                size = tier.catalogue.give_up(last)
                if size:
                    held.remove(last)
                    gone.append(last)
                    needed -= size
        return gone

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Take no more blocks; the holds in each tier end with the last write to it."""
        for name in list(self._left):
            self._end(name)
