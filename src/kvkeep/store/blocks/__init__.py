"""`BlockStore`: opaque bytes under block keys, over tiers; and the base that `KVStore` shares.

store.py    BlockStore
base.py     what both stores have: life cycle, page-locked memory, the log, results and statistics
returns.py  follows conversations by their blocks, also for stores in other processes
"""

from __future__ import annotations

from kvkeep.store.blocks.base import Lookup, Put, StoreStats
from kvkeep.store.blocks.returns import BlockReturns, ReturnRecorder
from kvkeep.store.blocks.store import BlockStore

__all__ = [
    "BlockReturns",
    "BlockStore",
    "Lookup",
    "Put",
    "ReturnRecorder",
    "StoreStats",
]
