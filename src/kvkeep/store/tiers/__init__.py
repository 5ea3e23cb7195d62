"""Tiers: blocks in memory, and in slower and larger places behind it.

record.py     a block as it lies in a tier: header, checksum, payload
catalogue.py  what a tier holds, in which order it may go, pins and quotas
breaker.py    leaves alone who fails again and again
workers.py    threads with a bounded queue
turns.py      who makes room gets it
tier.py       a place below memory; where its failures become misses
front.py      the memory in front
flight.py     a block on its way up
plan.py       what moves where
adaptive.py   a plan that watches what the others would do
tiered.py     all of it together
fates.py      what became of blocks that are gone
notes.py      what a namespace is, noted beside its blocks
opening.py    from URLs
"""

from __future__ import annotations

from kvkeep.store.tiers.adaptive import AdaptiveTiering
from kvkeep.store.tiers.counters import TierCounters, TierStats
from kvkeep.store.tiers.fates import Fate, Fates, Happened, What
from kvkeep.store.tiers.front import Front
from kvkeep.store.tiers.notes import note_of
from kvkeep.store.tiers.opening import TIER_OPTIONS, TIERINGS, open_backend, open_tiers, tiering
from kvkeep.store.tiers.plan import Exclusive, Inclusive, TieringPolicy
from kvkeep.store.tiers.tier import Tier, TierOptions
from kvkeep.store.tiers.tiered import BlockPrefetch, Removed, TieredStore, Written

__all__ = [
    "TIERINGS",
    "TIER_OPTIONS",
    "AdaptiveTiering",
    "BlockPrefetch",
    "Exclusive",
    "Fate",
    "Fates",
    "Front",
    "Happened",
    "Inclusive",
    "Removed",
    "Tier",
    "TierCounters",
    "TierOptions",
    "TierStats",
    "TieredStore",
    "TieringPolicy",
    "What",
    "Written",
    "note_of",
    "open_backend",
    "open_tiers",
    "tiering",
]
