"""`HeldGroup`: how much of a prompt which places hold, found in one pass over its prefix keys.

A *place* is one rank of an instance. Sets of places are integers with one bit per place. Places
that hold the same part of a prompt stay together in one set, so the cost of a lookup depends on how
many different parts are held, not on the number of places.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "HeldGroup", "HeldPrefix", "TierBlocks", "bits_of", "in_one_tier", "in_several_tiers",
    "longest_first",
]  # fmt: skip


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


class HeldGroup(NamedTuple):
    """The places (one bit each) that hold the same part of a prompt."""

    places: int
    held: HeldPrefix


@dataclass(slots=True, eq=False)
class TierBlocks:
    """All blocks of one tier: prefix key → places, one bit each."""

    name: str
    holders: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    """Block size in tokens → places with such blocks. A place stays in until it is cleared."""

    def has(self, size: int) -> bool:
        """Whether blocks end at every multiple of ``size`` tokens."""
        return any(size % step == 0 for step in self.sizes)


def in_one_tier(keys: list[int], among: int, tier: TierBlocks, size: int) -> list[HeldGroup]:
    """Return the held prefixes of the places in the mask ``among``, each place at most once.

    ``keys`` are those of the prompt's prefixes, ``size`` tokens apart. Cost: one dict lookup and
    one comparison per key.
    """
    groups: list[HeldGroup] = []

    def add(places: int, at: int) -> None:
        groups.append(HeldGroup(places, HeldPrefix(at * size, {tier.name: at * size})))

    get = tier.holders.get
    alive, same = among, among
    for at, key in enumerate(keys):
        mask = get(key, 0)
        if mask == same:
            continue
        same = mask
        left = alive & mask
        if left != alive:
            if at:
                add(alive ^ left, at)
            alive = left
            if not alive:
                return groups
    if keys:
        add(alive, len(keys))
    return groups


@dataclass(slots=True, eq=False)
class _Run:
    """Places that hold the prompt so far, in the tier of number ``tier`` since key ``since``."""

    places: int
    tier: int
    since: int
    before: HeldPrefix

    def until(self, at: int, tiers: list[TierBlocks], size: int) -> HeldPrefix:
        """Return what they hold up to key ``at``."""
        held = HeldPrefix(self.before.tokens, dict(self.before.tiers))
        if at > self.since:
            held.add(tiers[self.tier].name, (at - self.since) * size)
        return held


def in_several_tiers(
    keys: list[int], among: int, tiers: list[TierBlocks], size: int
) -> list[HeldGroup]:
    """`in_one_tier` for blocks in any of ``tiers``; the first tier that has a block counts.

    Cost: one dict lookup per key and tier, and some work per change of holders.
    """
    groups: list[HeldGroup] = []
    gets = [tier.holders.get for tier in tiers]
    seen: list[int] | None = None
    runs = [_Run(among, 0, 0, HeldPrefix())]
    for at, key in enumerate(keys):
        masks = [get(key, 0) for get in gets]
        if masks == seen:
            continue
        seen = masks
        now, taken = [], 0
        for mask in masks:
            now.append(mask & ~taken)
            taken |= mask
        runs = [part for run in runs for part in _split(run, now, at, tiers, size, groups)]
        if not runs:
            return groups
    if keys:
        groups += [HeldGroup(run.places, run.until(len(keys), tiers, size)) for run in runs]
    return groups


def _split(  # noqa: PLR0917 - the walk's own state
    run: _Run, now: list[int], at: int, tiers: list[TierBlocks], size: int, groups: list[HeldGroup]
) -> list[_Run]:
    """Return the runs that go on at key ``at``; add the places that end before it to ``groups``."""
    stay = run.places & now[run.tier]
    if stay == run.places:
        return [run]
    held = run.until(at, tiers, size)
    parts = [
        _Run(places, number, at, held)
        for number, mask in enumerate(now)
        if number != run.tier and (places := run.places & mask)
    ]
    ended = run.places & ~stay
    for part in parts:
        ended &= ~part.places
    if ended and at:
        groups.append(HeldGroup(ended, held))
    run.places = stay
    return [run, *parts] if stay else parts


def longest_first(groups: list[HeldGroup]) -> list[HeldGroup]:
    """Return groups, each place once, where it holds most; those that hold most first."""
    seen, ranked = 0, []
    for places, held in sorted(groups, key=lambda group: -group.held.tokens):
        fresh = places & ~seen
        seen |= places
        if fresh:
            ranked.append(HeldGroup(fresh, held))
    return ranked


def bits_of(mask: int) -> list[int]:
    """Return the positions of the bits that are set."""
    slots = []
    while mask:
        low = mask & -mask
        slots.append(low.bit_length() - 1)
        mask ^= low
    return slots
