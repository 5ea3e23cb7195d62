"""`PrefixIndex`: who holds which prefix, in which tier."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvkeep.router.keys import MAX_TOKENS, PrefixKeys, length_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvkeep.tokens import TokenArray

    Hash = int | bytes

__all__ = ["Held", "Place", "PrefixIndex"]

MAX_BLOCK = 65_536
_MAX_TOKEN = 2**31 - 1
_FEW = 64  # tokens
_MOST_SIZES = 16
"""Block sizes in use at once; each costs a pass of its own in a lookup."""


class Place(NamedTuple):
    """Where blocks lie: one rank of an instance."""

    instance: str
    rank: int = 0


@dataclass(slots=True)
class Held:
    """What a place holds of a prompt's beginning, without a hole: tokens, and in which tier.

    What lies in several tiers counts for the first of them.
    """

    tokens: int = 0
    tiers: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Stock:
    """What one place has in one tier, under its own hashes."""

    bit: int
    holders: dict[int, int]
    """The tier's, of all places: prefix key → places, a bit each."""
    blocks: dict[Hash, int] = field(default_factory=dict)
    """Its own hash → prefix key."""
    copies: dict[Hash, int] = field(default_factory=dict)
    """How often a hash is there, besides once."""
    twins: dict[int, int] = field(default_factory=dict)
    """How many hashes stand for one key, besides one."""

    def add(self, block: Hash, key: int) -> None:
        known = self.blocks.get(block)
        if known == key:
            self.copies[block] = self.copies.get(block, 0) + 1
            return
        if known is not None:  # it says something else now: the removal in between was missed
            self.drop(block, all_copies=True)
        self.blocks[block] = key
        mask = self.holders.get(key, 0)
        if mask & self.bit:
            self.twins[key] = self.twins.get(key, 0) + 1
        else:
            self.holders[key] = mask | self.bit

    def drop(self, block: Hash, *, all_copies: bool = False) -> None:
        if all_copies:
            self.copies.pop(block, None)
        elif _fewer(self.copies, block):
            return
        key = self.blocks.pop(block, None)
        if key is None or _fewer(self.twins, key):
            return
        mask = self.holders[key] & ~self.bit
        if mask:
            self.holders[key] = mask
        else:
            del self.holders[key]


