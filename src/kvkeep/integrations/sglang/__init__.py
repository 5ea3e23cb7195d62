"""kvkeep below SGLang's HiCache: what leaves its host memory is kept, and found after a restart.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache
      --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
      '{"backend_name": "kvkeep", "interface_v1": 1,
        "module_path": "kvkeep.integrations.sglang", "class_name": "KVKeepStorage",
        "tiers": ["memory://8GiB", "file:///var/lib/kvkeep?size=500GiB"]}'

    storage.py    what SGLang calls, in its three interfaces, one beside the other
    transport.py  batches of pages into the store and out of it, by several threads, and counted
    sidecars.py   which prefixes the pools beside that of KV let SGLang restore
    pages.py      the pages of a host pool as bytes
    naming.py     the namespace and the keys: what must never be mixed
    options.py    what can be chosen

Import it where SGLang is installed. The store is opened when SGLang names its host pool.
"""

from __future__ import annotations

from kvkeep.integrations.sglang.storage import KVKeepStorage

__all__ = ["KVKeepStorage"]
