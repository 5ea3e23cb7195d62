"""`KVStore`: the KV of token sequences, looked up by tokens, over tiers.

store.py      KVStore: how it stores and reads prompts
prompts.py    what it answers about prompts, whatever it keeps of them; counts, hooks and the log
options.py    the arguments of a KVStore, checked
forms.py      layouts of KV: the caller's tensors, and the raw bytes of a block
names.py      namespaces, tenants and block ids
transfers.py  put and get · paying.py: how much is worth reading
kept.py       which records a prompt has: lookup, prefetch, removal, why tokens are missing
snapshots.py  put and get of windows and states
records.py    their tensors as raw bytes · positions.py: their ids, and the longest stored position
"""

from __future__ import annotations

from kvkeep.core.errors import require

require("torch", "store")  # first, so that the error names the extra to install

from kvkeep.store.kv.kept import Prefetch  # noqa: E402
from kvkeep.store.kv.paying import LoadChoice, LoadPiece, choose_load  # noqa: E402
from kvkeep.store.kv.records import Snapshot  # noqa: E402
from kvkeep.store.kv.store import KVStore  # noqa: E402
from kvkeep.store.kv.transfers import Get  # noqa: E402

__all__ = ["Get", "KVStore", "LoadChoice", "LoadPiece", "Prefetch", "Snapshot", "choose_load"]
