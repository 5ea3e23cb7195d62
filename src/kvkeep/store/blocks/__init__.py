"""`BlockStore`: opaque bytes under block keys, over tiers; and the base that `KVStore` shares.

store.py    BlockStore
base.py     what both stores have: life cycle, hooks, pinned memory, sharing by name
placing.py  in which tiers blocks lie, and why others are not there
returns.py  follows conversations by their blocks
return_notes.py  tells stores in other processes of them
shared.py   the shared stores of a process, by name
stats.py    results and statistics
timing.py   one `Operation` for each put and get
pinning.py  page-locked memory, which a GPU copies at full speed
"""

from __future__ import annotations

from kvkeep.store.blocks.return_notes import ReturnNotes, ReturnRecorder, ReturnReplay
from kvkeep.store.blocks.returns import BlockReturns
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
