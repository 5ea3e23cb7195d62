"""Records on a Valkey or Redis server, or spread over a cluster of them.

backend.py   ValkeyBackend, the public class
options.py   ValkeyOptions: what the URL of a tier says
memory.py    what a server says of its memory
nodes.py     connection pools, and which node has which key
wire.py      one connection: RESP2, values without a copy
"""

from __future__ import annotations

from kvkeep.store.backends.valkey.backend import ValkeyBackend
from kvkeep.store.backends.valkey.options import ValkeyOptions

__all__ = ["ValkeyBackend", "ValkeyOptions"]
