"""`BlockStore`: opaque bytes under block keys, over tiers; and the base that `KVStore` shares.

store.py    BlockStore
base.py     what both stores have: life cycle, hooks, page-locked memory, sharing by name
returns.py  follows conversations by their blocks, also for stores in other processes
shared.py   the shared stores of a process, by name
stats.py    results and statistics; in which tiers blocks lie
timing.py   one `Operation` for each put and get
"""

from __future__ import annotations

from kvkeep.store.blocks.returns import BlockReturns, ReturnNotes, ReturnRecorder, ReturnReplay
from kvkeep.store.blocks.stats import Lookup, Put, StoreStats
from kvkeep.store.blocks.store import BlockStore
from kvkeep.store.blocks.timing import Operation

__all__ = [
    "BlockReturns",
    "BlockStore",
    "Lookup",
    "Operation",
    "Put",
    "ReturnNotes",
    "ReturnRecorder",
    "ReturnReplay",
    "StoreStats",
]
