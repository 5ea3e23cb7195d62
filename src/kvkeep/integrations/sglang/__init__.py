"""kvkeep below SGLang's HiCache: pages that leave its host memory are stored, also across restarts.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache
      --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
      '{"backend_name": "kvkeep", "interface_v1": 1,
        "module_path": "kvkeep.integrations.sglang", "class_name": "KVKeepStorage",
        "tiers": ["memory://8GiB", "file:///var/lib/kvkeep?size=500GiB"]}'

    storage.py    KVKeepStorage: the three interfaces that SGLang calls
    transport.py  loads and saves of many pages, by several threads, and their statistics
    sidecars.py   pools beside that of KV: which prefixes they let SGLang restore
    pages.py      pages of a host pool as bytes
    naming.py     the namespace, and the keys of pages
    settings.py   settings of the server that decide the numbers of KV
    options.py    options

Import it only where SGLang is installed. The store is opened when SGLang registers its host pool.
"""

from __future__ import annotations

from kvkeep.integrations.sglang.storage import KVKeepStorage

__all__ = ["KVKeepStorage"]
