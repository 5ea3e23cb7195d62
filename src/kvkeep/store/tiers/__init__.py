"""Tiers: blocks in memory, and in slower and larger places behind it.

A `Planner` decides the moves of blocks; readers, writers and the `Demoter` perform them:

tiered.py        `TieredStore`, which connects all of these, and deletes blocks by request
levels.py        lookups over all levels: where a block is, or why it is missing
tiering.py       decides which tiers hold a block, and its moves
reading.py       reads prompts; shared_read.py: one read of a block for several requests;
                 block_prefetch.py: the handle of a read in the background
writing.py       stores prompts; write_queue.py: pending writes and deletions of each tier
demoting.py      moves evicted blocks to a lower tier
loss_log.py      records why blocks were lost
tier_returns.py  follows conversations, for policies that order by their returns:
                 conversations.py: which prompts are returns

One tier:

memory.py        the memory tier, level 0; shared_memory.py: the same for all processes of a node
front.py         what both have in common; reserving.py: room for records
tier.py          a lower tier: one backend, with threads and statistics (counters.py)
calls.py         guards backend calls, turns failures into misses; breaker.py, workers.py
known.py         which blocks the tier holds and may serve
catalogue.py     known blocks: block_table.py, eviction_order.py, packed.py;
                 tier_shares.py: fair shares for tenants; two_queues.py: the policy 2q
listing.py       keeps the catalogue in step with the backend; evicts within budget and quotas
record.py        format of a stored block; record_codec.py: encodes, verifies and decodes it
opening.py       opens tiers from URLs
"""

from __future__ import annotations

from kvkeep.store.tiers.block_prefetch import BlockPrefetch
from kvkeep.store.tiers.buffer import PROMPT_TOKENS, buffer_bytes
from kvkeep.store.tiers.conversations import Chain
from kvkeep.store.tiers.counters import TierCounters, TierStats
from kvkeep.store.tiers.loss_log import Loss, LossKind, LossLog, Miss
from kvkeep.store.tiers.memory import MemorySpec, MemoryTier
from kvkeep.store.tiers.notes import note_of
from kvkeep.store.tiers.opening import (
    TIER_OPTIONS,
    TIERINGS,
    check_tiers,
    open_backend,
    open_tiers,
    tiering,
)
from kvkeep.store.tiers.tier import Tier, TierOptions, TierSpec
from kvkeep.store.tiers.tier_returns import TierReturns
from kvkeep.store.tiers.tier_shares import TenantWeights
from kvkeep.store.tiers.tiered import Removed, TieredStore
from kvkeep.store.tiers.tiering import Exclusive, Inclusive, PassThrough, TieringPolicy
from kvkeep.store.tiers.writing import Written

__all__ = [
    "PROMPT_TOKENS",
    "TIERINGS",
    "TIER_OPTIONS",
    "BlockPrefetch",
    "Chain",
    "Exclusive",
    "Inclusive",
    "Loss",
    "LossKind",
    "LossLog",
    "MemorySpec",
    "MemoryTier",
    "Miss",
    "PassThrough",
    "Removed",
    "TenantWeights",
    "Tier",
    "TierCounters",
    "TierOptions",
    "TierReturns",
    "TierSpec",
    "TierStats",
    "TieredStore",
    "TieringPolicy",
    "Written",
    "buffer_bytes",
    "check_tiers",
    "note_of",
    "open_backend",
    "open_tiers",
    "tiering",
]
