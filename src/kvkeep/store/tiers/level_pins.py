"""`LevelPins`: the pins of blocks in all levels of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store.tiers.front import FrontOrder
    from kvkeep.store.tiers.levels import Levels

__all__ = ["LevelPins"]


class LevelPins:
    """Pins blocks in every level that has them; pins cover at most half of each level.

    A block counts as pinned if any level pinned it. Thread safety: all methods.
    """

    def __init__(self, levels: Levels) -> None:
        self._levels = levels

    @property
    def _catalogues(self) -> list[FrontOrder]:
        return [order for order, _ in self._places()]

    def _places(self) -> list[tuple[FrontOrder, int]]:
        """Return the catalogue of each level, and the level's size in bytes."""
        memory = self._levels.memory
        places: list[tuple[FrontOrder, int]] = [(memory.catalogue, memory.capacity)]
        places += [(one.catalogue, one.backend.capacity or 0) for one in self._levels.tiers]
        return places

    def pin(self, blocks: Sequence[bytes], seconds: float) -> int:
        """Pin ``blocks`` in order; return how many leading ones are pinned."""
        pinned: set[bytes] = set()
        for catalogue, size in self._places():
            pinned.update(catalogue.pin(blocks, seconds, size // 2))
        return next((at for at, block in enumerate(blocks) if block not in pinned), len(blocks))

    def pin_all(self, blocks: Sequence[bytes], seconds: float) -> int:
        """Pin ``blocks`` as `pin` does, or none: then earlier pins of some are as they were.

        Returns how many leading blocks could be pinned.
        """
        before = [(catalogue, catalogue.pin_ends(blocks)) for catalogue in self._catalogues]
        count = self.pin(blocks, seconds)
        if count < len(blocks):
            for catalogue, ends in before:
                catalogue.restore_pins(blocks, ends)
        return count

    def unpin(self, blocks: Sequence[bytes]) -> int:
        """Allow ``blocks`` to be evicted again; return how many were pinned in some level."""
        return len({block for one in self._catalogues for block in one.unpin(blocks)})

    def pinned(self, blocks: Sequence[bytes]) -> set[bytes]:
        """Return those of ``blocks`` that are pinned in some level."""
        return {block for one in self._catalogues for block in one.pin_ends(blocks)}
