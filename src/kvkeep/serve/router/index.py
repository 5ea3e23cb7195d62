"""`PlacementIndex`: maps prefixes to the places that hold them, by tier."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvkeep.core.errors import whole
from kvkeep.core.public import PublicPrefixes
from kvkeep.serve.router.held import (
    HeldGroup,
    HeldPrefix,
    TierBlocks,
    bits_of,
    in_one_tier,
    in_several_tiers,
    longest_first,
)
from kvkeep.serve.router.keys import MAX_TOKENS, PrefixKeys, PublicKeys, length_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvkeep.core.tokens import TokenArray

    Hash = int | bytes

__all__ = ["Place", "PlacementIndex"]


class Place(NamedTuple):
    """A rank of an instance."""

    instance: str
    rank: int = 0


@dataclass(slots=True, eq=False)
class InstanceBlocks:
    """One instance's blocks in the index, over all its ranks and tiers: announced, or routed."""

    blocks: int = 0
    evicted: int = 0
    parts: list[PlaceBlocks] = field(default_factory=list)


_NONE = InstanceBlocks()


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

    def note_size(self, size: int) -> None:
        """Note that the place has blocks of this size in this tier."""
        self.tier.sizes[size] = self.tier.sizes.get(size, 0) | self.bit

    def refresh(self, block: Hash, key: int) -> None:
        """Move a block to the end of the eviction order."""
        del self.blocks[block]
        self.blocks[block] = key


def _fewer(counts: dict[Any, int], name: object) -> bool:
    """Decrement a count. Return False if there was none."""
    count = counts.get(name, 0)
    if count > 1:
        counts[name] = count - 1
    elif count:
        del counts[name]
    return bool(count)


MAX_BLOCK = 65_536
_MAX_TOKEN = 2**31 - 1
_FEW = 64  # tokens
_MOST_SIZES = 4
"""Block sizes per place; each size in use anywhere costs a lookup one pass more."""
_MOST_TIERS = 8
"""Tiers per place; each tier in use anywhere costs a lookup one dict lookup more per block."""
_LONGEST_NAME = 64  # characters of a tier's name
_ROUND = 64
"""An instance over its limit loses at least 1/64 of the limit at once."""


