"""The store: KV that outlives the GPU, the process and the machine.

store.py    KVStore: put, get, lookup, prefetch of tokens and tensors
blocks.py   BlockStore: the same for opaque bytes under block keys
forms.py    the forms of KV that engines have
names.py    from tokens to block ids
stats.py    what is answered and reported
why.py      why tokens are not there
removal.py  what has to go with a prompt
shared.py   one store a name in a process
timing.py   how long puts and gets take
pinning.py  memory that a GPU copies fast
identity/   `model_identity`: what decides the numbers of a model's KV, for the namespace
weights.py  a digest of the weights in files, a part of it
"""

from __future__ import annotations

from kvkeep.store.blocks import BlockStore
from kvkeep.store.identity import model_identity
from kvkeep.store.stats import Lookup, Put, StoreStats
from kvkeep.store.store import KVStore, Prefetch
from kvkeep.store.timing import Operation
from kvkeep.store.weights import weights_digest
from kvkeep.tiers import Fate, Removed

__all__ = [
    "BlockStore", "Fate", "KVStore", "Lookup", "Operation", "Prefetch", "Put", "Removed",
    "StoreStats", "model_identity", "weights_digest",
]  # fmt: skip
