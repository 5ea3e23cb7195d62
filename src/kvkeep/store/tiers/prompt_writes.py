"""`TierWrites`: the writes of a prompt to one tier, of which the beginning has priority."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvkeep.core.keys import SPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.store.backends import Backend
    from kvkeep.store.tiers.index import Index

__all__ = ["TierWrites"]


class TierWrites:
    """The writes of a prompt's blocks to one tier.

    The tier's writers work in parallel, so a later block may take the room that an earlier one
    needs: that one waits for the running writes of later blocks and takes their room
    (`make_room`). Behind a block for which there is no room, none is written. At the end the
    prompt's order is recorded in the tier's catalogue; the next `Tier.flush` passes it on to the
    backend as times of use.

    Thread safety: all methods.

    Arguments:
        catalogue, backend: of the tier.
        give_up: evicts the first of some blocks, which are held here; see `TierRoom.give_up`.
        blocks: of the prompt.
    """

    def __init__(
        self,
        catalogue: Index,
        backend: Backend,
        give_up: Callable[[Sequence[bytes], int], list[bytes]],
        blocks: Sequence[bytes],
    ) -> None:
        self._catalogue = catalogue
        self._backend = backend
        self._give_up = give_up
        self._blocks = blocks
        self._changed = threading.Condition()
        self._added = 0
        self._unended = 1  # writes, and the request itself
        self._stop: int | None = None  # no block behind this position is written
        self._running: set[bytes] = set()
        self._positions: dict[bytes, int] = {}  # of the blocks; made when they are needed
        self._held: dict[bytes, None] = {}
        # Only as many as fit: holding more would leave no room for the first blocks.
        fits = catalogue.fits(blocks[0][:SPACE_BYTES]) if blocks else 0
        held: list[bytes] = []
        try:
            catalogue.hold(blocks[:fits], held)
        finally:
            self._held.update(dict.fromkeys(held))

    def add(self, blocks: Sequence[bytes]) -> None:
        """Hold ``blocks``, and register their writes; call `ended` at the end of each."""
        with self._changed:
            self._added += len(blocks)
            self._unended += len(blocks)
            new = [block for block in blocks if block not in self._held]
            self._held.update(dict.fromkeys(new))
            self._catalogue.hold_ahead(new)

    def end(self) -> None:
        """End the request; at the end of the last write, hold nothing any more."""
        with self._changed:
            self._unended -= 1
            over = not self._unended
        if over:
            self._free()

    def _free(self) -> None:
        held, self._held = self._held, {}
        try:
            if self._added > 1:
                self._catalogue.used(self._blocks, grain=float("inf"), stored=True)
        finally:
            self._catalogue.free(held)

    # --- called by writers -----------------------------------------------------------------------

    def start(self, block: bytes) -> bool:
        """Begin a write; False if there was no room for an earlier block, so it is of no use."""
        with self._changed:
            self._running.add(block)
            return self._stop is None or self._position(block) <= self._stop

    def finish(self, block: bytes) -> None:
        """End what `start` began; the write has ended in `BlockStates`."""
        with self._changed:
            self._running.discard(block)
            self._changed.notify_all()

    def ended(self, block: bytes, saved: bool) -> None:
        """End a write, run or not."""
        with self._changed:
            if not saved and self._held.pop(block, block) is None:
                self._catalogue.free([block])
            self._unended -= 1
            over = not self._unended
        if over:
            self._free()

    def make_room(self, block: bytes, needed: int) -> bool:
        """Evict blocks behind ``block``, last ones first, for ``needed`` bytes; False if too few.

        Waits for running writes of them, for the tier's timeout at most. If one of those ended,
        none is evicted, and the answer is True: one that failed gave its room back, so less may be
        needed. Blocks that are pinned, or that others hold, stay. Those behind the first of them,
        or behind ``block`` if there are too few, are not written any more.
        """
        with self._changed:
            at = self._position(block)
            running = {other for other in self._running if self._position(other) > at}
            self._changed.wait_for(lambda: not running & self._running, self._backend.timeout)
            if running - self._running:
                return True
            behind = [
                other
                for other in self._held
                if self._position(other) > at and other not in self._running
            ]
            behind.sort(key=self._position, reverse=True)
        gone = self._give_up(behind, needed)
        with self._changed:
            for other in gone:
                self._held.pop(other, None)
            stop = self._position(gone[-1]) - 1 if gone else at
            self._stop = stop if self._stop is None else min(stop, self._stop)
        return len(gone) > 0

    def _position(self, block: bytes) -> int:
        if not self._positions:
            self._positions = {block: at for at, block in enumerate(self._blocks)}
        return self._positions[block]
