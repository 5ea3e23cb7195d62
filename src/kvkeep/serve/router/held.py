"""`HeldPrefix`: how much of a prompt each place holds, found in one pass over its prefix keys.

A *place* is one rank of an instance. Sets of places are integers with one bit per place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["HeldPrefix", "TierBlocks", "in_one_tier", "in_several_tiers"]


@dataclass(slots=True)
class HeldPrefix:
    """The cached beginning of a prompt at one place: its tokens, in total and by tier.

    A block present in several tiers counts for the first of them.
    """

    tokens: int = 0
    tiers: dict[str, int] = field(default_factory=dict)

    def add(self, tier: str, tokens: int) -> None:
        """Count ``tokens`` more, in ``tier``."""
        self.tokens += tokens
        self.tiers[tier] = self.tiers.get(tier, 0) + tokens


@dataclass(slots=True, eq=False)
class TierBlocks:
    """All blocks of one tier: prefix key → places, one bit each."""

    name: str
    holders: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    """Block size in tokens → places with such blocks. A place stays in until it is cleared."""

    def has(self, size: int) -> bool:
        """Whether blocks end at every multiple of ``size`` tokens."""
        return any(size % one == 0 for one in self.sizes)


def in_one_tier(keys: list[int], among: int, tier: TierBlocks, size: int) -> dict[int, HeldPrefix]:
    """Return the held prefixes of the places in the mask ``among``, by bit.

    ``keys`` are those of the prompt's prefixes, ``size`` tokens apart. Cost: one dict lookup and
    one comparison per key.
    """
    found: dict[int, HeldPrefix] = {}
    get = tier.holders.get
    alive, same = among, among
    for at, key in enumerate(keys):
        mask = get(key, 0)
        if mask == same:
            continue
        same = mask
        left = alive & mask
        if left != alive:
            for bit in _bits(alive ^ left) if at else ():
                found[bit] = HeldPrefix(at * size, {tier.name: at * size})
            alive = left
            if not alive:
                return found
    for bit in _bits(alive) if keys else ():
        found[bit] = HeldPrefix(len(keys) * size, {tier.name: len(keys) * size})
    return found


def in_several_tiers(
    keys: list[int], among: int, tiers: list[TierBlocks], size: int
) -> dict[int, HeldPrefix]:
    """`in_one_tier` for blocks in any of ``tiers``; the first tier that has a block counts.

    Cost: one dict lookup per key and tier, and some work per change of holders.
    """
    found: dict[int, HeldPrefix] = {}
    since: dict[int, int] = {}
    gets = [tier.holders.get for tier in tiers]
    before = [0] * len(tiers)
    seen: list[int] | None = None
    alive = among
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
        _count(found, since, before, now, at, tiers, size)
        before = now
        if not alive:
            return found
    _count(found, since, before, [0] * len(tiers), len(keys), tiers, size)
    return found


def _count(  # noqa: PLR0917 - the walk's own state
    found: dict[int, HeldPrefix],
    since: dict[int, int],
    before: list[int],
    now: list[int],
    at: int,
    tiers: list[TierBlocks],
    size: int,
) -> None:
    """Add the runs of places that leave a tier at key ``at``; begin those of places that enter."""
    for tier, old, new in zip(tiers, before, now, strict=True):
        for bit in _bits(old & ~new):
            found.setdefault(bit, HeldPrefix()).add(tier.name, (at - since[bit]) * size)
    for old, new in zip(before, now, strict=True):
        for bit in _bits(new & ~old):
            since[bit] = at


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
