"""Records on a Valkey or Redis server, or spread over a cluster of them.

backend.py   ValkeyBackend, the public class, and ValkeyOptions: what the URL of a tier says
nodes.py     connection pools, and which node has which key
wire.py      one connection: RESP2, values without a copy
"""

from __future__ import annotations

from kvkeep.store.backends.valkey.backend import ValkeyBackend, ValkeyOptions

__all__ = ["ValkeyBackend", "ValkeyOptions"]
