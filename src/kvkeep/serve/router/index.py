"""`PlacementIndex`: who holds which prefix, in which tier."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvkeep.core.errors import whole
from kvkeep.serve.router.held import HeldPrefix, TierBlocks, in_one_tier, in_several_tiers
from kvkeep.serve.router.keys import MAX_TOKENS, PrefixKeys, length_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvkeep.core.tokens import TokenArray

    Hash = int | bytes

__all__ = ["Place", "PlacementIndex"]

MAX_BLOCK = 65_536
_MAX_TOKEN = 2**31 - 1
_FEW = 64  # tokens
_MOST_SIZES = 4
"""Block sizes of a place; each that is in use anywhere costs a pass of its own in a lookup."""
_MOST_TIERS = 8
"""Tiers of a place; each that is in use anywhere costs a probe for every block in a lookup."""
_LONGEST_NAME = 64  # characters of a tier's name
_ROUND = 64
"""One part in so many of what an instance may have is forgotten at once, when it has too much."""


class Place(NamedTuple):
    """Where blocks lie: one rank of an instance."""

    instance: str
    rank: int = 0


@dataclass(slots=True, eq=False)
class _Share:
    """What one instance has of the index, over all its ranks and tiers."""

    blocks: int = 0
    evicted: int = 0
    stocks: list[_Stock] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Stock:
    """What one place has in one tier, under its own hashes."""

    share: _Share
    bit: int
    tier: TierBlocks
    holders: dict[int, int]
    """The tier's, of all places: prefix key → places, a bit each."""
    blocks: dict[Hash, int] = field(default_factory=dict)
    """Its own hash → prefix key; what was stored or looked up longest ago comes first."""
    copies: dict[Hash, int] = field(default_factory=dict)
    """How often a hash is there, besides once."""
    twins: dict[int, int] = field(default_factory=dict)
    """How many hashes stand for one key, besides one."""

    def add(self, block: Hash, key: int) -> None:
        known = self.blocks.get(block)
        if known == key:
            self.copies[block] = self.copies.get(block, 0) + 1
            self.refresh(block, key)
            return
        if known is not None:  # it says something else now: the removal in between was missed
            self.drop(block, all_copies=True)
        self.blocks[block] = key
        self.share.blocks += 1
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
        if key is None:
            return
        self.share.blocks -= 1
        if _fewer(self.twins, key):
            return
        mask = self.holders[key] & ~self.bit
        if mask:
            self.holders[key] = mask
        else:
            del self.holders[key]

    def refresh(self, block: Hash, key: int) -> None:
        """A block that is here is the last one to be forgotten."""
        del self.blocks[block]
        self.blocks[block] = key


