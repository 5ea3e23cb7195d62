"""`KVStore`: the KV of token sequences, looked up by tokens, over tiers.

store.py      KVStore: stores and reads prompts, and answers about them
names.py      namespaces, tenants and block ids
positions.py  the ids of a prompt's records, and the longest position at which all are stored
forms.py      layouts of KV: the caller's tensors, and the raw bytes of records
transfers.py  put, get and remove · paying.py: how much is worth reading
prompts.py    which blocks follow which; pieces to load; prefetches
misses.py     why tokens are missing
"""

from __future__ import annotations

from kvkeep.core.errors import require

require("torch", "store")  # first, so that the error names the extra to install

from kvkeep.store.kv.forms import Snapshot  # noqa: E402
from kvkeep.store.kv.paying import LoadChoice, LoadPiece, choose_load  # noqa: E402
from kvkeep.store.kv.prompts import Prefetch  # noqa: E402
from kvkeep.store.kv.store import KVStore  # noqa: E402
from kvkeep.store.kv.transfers import Get  # noqa: E402

__all__ = ["Get", "KVStore", "LoadChoice", "LoadPiece", "Prefetch", "Snapshot", "choose_load"]
