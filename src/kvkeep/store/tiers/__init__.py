"""Tiers: blocks in memory, and in slower and larger places behind it.

A `Planner` decides the moves of blocks; readers, writers and the `Demoter` perform them:

tiered.py        `TieredStore`, all of it together
levels.py        the levels: where a block is, and what became of one that is gone
tiering.py       policies: which tier admits, promotes and demotes a block; adaptive.py: a mix
planner.py       moves as values, decided by a policy
prompt_moves.py  the order of moves when a prompt is read or stored; a replay performs the same
reading.py       a prompt on its way up; shared_read.py: one read of a block for all requests
writing.py       a prompt on its way down; write_queue.py: what each tier writes and deletes
demoting.py      blocks that have to leave a level
removing.py      blocks that are deleted by request
loss_log.py      what became of blocks that are gone

One tier:

memory.py        the memory above the tiers
tier.py          one backend below it, with its threads
calls.py         calls to the backend: where its failures become misses; breaker.py, workers.py
health.py        whether reading and writing it is of use now
known.py         which blocks it holds and serves
catalogue.py     their order of eviction: block_table.py, eviction_order.py, tier_pins.py, packed.py
listing.py       keeps that in step with the backend; lookups.py: asks it; notes.py: namespaces
space.py         makes room within budget and quotas; turns.py: fairly
record.py        a block as it is stored: header, checksum, payload; record_codec.py: encoded
opening.py       tiers from URLs
"""

from __future__ import annotations

from kvkeep.store.tiers.adaptive import AdaptiveTiering
from kvkeep.store.tiers.counters import TierCounters, TierStats
from kvkeep.store.tiers.loss_log import Loss, LossKind, LossLog, Miss
from kvkeep.store.tiers.memory import MemorySpec, MemoryTier
from kvkeep.store.tiers.notes import note_of
from kvkeep.store.tiers.opening import TIER_OPTIONS, TIERINGS, open_backend, open_tiers, tiering
from kvkeep.store.tiers.reading import BlockPrefetch
from kvkeep.store.tiers.removing import Removed
from kvkeep.store.tiers.tier import Tier, TierOptions, TierSpec
from kvkeep.store.tiers.tiered import TieredStore
from kvkeep.store.tiers.tiering import Exclusive, Inclusive, TieringPolicy
from kvkeep.store.tiers.writing import Written

__all__ = [
    "TIERINGS",
    "TIER_OPTIONS",
    "AdaptiveTiering",
    "BlockPrefetch",
    "Exclusive",
    "Inclusive",
    "Loss",
    "LossKind",
    "LossLog",
    "MemorySpec",
    "MemoryTier",
    "Miss",
    "Removed",
    "Tier",
    "TierCounters",
    "TierOptions",
    "TierSpec",
    "TierStats",
    "TieredStore",
    "TieringPolicy",
    "Written",
    "note_of",
    "open_backend",
    "open_tiers",
    "tiering",
]