class PlacementIndex:
    """Which places hold which prefix; an int of a bit a place for each prefix and tier.

    ``tiers`` name the tiers from the fastest on; others that are heard of come after. Of a block
    whose parent is not known nothing can be said: it is left out and counted (``orphans``), as is
    what contradicts itself (``refused``).

    ``most_blocks`` are kept of an instance, over all its ranks and tiers. Beyond, those of its
    fullest tier that were stored or looked up longest ago are forgotten and counted (`evicted`): an
    instance that tells more than it holds, or never of removals, takes nothing from the others.

    Thread safety: none. Cost: about 1.5 µs to store a block, and 0.1 µs a block to look a prompt
    up, however many places there are and however much is forgotten meanwhile. Memory: at most some
    200 bytes a block, where hashes are numbers; the feed takes none of more than 64 bytes.
    """

    def __init__(self, tiers: Sequence[str] = ("GPU",), *, most_blocks: int = 1_000_000) -> None:
        self.orphans = 0
        self.refused = 0
        self._keys = PrefixKeys()
        self._most = whole("most_blocks", most_blocks, 1)
        self._named = frozenset(tiers)
        self._tiers = {tier: TierBlocks(tier) for tier in tiers}
        self._shares: dict[str, _Share] = {}
        self._expected = _Share()  # what was not told, but is on its way: bound by the requests
        self._stocks: dict[Place, dict[str, _Stock]] = {}
        self._names: list[Place | None] = []  # by bit
        self._sizes: dict[int, int] = {}  # block size → places that have such blocks
        # Keys that were looked up and found, noted from when an instance comes near its bound.
        self._used: set[int] = set()
        self._notes_use = False

    def __len__(self) -> int:
        """Blocks of all places and tiers, copies counted once."""
        return self._expected.blocks + sum(share.blocks for share in self._shares.values())

    @property
    def num_prefixes(self) -> int:
        """Different prefixes, each tier's counted."""
        return sum(len(tier.holders) for tier in self._tiers.values())

    @property
    def evicted(self) -> int:
        """Blocks that were forgotten since their instance had too many."""
        return sum(share.evicted for share in self._shares.values())

    def share_of(self, instance: str) -> tuple[int, int]:
        """Blocks of an instance that are known, and such that were forgotten."""
        share = self._shares.get(instance)
        return (share.blocks, share.evicted) if share is not None else (0, 0)

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
        stock = self._told(place, tier)
        if stock is None:
            self.refused += count
            return
        start = self._keys.root(lora, salt) if parent is None else stock.blocks.get(parent)
        if start is None:
            start = self._elsewhere(place, parent)
        if start is None:
            self.orphans += count
            return
        keys = None
        if _sound(tokens, count, block_size, length_of(start)) and self._sized(stock, block_size):
            keys = self._keys_of(start, tokens, block_size, marks)
        if keys is None:
            self.refused += count
            return
        if self._notes_use and parent is not None:
            self._note([start])
        blocks, holders, bit, share = stock.blocks, stock.holders, stock.bit, stock.share
        for block, key in zip(hashes, keys, strict=True):
            mask = holders.get(key, 0)
            if block in blocks or mask & bit:
                stock.add(block, key)
            else:
                blocks[block] = key
                holders[key] = mask | bit
                share.blocks += 1
        if share.blocks > self._most - self._most // 8:
            self._notes_use = True
            if share.blocks > self._most:
                self._forget(share)

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
        stock = self._stock(place, tier, self._expected)
        self._use_size(stock, step)
        keys = self._keys.after(self._keys.root(lora, salt), tokens[:MAX_TOKENS], step)
        for key in keys:
            stock.add(key, key)
        return keys

    def clear(self, place: Place) -> None:
        """A place holds nothing any more, in any tier. Cost: all that it held."""
        stocks = self._stocks.pop(place, {})
        for name, stock in stocks.items():
            for key in stock.blocks.values():
                mask = stock.holders.get(key, 0) & ~stock.bit
                if mask:
                    stock.holders[key] = mask
                else:
                    stock.holders.pop(key, None)
            stock.share.blocks -= len(stock.blocks)
            stock.share.stocks.remove(stock)
            _without(stock.tier.sizes, stock.bit)
            if name not in self._named and not any(name in one for one in self._stocks.values()):
                del self._tiers[name]
        for stock in list(stocks.values())[:1]:
            _without(self._sizes, stock.bit)
            self._names[stock.bit.bit_length() - 1] = None

    def remove_instance(self, instance: str) -> None:
        """Nothing is left of an instance, not even what was counted."""
        for place in [place for place in self._stocks if place.instance == instance]:
            self.clear(place)
        self._shares.pop(instance, None)

    def _told(self, place: Place, tier: str) -> _Stock | None:
        """Where to put what a place tells of a tier; None where it names too many, or too long."""
        stocks = self._stocks.get(place, {})
        if tier not in stocks and (len(stocks) >= _MOST_TIERS or len(tier) > _LONGEST_NAME):
            return None
        return self._stock(place, tier, self._shares.setdefault(place.instance, _Share()))

    def _stock(self, place: Place, tier: str, share: _Share) -> _Stock:
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
            shelf = self._tiers.setdefault(tier, TierBlocks(tier))
            stock = stocks[tier] = _Stock(share, bit, shelf, shelf.holders)
            share.stocks.append(stock)
        return stock

    def _elsewhere(self, place: Place, parent: Hash | None) -> int | None:
        """A parent that has gone from this tier, or never was there, may lie in another one."""
        for stock in self._stocks[place].values():
            key = None if parent is None else stock.blocks.get(parent)
            if key is not None:
                return key
        return None

    def _sized(self, stock: _Stock, block_size: int) -> bool:
        """Whether a place may have blocks of this size; if so, it is known to have some."""
        bit = stock.bit
        if not stock.tier.sizes.get(block_size, 0) & bit:
            mine = {
                size
                for other in stock.share.stocks
                if other.bit == bit
                for size, places in other.tier.sizes.items()
                if places & bit
            }
            if block_size not in mine and len(mine) >= _MOST_SIZES:
                return False
            self._use_size(stock, block_size)
        return True

    def _use_size(self, stock: _Stock, block_size: int) -> None:
        for sizes in (self._sizes, stock.tier.sizes):
            sizes[block_size] = sizes.get(block_size, 0) | stock.bit

    def _note(self, keys: list[int]) -> None:
        """These are in use. It is a hint: what is used is noted again soon after it was lost."""
        if len(self._used) + len(keys) > self._most:
            self._used.clear()
        self._used.update(keys[: self._most])

    def _forget(self, share: _Share) -> None:
        """Bring an instance below its bound.

        Some at a time, since finding the first entries of a dict costs the holes before them. What
        was looked up since it was here last has a second chance: a prefix that many prompts share
        is stored once, before all that goes on from it.
        """
        left = max(share.blocks - self._most, self._most // _ROUND)
        while left > 0:
            stock = max(share.stocks, key=lambda one: len(one.blocks))
            oldest = min(2 * left, max(left, len(stock.blocks) // 2))  # what is new stays
            gone, spare = 0, oldest - left
            for block, key in list(islice(stock.blocks.items(), oldest)):
                if spare and key in self._used:
                    self._used.discard(key)
                    stock.refresh(block, key)
                    spare -= 1
                else:
                    stock.drop(block, all_copies=True)
                    gone += 1
                    if gone == left:
                        break
            share.evicted += gone
            left -= gone

    # --- what is asked -----------------------------------------------------------------------

    def lookup(self, tokens: TokenArray, lora: str = "", salt: str = "") -> dict[Place, HeldPrefix]:
        """What each place holds of this prompt; who holds nothing is not named."""
        found: dict[int, HeldPrefix] = {}
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
            if self._notes_use and held:
                longest = max(one.tokens for one in held.values())
                self._note(keys[: longest // size])
            for bit, one in held.items():
                if bit not in found or found[bit].tokens < one.tokens:
                    found[bit] = one
        named: dict[Place, HeldPrefix] = {}
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
        for instance, share in self._shares.items():
            told = [
                stock
                for place, stocks in self._stocks.items()
                if place.instance == instance
                for stock in stocks.values()
                if stock.share is share
            ]
            assert {*map(id, told)} == {*map(id, share.stocks)}, instance
            assert share.blocks == sum(len(stock.blocks) for stock in told) <= self._most, instance


def _sound(tokens: Sequence[int], count: int, block_size: int, before: int) -> bool:
    """Whether these can be the tokens of so many blocks behind so many tokens."""
    return (
        count > 0
        and 1 <= block_size <= MAX_BLOCK
        and len(tokens) == count * block_size
        and before + len(tokens) <= MAX_TOKENS
    )


def _without(sizes: dict[int, int], bit: int) -> None:
    """A place has blocks of no size any more."""
    for size in list(sizes):
        sizes[size] &= ~bit
        if not sizes[size]:
            del sizes[size]


def _fewer(counts: dict[Any, int], name: object) -> bool:
    """One less of this, if there is one."""
    count = counts.get(name, 0)
    if count > 1:
        counts[name] = count - 1
    elif count:
        del counts[name]
    return bool(count)
