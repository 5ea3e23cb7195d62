"""`KVStore`: the KV of token sequences, looked up by tokens, over tiers.

store.py      KVStore
options.py    the arguments of a KVStore, checked
forms.py      layouts of KV: the caller's tensors, and the raw bytes of a block
names.py      namespaces, tenants and block ids
lookup.py     which blocks of a prompt are stored
transfers.py  put and get · prefetch.py: reads in the background
reporting.py  counts, hooks and the log · binding.py: which model a store serves
why.py        why tokens are missing
removal.py    which blocks `remove` deletes
"""

from __future__ import annotations

from kvkeep.store.kv.prefetch import Prefetch
from kvkeep.store.kv.store import KVStore

__all__ = ["KVStore", "Prefetch"]
