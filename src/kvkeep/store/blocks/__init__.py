"""`BlockStore`: opaque bytes under block keys, over tiers; and what it shares with `KVStore`.

store.py    BlockStore
stats.py    what is answered and reported
shared.py   one store a name in a process
timing.py   how long puts and gets take
pinning.py  memory that a GPU copies fast
"""

from __future__ import annotations

from kvkeep.store.blocks.stats import Lookup, Put, StoreStats
from kvkeep.store.blocks.store import BlockStore
from kvkeep.store.blocks.timing import Operation

__all__ = ["BlockStore", "Lookup", "Operation", "Put", "StoreStats"]
