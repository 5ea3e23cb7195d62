"""`KVStore`: the KV of token sequences, looked up by tokens, over tiers.

store.py      KVStore · loading.py: how it reads prompts
prompts.py    what it answers about prompts, whatever it keeps of them
options.py    the arguments of a KVStore, checked
forms.py      layouts of KV: the caller's tensors, and the raw bytes of a block
names.py      namespaces, tenants and block ids
lookup.py     which blocks of a prompt are stored
transfers.py  put and get · prefetch.py: reads in the background
loaded.py     what was read · paying.py: how much is worth reading
reporting.py  counts, hooks and the log · binding.py: which model a store serves
why.py        why tokens are missing
removal.py    which blocks `remove` deletes
kept.py       which records a prompt has: blocks of all layers, or …
groups.py     … records of each group of layers, for models with windows and states
snapshot.py   what resuming needs · snapshots.py: put and get of it
records.py    its tensors as raw bytes · positions.py: their ids
finding.py    the longest stored position
"""

from __future__ import annotations

from kvkeep.core.errors import require

require("torch", "store")  # first, so that the error names the extra to install

from kvkeep.store.kv.paying import LoadChoice, LoadPiece, choose_load  # noqa: E402
from kvkeep.store.kv.prefetch import Prefetch  # noqa: E402
from kvkeep.store.kv.snapshot import Snapshot  # noqa: E402
from kvkeep.store.kv.store import KVStore  # noqa: E402

__all__ = ["KVStore", "LoadChoice", "LoadPiece", "Prefetch", "Snapshot", "choose_load"]
