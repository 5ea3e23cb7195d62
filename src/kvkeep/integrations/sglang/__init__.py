"""kvkeep inside SGLang: below its HiCache, or in place of its prefix tree.

Below HiCache, pages that leave its host memory are stored, also across restarts:

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache
      --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
      '{"backend_name": "kvkeep", "interface_v1": 1,
        "module_path": "kvkeep.integrations.sglang", "class_name": "KVKeepStorage",
        "tiers": ["memory://8GiB", "file:///var/lib/kvkeep?size=500GiB"]}'

    storage.py      KVKeepStorage: the three interfaces that SGLang calls; its host pools
    transport.py    loads and saves of many pages, by several threads, and their statistics
    pages.py        pages of a host pool as bytes; by heads, for other numbers of ranks
    naming.py       the namespace, and the keys of pages
    settings.py     settings of the server that decide the numbers of KV
    options.py      options

In place of its tree, ``--radix-cache-backend kvkeep`` or ``kvkeep:returns``:

    plugin.py       registers the names: for which servers there is a tree, with which policy
    tree.py         KVKeepTree: the interface that the scheduler calls; SGLang's events of blocks,
                    and when conversations return
    slot_tree.py    which slots have the KV of which tokens, and what SGLang keeps of a match

Import it only where SGLang is installed. The store is opened when SGLang registers its host pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import require_engine

if TYPE_CHECKING:
    from kvkeep.integrations.sglang.storage import KVKeepStorage

__all__ = ["KVKeepStorage"]


def __getattr__(name: str) -> object:
    """Import the storage when it is asked for: the plug-in is loaded in every SGLang process."""
    if name == "KVKeepStorage":
        require_engine("sglang", "SGLang")
        from kvkeep.integrations.sglang.storage import KVKeepStorage  # noqa: PLC0415

        return KVKeepStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
