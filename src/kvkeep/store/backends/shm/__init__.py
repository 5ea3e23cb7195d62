"""`shm://`: one arena in shared memory for all processes of a user on a node.

segment.py   the file: its layout, its creation, page faults off the path of requests
lock.py      the lock between processes, and which of them live
rows.py      the records, the free memory between them, holds, quotas; counting anew after a crash
backend.py   the contract of backends: drafts, leases, eviction and pins, each under one lock
"""

from __future__ import annotations

from kvkeep.store.backends.shm.backend import ShmBackend

__all__ = ["ShmBackend"]
