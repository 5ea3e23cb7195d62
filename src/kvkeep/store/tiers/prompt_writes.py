"""`PromptWrites`: writes the blocks of a prompt to tiers, its beginning before its end."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from kvkeep.core.keys import SPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvkeep.store.tiers.moves import Moves
    from kvkeep.store.tiers.tier import Tier

__all__ = ["PromptWrites", "TierWrites"]


class PromptWrites:
    """The writes of one request's prompt, to each tier; the context ends when the last is queued.

    Without its beginning the rest of a prompt is never found. So in each tier, while blocks are
    written to it, the leading blocks that it has are held, and of a prompt larger than the tier the
    beginning has priority (`TierWrites`).

    Thread safety: one thread.
    """

    def __init__(self, moves: Moves, blocks: Sequence[bytes]) -> None:
        self._moves = moves
        self._blocks = blocks
        self._writes: dict[str, TierWrites] = {}

    def begin(self) -> None:
        """Hold leading blocks in all tiers; call it before a block is added to memory.

        The block may cause demotions, and those evict blocks in any tier.
        """
        for tier in self._moves.tiers:
            self._of(tier)

    def write(self, tier: Tier, block: bytes, wait: float) -> bool:
        """Queue the write of ``block`` from memory to ``tier``; see `Moves.write`."""
        writes = self._of(tier)
        return self._moves.write(tier, block, wait, writes.add(block), writes)

    def _of(self, tier: Tier) -> TierWrites:
        if tier.name not in self._writes:
            self._writes[tier.name] = TierWrites(tier, self._blocks)
        return self._writes[tier.name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for writes in self._writes.values():
            writes.end()


class TierWrites:
    """The writes of a prompt's blocks to one tier.

    The tier's writers work in parallel, so a later block may take the room that an earlier one
    needs: that one waits for the running writes of later blocks and takes their room
    (`make_room`). Behind a block for which there is no room, none is written. At the end the
    prompt's order is recorded in the tier (`Tier.reorder`).

    Thread safety: all methods.
    """

    def __init__(self, tier: Tier, blocks: Sequence[bytes]) -> None:
        self._tier = tier
        self._blocks = blocks
        self._changed = threading.Condition()
        self._added = 0
        self._unended = 1  # writes, and the request itself
        self._stop: int | None = None  # no block behind this position is written
        self._running: set[bytes] = set()
        self._positions: dict[bytes, int] = {}  # of the blocks; made when they are needed
        self._held: dict[bytes, None] = {}
        # Only as many as fit: holding more would leave no room for the first blocks.
        fits = tier.catalogue.fits(blocks[0][:SPACE_BYTES]) if blocks else 0
        held: list[bytes] = []
        try:
            tier.catalogue.holds.hold_all(blocks[:fits], held)
        finally:
            self._held.update(dict.fromkeys(held))

    def add(self, block: bytes) -> Callable[[bool], None]:
        """Register a write of ``block``; return what is called at its end."""
        with self._changed:
            self._added += 1
            self._unended += 1
            if block not in self._held:
                self._held[block] = None
                self._tier.catalogue.holds.ahead(block)
        return lambda saved: self._ended(block, saved=saved)

    def _ended(self, block: bytes, *, saved: bool) -> None:
        if not saved:
            with self._changed:
                if self._held.pop(block, block) is None:
                    self._tier.catalogue.holds.free(block)
        self.end()

    def end(self) -> None:
        """End one write, or the request; at the last of them, hold nothing any more."""
        with self._changed:
            self._unended -= 1
            if self._unended:
                return
            held, self._held = self._held, {}
        try:
            if self._added > 1:
                self._tier.reorder(self._blocks)
        finally:
            self._tier.catalogue.holds.free_all(held)

    # --- called by writers -----------------------------------------------------------------------

    @contextmanager
    def writing(self, block: bytes) -> Iterator[bool]:
        """Write ``block`` in the ``with`` block, unless the yielded value is False.

        It is False if there was no room for an earlier block.
        """
        with self._changed:
            allowed = self._stop is None or self._position(block) <= self._stop
            if allowed:
                self._running.add(block)
        try:
            yield allowed
        finally:
            with self._changed:
                self._running.discard(block)
                self._changed.notify_all()

    def make_room(self, block: bytes, needed: int) -> bool:
        """Evict blocks behind ``block``, last ones first, for ``needed`` bytes; False if too few.

        Waits for running writes of them, for the tier's timeout at most. Blocks that are pinned, or
        that others hold, stay. Those behind the first of them, or behind ``block`` if there are too
        few, are not written any more.
        """
        until = time.monotonic() + self._tier.timeout
        with self._changed:
            at = self._position(block)
            while any(self._position(other) > at for other in self._running):
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            behind = [other for other in self._held if self._position(other) > at]
            behind.sort(key=self._position, reverse=True)
        gone = self._tier.give_up(behind, needed)
        with self._changed:
            for other in gone:
                self._held.pop(other, None)
            stop = self._position(gone[-1]) - 1 if gone else at
            self._stop = stop if self._stop is None else min(stop, self._stop)
        return bool(gone)

    def _position(self, block: bytes) -> int:
        if not self._positions:
            self._positions = {block: at for at, block in enumerate(self._blocks)}
        return self._positions[block]