class PrefixIndex:
    """Which places hold which prefix; an int of a bit a place for each prefix and tier.

    ``tiers`` name the tiers from the fastest on; others that are heard of come after. Of a block
    whose parent is not known nothing can be said: it is left out and counted (``orphans``), as is
    what contradicts itself (``refused``). ``most_blocks`` are kept of a place and tier at most.

    Thread safety: none. Cost: about 1.5 µs to store a block, and 0.1 µs a block to look a prompt
    up, however many places there are.
    """

    def __init__(self, tiers: Sequence[str] = ("GPU",), *, most_blocks: int = 8_000_000) -> None:
        self.orphans = 0
        self.refused = 0
        self._keys = PrefixKeys()
        self._most = most_blocks
        self._tiers: dict[str, dict[int, int]] = {tier: {} for tier in tiers}
        self._stocks: dict[Place, dict[str, _Stock]] = {}
        self._names: list[Place | None] = []  # by bit
        self._sizes: dict[int, int] = {}  # block size → places that have such blocks

    def __len__(self) -> int:
        """Blocks of all places and tiers, copies counted once."""
        return sum(len(one.blocks) for stocks in self._stocks.values() for one in stocks.values())

    @property
    def num_prefixes(self) -> int:
        """Different prefixes, each tier's counted."""
        return sum(map(len, self._tiers.values()))

    def blocks_of(self, place: Place) -> dict[str, int]:
        """How many blocks a place holds, by tier."""
        return {tier: len(one.blocks) for tier, one in self._stocks.get(place, {}).items()}

    # --- what places say ---------------------------------------------------------------------

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
        """Blocks of ``block_size`` tokens, in order, behind ``parent`` (None: at the beginning).

        ``marks`` say for each block what it depends on besides its tokens and all before ("":
        nothing). ``lora`` and ``salt`` count at the beginning only.
        """
        count = len(hashes)
        stock = self._stock(place, tier)
        start = self._keys.root(lora, salt) if parent is None else stock.blocks.get(parent)
        if start is None:
            start = self._elsewhere(place, parent)
        if start is None:
            self.orphans += count
            return
        keys = None
        if (
            _sound(tokens, count, block_size, length_of(start))
            and len(stock.blocks) + count <= self._most
            and self._sized(block_size, stock)
        ):
            keys = self._keys_of(start, tokens, block_size, marks)
        if keys is None:
            self.refused += count
            return
        blocks, holders, bit = stock.blocks, stock.holders, stock.bit
        for block, key in zip(hashes, keys, strict=True):
            mask = holders.get(key, 0)
            if block in blocks or mask & bit:
                stock.add(block, key)
            else:
                blocks[block] = key
                holders[key] = mask | bit

    def _keys_of(
        self, start: int, tokens: Sequence[int], block_size: int, marks: Sequence[str] | None
    ) -> list[int] | None:
        """The keys of blocks behind ``start``; None where tokens are none."""
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
            added = np.array([self._keys.mark(one) if one else 0 for one in marks], np.uint64)
        return self._keys.after(start, row, block_size, added)

    def remove(self, place: Place, hashes: Iterable[Hash], *, tier: str = "GPU") -> None:
        """One copy each of these blocks is gone; those that are not known are no news."""
        stock = self._stocks.get(place, {}).get(tier)
        if stock is not None:
            for block in hashes:
                stock.drop(block)

    def expect(
        self, place: Place, tokens: TokenArray, step: int, *, tier: str, lora: str, salt: str
    ) -> list[int]:
        """A place will have this prompt: as blocks of ``step`` tokens in a tier of their own.

        Returns their hashes, for `remove`; several may expect the same.
        """
        stock = self._stock(place, tier)
        if not self._sized(step, stock):
            return []
        keys = self._keys.after(self._keys.root(lora, salt), tokens[:MAX_TOKENS], step)
        for key in keys:
            stock.add(key, key)
        return keys

    def clear(self, place: Place) -> None:
        """A place holds nothing any more, in any tier. Cost: all that it held."""
        stocks = self._stocks.pop(place, {})
        for stock in stocks.values():
            for key in stock.blocks.values():
                mask = stock.holders.get(key, 0) & ~stock.bit
                if mask:
                    stock.holders[key] = mask
                else:
                    stock.holders.pop(key, None)
        for stock in list(stocks.values())[:1]:
            for size in list(self._sizes):
                self._sizes[size] &= ~stock.bit
                if not self._sizes[size]:
                    del self._sizes[size]
            self._names[stock.bit.bit_length() - 1] = None

    def _stock(self, place: Place, tier: str) -> _Stock:
        stocks = self._stocks.setdefault(place, {})
        stock = stocks.get(tier)
        if stock is None:
            if stocks:
                bit = next(iter(stocks.values())).bit
            else:
                if None not in self._names:
                    self._names.append(None)
                at = self._names.index(None)
                self._names[at] = place
                bit = 1 << at
            stock = stocks[tier] = _Stock(bit, self._tiers.setdefault(tier, {}))
        return stock

    def _elsewhere(self, place: Place, parent: Hash | None) -> int | None:
        """A parent that has gone from this tier, or never was there, may lie in another one."""
        for stock in self._stocks[place].values():
            key = None if parent is None else stock.blocks.get(parent)
            if key is not None:
                return key
        return None

    def _sized(self, block_size: int, stock: _Stock) -> bool:
        among = self._sizes.get(block_size)
        if among is None and len(self._sizes) >= _MOST_SIZES:
            return False
        self._sizes[block_size] = (among or 0) | stock.bit
        return True

    # --- what is asked -----------------------------------------------------------------------

    def lookup(self, tokens: TokenArray, lora: str = "", salt: str = "") -> dict[Place, Held]:
        """What each place holds of this prompt; who holds nothing is not named."""
        found: dict[Place, Held] = {}
        root = self._keys.root(lora, salt)
        tiers = [(name, held) for name, held in self._tiers.items() if held]
        for size, among in self._sizes.items():
            if len(tokens) < size or not tiers:
                continue
            keys = self._keys.after(root, tokens[:MAX_TOKENS], size)
            changes = _changes(keys, among, [held for _, held in tiers])
            for place, held in self._held(changes, [name for name, _ in tiers], size).items():
                if place not in found or found[place].tokens < held.tokens:
                    found[place] = held
        return found

    def _held(
        self, changes: Iterator[tuple[int, list[int]]], tiers: list[str], size: int
    ) -> dict[Place, Held]:
        found: dict[int, Held] = {}
        since: dict[int, int] = {}
        before = [0] * len(tiers)
        for at, now in changes:
            for tier, old, new in zip(tiers, before, now, strict=True):
                for bit in _bits(old & ~new):
                    tokens = (at - since[bit]) * size
                    held = found.get(bit)
                    if held is None:
                        found[bit] = Held(tokens, {tier: tokens})
                    else:
                        held.tokens += tokens
                        held.tiers[tier] = held.tiers.get(tier, 0) + tokens
            for old, new in zip(before, now, strict=True):
                for bit in _bits(new & ~old):
                    since[bit] = at
            before = now
        named: dict[Place, Held] = {}
        for bit, held in found.items():
            place = self._names[bit]
            assert place is not None, "a bit without a place"
            named[place] = held
        return named

    def check(self) -> None:
        """Recount everything and assert that it agrees. Cost: all of it."""
        for tier, holders in self._tiers.items():
            counted: dict[int, int] = {}
            for place, stocks in self._stocks.items():
                stock = stocks.get(tier)
                if stock is None:
                    continue
                assert self._names[stock.bit.bit_length() - 1] == place, place
                for key in stock.blocks.values():
                    counted[key] = counted.get(key, 0) | stock.bit
                spare = len(stock.blocks) - len(set(stock.blocks.values()))
                assert spare == sum(stock.twins.values()), (place, tier)
                assert set(stock.copies) <= set(stock.blocks), (place, tier)
            assert counted == holders, tier


