"""Tiers: blocks in memory, and in slower and larger places behind it.

A `Planner` decides the moves of blocks; readers, writers and `Moves` perform them:

tiered.py        `TieredStore`, which connects all of these; removal.py: deletes by request
levels.py        lookups over all levels: where a block is, or why it is missing
tiering.py       decides which tiers hold a block, and its moves
reading.py       reads prompts, each block once for several requests; block_prefetch.py: the handle
                 of a read in the background
writing.py       stores prompts
moves.py         writes blocks to tiers, and moves evicted ones to a lower tier;
                 prompt_writes.py: a prompt's beginning before its end
loss_log.py      records why blocks were lost
conversations.py  follows conversations, for policies that order by their returns;
                 block_waits.py: which of them wait at a block

One tier:

memory.py        the memory tier, level 0; shared_memory.py: the same for all processes of a node
tier.py          a lower tier: one backend, with threads and statistics (counters.py);
                 tier_room.py: makes room there, and deletes
calls.py         guards backend calls by circuit breakers, turns failures into misses; workers.py
states.py        what is done with each block now; notes.py: descriptions of namespaces
index.py         which blocks it has, and their eviction order; cold_blocks.py: many in little
                 memory; tier_shares.py: fair shares for tenants; two_queues.py: the policy 2q
record.py        format of a stored block; record_codec.py: encodes, verifies and decodes it
opening.py       opens tiers from URLs
"""

from __future__ import annotations

from kvkeep.store.tiers.block_prefetch import BlockPrefetch
from kvkeep.store.tiers.buffer import PROMPT_TOKENS, buffer_bytes
from kvkeep.store.tiers.conversations import Chain, Conversations, ReturnNotes
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
from kvkeep.store.tiers.removal import Removed
from kvkeep.store.tiers.tier import Tier, TierOptions, TierSpec
from kvkeep.store.tiers.tier_shares import TenantWeights
from kvkeep.store.tiers.tiered import ReadBlocks, TieredStore
from kvkeep.store.tiers.tiering import Exclusive, Inclusive, PassThrough, TieringPolicy
from kvkeep.store.tiers.writing import Written

__all__ = [
    "PROMPT_TOKENS",
    "TIERINGS",
    "TIER_OPTIONS",
    "BlockPrefetch",
    "Chain",
    "Conversations",
    "Exclusive",
    "Inclusive",
    "Loss",
    "LossKind",
    "LossLog",
    "MemorySpec",
    "MemoryTier",
    "Miss",
    "PassThrough",
    "ReadBlocks",
    "Removed",
    "ReturnNotes",
    "TenantWeights",
    "Tier",
    "TierCounters",
    "TierOptions",
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