class PlacementIndex:
    """Maps each prefix to the places that hold it, as one bit mask of places per tier.

    ``tiers`` lists tiers from the fastest on; tiers that instances name besides come after. A block
    whose parent is unknown is left out and counted (``orphans``), as are inconsistent ones
    (``refused``). ``public`` are prefixes that all salts share
    (`kvkeep.serve.router.keys`).

    At most ``most_blocks`` are kept per instance, over all its ranks and tiers, and as many again
    of what was routed to it (`keep`). Beyond, the least recently stored or looked up blocks of its
    largest tier are evicted and counted (`evicted`), so an instance that announces too many blocks,
    or no removals, takes no room from others.

    Thread safety: none. Cost: about 1.5 µs to store a block and 0.1 µs per block of a lookup,
    regardless of the number of places and of evictions. Memory: about 200 bytes per block where
    hashes are integers; `kv_events` accepts none of more than 64 bytes.
    """

    def __init__(
        self,
        tiers: Sequence[str] = ("GPU",),
        *,
        most_blocks: int = 1_000_000,
        public: PublicPrefixes | None = None,
    ) -> None:
        self.orphans = 0
        self.refused = 0
        self._keys = PrefixKeys()
        self._public = PublicKeys(self._keys, public or PublicPrefixes())
        self._most = whole("most_blocks", most_blocks, 1)
        self._named = frozenset(tiers)
        self._tiers = {tier: TierBlocks(tier) for tier in tiers}
        self._instances: dict[str, InstanceBlocks] = {}  # what they announced
        self._routed: dict[str, InstanceBlocks] = {}  # from `keep`
        self._expected = InstanceBlocks()  # from `expect`: bounded by the running requests
        self._places: dict[Place, dict[str, PlaceBlocks]] = {}
        self._slots: dict[Place, int] = {}
        self._at: list[Place | None] = []  # by slot
        # Keys found by lookups, recorded once an instance comes near its limit.
        self._used: set[int] = set()
        self._records_use = False

    def __len__(self) -> int:
        """Blocks of all places and tiers, copies counted once; without routed ones."""
        return self._expected.blocks + sum(each.blocks for each in self._instances.values())

    @property
    def num_prefixes(self) -> int:
        """Distinct prefixes, counted per tier."""
        return sum(len(tier.holders) for tier in self._tiers.values())

    @property
    def evicted(self) -> int:
        """Blocks evicted because their instance had too many."""
        return sum(each.evicted for each in (*self._instances.values(), *self._routed.values()))

    def instance_blocks(self, instance: str) -> tuple[int, int]:
        """Return an instance's number of announced blocks, and of evicted ones."""
        announced = self._instances.get(instance, _NONE)
        routed = self._routed.get(instance, _NONE)
        return announced.blocks, announced.evicted + routed.evicted

    def routed_blocks(self, instance: str) -> int:
        """Return an instance's number of blocks that `keep` added."""
        return self._routed.get(instance, _NONE).blocks

    def slot(self, place: Place) -> int:
        """Return the position of a place's bit, which is its own until `remove_instance`."""
        slot = self._slots.get(place)
        if slot is None:
            if None not in self._at:
                self._at.append(None)
            slot = self._slots[place] = self._at.index(None)
            self._at[slot] = place
        return slot

    # --- announced blocks --------------------------------------------------------------------

    def store(
        self,
        place: Place,
        hashes: Sequence[Hash],
        parent: Hash | None,
        tokens: Sequence[int],
        block_size: int,
        *,
        tier: str = "GPU",
        lora: str = "",
        salt: str = "",
        marks: Sequence[str] | None = None,
    ) -> None:
        """Add blocks of ``block_size`` tokens, in order, behind ``parent`` (None: the first ones).

        ``marks`` names for each block its inputs besides the tokens up to its end (such as images),
        "" for none. ``lora`` and ``salt`` matter only at a prompt's start.
        """
        count = len(hashes)
        part = self._announced(place, tier)
        if part is None:
            self.refused += count
            return
        start = self._keys.root(lora, salt) if parent is None else part.blocks.get(parent)
        if start is None:
            start = self._find_parent(place, parent)
        if start is None:
            self.orphans += count
            return
        keys = None
        if _consistent(tokens, count, block_size, length_of(start)) and self._allow_size(
            part, block_size
        ):
            keys = self._keys_of(start, tokens, block_size, marks)
        if keys is None:
            self.refused += count
            return
        if parent is None:
            self._public.stored(place, lora, salt, tokens, block_size)
        elif self._records_use:
            self._record_use([start])
        part.add_all(hashes, keys)
        self._bound(part.instance)

    def _bound(self, instance: InstanceBlocks) -> None:
        """Keep an instance within its limit."""
        if instance.blocks > self._most - self._most // 8:
            self._records_use = True
            if instance.blocks > self._most:
                self._evict(instance)

    def _keys_of(
        self, start: int, tokens: Sequence[int], block_size: int, marks: Sequence[str] | None
    ) -> list[int] | None:
        """Return the keys of blocks behind ``start``, None if a token is out of range."""
        marked = marks is not None and any(marks)
        if len(tokens) <= _FEW and not marked:
            if min(tokens) < 0 or max(tokens) > _MAX_TOKEN:
                return None
            return self._keys.after_few(start, tokens, block_size)
        try:
            row = np.array(tokens, np.int64)
        except OverflowError:
            return None
        if row.min() < 0 or row.max() > _MAX_TOKEN:
            return None
        added = None
        if marks is not None and marked:
            added = np.array([self._keys.mark(mark) if mark else 0 for mark in marks], np.uint64)
        return self._keys.after(start, row, block_size, added)

    def remove(self, place: Place, hashes: Iterable[Hash], *, tier: str = "GPU") -> None:
        """Remove one copy of each of these blocks; unknown ones are ignored."""
        part = self._places.get(place, {}).get(tier)
        if part is not None:
            for block in hashes:
                part.drop(block)

    def expect(
        self, place: Place, tokens: TokenArray, step: int, *, tier: str, lora: str, salt: str
    ) -> list[int]:
        """Add a prompt that a place is about to compute, as blocks of ``step`` tokens in ``tier``.

        Returns their hashes, for `remove`. Several requests may expect the same blocks.
        """
        part = self._blocks_at(place, tier, self._expected)
        part.note_size(step)
        keys = self._public.after(tokens, step, lora, salt) or self._keys.after(
            self._keys.root(lora, salt), tokens[:MAX_TOKENS], step
        )
        for key in keys:
            part.add(key, key)
        return keys

    def keep(self, place: Place, keys: Sequence[int], step: int, *, tier: str) -> None:
        """Add a prompt that a place has computed, whose ``keys`` are those of `expect`."""
        account = self._routed.setdefault(place.instance, InstanceBlocks())
        part = self._blocks_at(place, tier, account)
        part.note_size(step)
        for key in keys:
            if key in part.blocks:
                part.refresh(key, key)
            else:
                part.add(key, key)
        self._bound(part.instance)

    def clear(self, place: Place) -> None:
        """Remove all blocks of a place, in all tiers. Cost: O(blocks of the place)."""
        self._public.forget(place)
        for name, part in self._places.pop(place, {}).items():
            for key in part.blocks.values():
                mask = part.holders.get(key, 0) & ~part.bit
                if mask:
                    part.holders[key] = mask
                else:
                    part.holders.pop(key, None)
            part.instance.blocks -= len(part.blocks)
            part.instance.parts.remove(part)
            sizes = part.tier.sizes
            part.tier.sizes = {
                size: rest for size, mask in sizes.items() if (rest := mask & ~part.bit)
            }
            if name not in self._named and not any(
                name in parts for parts in self._places.values()
            ):
                del self._tiers[name]

    def empty(self, place: Place, tier: str) -> None:
        """Remove all blocks of a place in one tier."""
        part = self._places.get(place, {}).get(tier)
        if part is not None:
            for block in list(part.blocks):
                part.drop(block, all_copies=True)

    def shrink(self, instance: str, most: int) -> int:
        """Remove up to ``most`` blocks of an instance; return how many are left."""
        accounts = [of[instance] for of in (self._instances, self._routed) if instance in of]
        for part in (part for account in accounts for part in account.parts):
            for block in list(islice(reversed(part.blocks), most)):
                part.drop(block, all_copies=True)
                most -= 1
        return sum(account.blocks for account in accounts)

    def remove_instance(self, instance: str) -> None:
        """Remove all blocks, places and counters of an instance."""
        for place in [place for place in self._slots if place.instance == instance]:
            self.clear(place)
            self._at[self._slots.pop(place)] = None
        self._instances.pop(instance, None)
        self._routed.pop(instance, None)

    def _announced(self, place: Place, tier: str) -> PlaceBlocks | None:
        """Return where to add announced blocks; None for too many tiers or too long a name."""
        parts = self._places.get(place, {})
        if tier not in parts and (len(parts) >= _MOST_TIERS or len(tier) > _LONGEST_NAME):
            return None
        instance = self._instances.setdefault(place.instance, InstanceBlocks())
        return self._blocks_at(place, tier, instance)

    def _blocks_at(self, place: Place, tier: str, instance: InstanceBlocks) -> PlaceBlocks:
        parts = self._places.setdefault(place, {})
        part = parts.get(tier)
        if part is None:
            bit = 1 << self.slot(place)
            blocks = self._tiers.setdefault(tier, TierBlocks(tier))
            part = parts[tier] = PlaceBlocks(instance, bit, blocks, blocks.holders)
            instance.parts.append(part)
        return part

    def _find_parent(self, place: Place, parent: Hash | None) -> int | None:
        """Return the key of a parent that is in another tier of the place."""
        for part in self._places[place].values():
            key = None if parent is None else part.blocks.get(parent)
            if key is not None:
                return key
        return None

    def _allow_size(self, part: PlaceBlocks, block_size: int) -> bool:
        """Whether a place may have blocks of this size; if so, note that it has some."""
        bit = part.bit
        if not part.tier.sizes.get(block_size, 0) & bit:
            sizes = {size for size, places in self._sizes().items() if places & bit}
            if block_size not in sizes and len(sizes) >= _MOST_SIZES:
                return False
            part.note_size(block_size)
        return True

    def _sizes(self) -> dict[int, int]:
        """Return the block sizes in use, each with the places that have such blocks."""
        sizes: dict[int, int] = {}
        for tier in self._tiers.values():
            for size, places in tier.sizes.items():
                sizes[size] = sizes.get(size, 0) | places
        return sizes

    def _record_use(self, keys: list[int]) -> None:
        """Record keys as used. Only a hint: the record is emptied when full, and refills."""
        if len(self._used) + len(keys) > self._most:
            self._used.clear()
        self._used.update(keys[: self._most])

    def _evict(self, instance: InstanceBlocks) -> None:
        """Bring an instance below its limit.

        In rounds, since finding a dict's first entries costs a step per deleted one before them. A
        block that was used since the last round gets a second chance: a prefix shared by many
        prompts is stored once, before everything behind it.
        """
        left = max(instance.blocks - self._most, self._most // _ROUND)
        while left > 0:
            part = max(instance.parts, key=lambda part: len(part.blocks))
            oldest = min(2 * left, max(left, len(part.blocks) // 2))  # spare the newer half
            gone, spare = 0, oldest - left
            for block, key in list(islice(part.blocks.items(), oldest)):
                if spare and key in self._used:
                    self._used.discard(key)
                    part.refresh(block, key)
                    spare -= 1
                else:
                    part.drop(block, all_copies=True)
                    gone += 1
                    if gone == left:
                        break
            instance.evicted += gone
            left -= gone

    # --- lookups -----------------------------------------------------------------------------

    def lookup(self, tokens: TokenArray, lora: str = "", salt: str = "") -> dict[Place, HeldPrefix]:
        """Return the held prefix of this prompt by place, without places that hold nothing."""
        return {
            self._place(slot): held
            for places, held in self.groups(tokens, lora, salt)
            for slot in bits_of(places)
        }

    def groups(
        self, tokens: TokenArray, lora: str = "", salt: str = "", *, step: int | None = None
    ) -> list[HeldGroup]:
        """Return the places that hold some of this prompt, by what they hold, the most first.

        Each place is in one group. Their bits are at their slots (see `slot`). With ``step``, only
        blocks of this size count.
        """
        groups: list[HeldGroup] = []
        root = self._keys.root(lora, salt)
        for size, among in self._sizes().items():
            # Only tiers whose blocks end at every step can have all keys of this walk.
            tiers = [tier for tier in self._tiers.values() if tier.holders and tier.has(size)]
            if not tiers or len(tokens) < size or step not in {None, size}:
                continue
            walks = [(self._keys.after(root, tokens[:MAX_TOKENS], size), size)]
            if shared := self._public.after(tokens, size, lora, salt):
                walks.append((shared, size))
                others = self._public.of_others(tokens, size, lora, salt)
                walks += [(keys, len(keys) * size) for keys in others]
            for keys, least in walks:
                if len(tiers) == 1:
                    held = in_one_tier(keys, among, tiers[0], size)
                else:
                    held = in_several_tiers(keys, among, tiers, size)
                if self._records_use and held:
                    longest = max(group.held.tokens for group in held)
                    self._record_use(keys[: longest // size])
                groups += [group for group in held if group.held.tokens >= least]
        return longest_first(groups)

    def _place(self, slot: int) -> Place:
        place = self._at[slot]
        assert place is not None, "a bit without a place"
        return place

    def check(self) -> None:
        """Recount everything and assert that it agrees. Cost: O(blocks)."""
        for tier, blocks in self._tiers.items():
            counted: dict[int, int] = {}
            for place, parts in self._places.items():
                part = parts.get(tier)
                if part is None:
                    continue
                assert self._place(part.bit.bit_length() - 1) == place, place
                for key in part.blocks.values():
                    counted[key] = counted.get(key, 0) | part.bit
                spare = len(part.blocks) - len(set(part.blocks.values()))
                assert spare == sum(part.twins.values()), (place, tier)
                assert set(part.copies) <= set(part.blocks), (place, tier)
            assert counted == blocks.holders, tier
        for name, instance in (*self._instances.items(), *self._routed.items()):
            parts_of = [
                part
                for place, parts in self._places.items()
                if place.instance == name
                for part in parts.values()
                if part.instance is instance
            ]
            assert {*map(id, parts_of)} == {*map(id, instance.parts)}, name
            assert instance.blocks == sum(len(part.blocks) for part in parts_of) <= self._most, name


def _consistent(tokens: Sequence[int], count: int, block_size: int, before: int) -> bool:
    """Whether these can be the tokens of ``count`` blocks behind ``before`` tokens."""
    return (
        count > 0
        and 1 <= block_size <= MAX_BLOCK
        and len(tokens) == count * block_size
        and before + len(tokens) <= MAX_TOKENS
    )
