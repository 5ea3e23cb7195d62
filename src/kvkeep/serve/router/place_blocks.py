"""`PlaceBlocks`: the blocks of one place in one tier, and the slots of places."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.serve.router.held import TierBlocks

    Hash = int | bytes

__all__ = ["InstanceBlocks", "Place", "PlaceBlocks", "PlaceSlots"]


class Place(NamedTuple):
    """A rank of an instance."""

    instance: str
    rank: int = 0


@dataclass(slots=True, eq=False)
class InstanceBlocks:
    """One instance's blocks in the index, over all its ranks and tiers."""

    blocks: int = 0
    evicted: int = 0
    parts: list[PlaceBlocks] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class PlaceBlocks:
    """One place's blocks in one tier, under the place's own hashes."""

    instance: InstanceBlocks
    bit: int
    tier: TierBlocks
    holders: dict[int, int]
    """The tier's own table: prefix key → places, one bit each."""
    blocks: dict[Hash, int] = field(default_factory=dict)
    """Hash → prefix key, least recently stored or looked up first."""
    copies: dict[Hash, int] = field(default_factory=dict)
    """Hash → how often it was stored beyond the first time."""
    twins: dict[int, int] = field(default_factory=dict)
    """Prefix key → how many of its hashes there are beyond the first."""

    def add(self, block: Hash, key: int) -> None:
        """Add a block, or one more copy of it."""
        known = self.blocks.get(block)
        if known == key:
            self.copies[block] = self.copies.get(block, 0) + 1
            self.refresh(block, key)
            return
        if known is not None:  # the hash has a new meaning: its removal was missed
            self.drop(block, all_copies=True)
        self.blocks[block] = key
        self.instance.blocks += 1
        mask = self.holders.get(key, 0)
        if mask & self.bit:
            self.twins[key] = self.twins.get(key, 0) + 1
        else:
            self.holders[key] = mask | self.bit if mask else self.bit

    def add_all(self, hashes: Sequence[Hash], keys: list[int]) -> None:
        """Add blocks in a row; `add`, inlined for those that are new."""
        blocks, holders, bit = self.blocks, self.holders, self.bit
        # Blocks that the same places hold share one mask: it has 160 bytes for 1,000 places.
        last, both, new = 0, bit, 0
        for block, key in zip(hashes, keys, strict=True):
            mask = holders.get(key, 0)
            if block in blocks or mask & bit:
                self.add(block, key)
            else:
                blocks[block] = key
                if mask != last:
                    last, both = mask, mask | bit
                holders[key] = both
                new += 1
        self.instance.blocks += new

    def drop(self, block: Hash, *, all_copies: bool = False) -> None:
        """Remove one copy of a block, or all; an unknown one is ignored."""
        if all_copies:
            self.copies.pop(block, None)
        elif _fewer(self.copies, block):
            return
        key = self.blocks.pop(block, None)
        if key is None:
            return
        self.instance.blocks -= 1
        if _fewer(self.twins, key):
            return
        mask = self.holders[key] & ~self.bit
        if mask:
            self.holders[key] = mask
        else:
            del self.holders[key]

    def refresh(self, block: Hash, key: int) -> None:
        """Move a block to the end of the eviction order."""
        del self.blocks[block]
        self.blocks[block] = key


class PlaceSlots:
    """Slots of places, the positions of their bits: the lowest that is free."""

    def __init__(self) -> None:
        self._places: list[Place | None] = []
        self._slots: dict[Place, int] = {}
        self._reserved: set[Place] = set()

    def place(self, slot: int) -> Place:
        """Return the place at a slot."""
        place = self._places[slot]
        assert place is not None, "a bit without a place"
        return place

    def take(self, place: Place) -> int:
        """Return a place's slot."""
        slot = self._slots.get(place)
        if slot is None:
            if None not in self._places:
                self._places.append(None)
            slot = self._slots[place] = self._places.index(None)
            self._places[slot] = place
        return slot

    def give(self, place: Place) -> None:
        """Free a place's slot, unless it is reserved."""
        if place not in self._reserved and place in self._slots:
            self._places[self._slots.pop(place)] = None

    def reserve(self, place: Place) -> int:
        """Return a place's slot, which `give` does not free."""
        self._reserved.add(place)
        return self.take(place)

    def release(self, place: Place, *, used: bool) -> None:
        """Let `give` free a slot again; free it if it is not in use."""
        self._reserved.discard(place)
        if not used:
            self.give(place)


def _fewer(counts: dict[Any, int], name: object) -> bool:
    """Decrement a count. Return False if there was none."""
    count = counts.get(name, 0)
    if count > 1:
        counts[name] = count - 1
    elif count:
        del counts[name]
    return bool(count)
