"""`KVStore`: the KV of token sequences, looked up by tokens, over tiers.

store.py    KVStore: put, get, lookup, prefetch of tokens and tensors
forms.py    the forms of KV that engines have
names.py    from tokens to block ids
why.py      why tokens are not there
removal.py  what has to go with a prompt
"""

from __future__ import annotations

from kvkeep.store.kv.store import KVStore, Prefetch

__all__ = ["KVStore", "Prefetch"]
