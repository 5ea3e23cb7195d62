"""`PrefixIndex`: who holds which prefix, in which tier."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvkeep.router.held import Held, Tier, in_one_tier, in_several_tiers
from kvkeep.router.keys import MAX_TOKENS, PrefixKeys, length_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvkeep.tokens import TokenArray

    Hash = int | bytes

__all__ = ["Place", "PrefixIndex"]

MAX_BLOCK = 65_536
_MAX_TOKEN = 2**31 - 1
_FEW = 64  # tokens
_MOST_SIZES = 16
"""Block sizes in use at once; each costs a pass of its own in a lookup."""
_MOST_TIERS = 16
"""Names of tiers that are ever heard of; each costs a probe for every block in a lookup."""


class Place(NamedTuple):
    """Where blocks lie: one rank of an instance."""

    instance: str
    rank: int = 0


@dataclass(slots=True, eq=False)
class _Stock:
    """What one place has in one tier, under its own hashes."""

    bit: int
    holders: dict[int, int]
    """The tier's, of all places: prefix key → places, a bit each."""
    sizes: set[int]
    """The tier's, of all places: block sizes."""
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
        self._tiers = {tier: Tier(tier) for tier in tiers}
        self._stocks: dict[Place, dict[str, _Stock]] = {}
        self._names: list[Place | None] = []  # by bit
        self._sizes: dict[int, int] = {}  # block size → places that have such blocks

    def __len__(self) -> int:
        """Blocks of all places and tiers, copies counted once."""
        return sum(len(one.blocks) for stocks in self._stocks.values() for one in stocks.values())

    @property
    def num_prefixes(self) -> int:
        """Different prefixes, each tier's counted."""
        return sum(len(tier.holders) for tier in self._tiers.values())

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
        if tier not in self._tiers and len(self._tiers) >= _MOST_TIERS:
            self.refused += count
            return
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
            shelf = self._tiers.setdefault(tier, Tier(tier))
            stock = stocks[tier] = _Stock(bit, shelf.holders, shelf.sizes)
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
        stock.sizes.add(block_size)
        return True

    # --- what is asked -----------------------------------------------------------------------

    def lookup(self, tokens: TokenArray, lora: str = "", salt: str = "") -> dict[Place, Held]:
        """What each place holds of this prompt; who holds nothing is not named."""
        found: dict[int, Held] = {}
        root = self._keys.root(lora, salt)
        for size, among in self._sizes.items():
            # Blocks that end between ours cannot go on for long from where ours end.
            tiers = [one for one in self._tiers.values() if one.holders and one.has(size)]
            if not tiers or len(tokens) < size:
                continue
            keys = self._keys.after(root, tokens[:MAX_TOKENS], size)
            if len(tiers) == 1:
                held = in_one_tier(keys, among, tiers[0], size)
            else:
                held = in_several_tiers(keys, among, tiers, size)
            for bit, one in held.items():
                if bit not in found or found[bit].tokens < one.tokens:
                    found[bit] = one
        named: dict[Place, Held] = {}
        for bit, one in found.items():
            place = self._names[bit]
            assert place is not None, "a bit without a place"
            named[place] = one
        return named

    def check(self) -> None:
        """Recount everything and assert that it agrees. Cost: all of it."""
        for tier, shelf in self._tiers.items():
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
            assert counted == shelf.holders, tier


def _sound(tokens: Sequence[int], count: int, block_size: int, before: int) -> bool:
    """Whether these can be the tokens of so many blocks behind so many tokens."""
    return (
        count > 0
        and 1 <= block_size <= MAX_BLOCK
        and len(tokens) == count * block_size
        and before + len(tokens) <= MAX_TOKENS
    )


def _fewer(counts: dict[Any, int], name: object) -> bool:
    """One less of this, if there is one."""
    count = counts.get(name, 0)
    if count > 1:
        counts[name] = count - 1
    elif count:
        del counts[name]
    return bool(count)