def _sound(tokens: Sequence[int], count: int, block_size: int, before: int) -> bool:
    """Whether these can be the tokens of so many blocks behind so many tokens."""
    return (
        count > 0
        and 1 <= block_size <= MAX_BLOCK
        and len(tokens) == count * block_size
        and before + len(tokens) <= MAX_TOKENS
    )


def _changes(
    keys: list[int], alive: int, tiers: list[dict[int, int]]
) -> Iterator[tuple[int, list[int]]]:
    """Where, along the keys, the places change that still hold everything: in which tier each.

    The last one, where nobody is left, is at the end at most.
    """
    none = [0] * len(tiers)
    if len(tiers) == 1:  # one probe and one comparison a block
        get = tiers[0].get
        same = -1
        for at, key in enumerate(keys):
            mask = get(key, 0)
            if mask == same:
                continue
            same = mask
            if mask & alive != alive or not at:
                alive &= mask
                yield at, [alive]
                if not alive:
                    return
        yield len(keys), none
        return
    gets = [tier.get for tier in tiers]
    seen: list[int] | None = None
    for at, key in enumerate(keys):
        masks = [get(key, 0) for get in gets]
        if masks == seen:
            continue
        seen = masks
        now, taken = [], 0
        for mask in masks:
            mine = mask & alive & ~taken
            now.append(mine)
            taken |= mine
        alive = taken
        yield at, now
        if not alive:
            return
    yield len(keys), none


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def _fewer(counts: dict[Any, int], name: object) -> bool:
    """One less of this, if there is one."""
    count = counts.get(name, 0)
    if count > 1:
        counts[name] = count - 1
    elif count:
        del counts[name]
    return bool(count)
