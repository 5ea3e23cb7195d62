"""`BlockStore`: opaque bytes under block keys, over tiers; and the base that `KVStore` shares.

store.py    BlockStore
base.py     what both stores have: life cycle, page-locked memory, sharing by name, the log
returns.py  follows conversations by their blocks, also for stores in other processes
shared.py   the shared stores of a process, by name
stats.py    results and statistics; in which tiers blocks lie
"""

from __future__ import annotations

from kvkeep.store.blocks.returns import BlockReturns, ReturnNotes, ReturnRecorder, ReturnReplay
from kvkeep.store.blocks.stats import Lookup, Put, StoreStats
from kvkeep.store.blocks.store import BlockStore

__all__ = [
    "BlockReturns",
    "BlockStore",
    "Lookup",
    "Put",
    "ReturnNotes",
    "ReturnRecorder",
    "ReturnReplay",
    "StoreStats",
]
