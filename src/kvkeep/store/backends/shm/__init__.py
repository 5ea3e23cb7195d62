"""`shm://`: one arena in shared memory for all processes of a user on a node.

layout.py    the file byte by byte
clock.py     the time of uses and pins
opening.py   creates it, or checks what is there; takes page faults off the path of requests
lock.py      the lock between processes, and which of them live
books.py     the columns of the index, and lookups without the lock
extents.py   free memory
repair.py    rebuilds everything derived from the records, after a crash
core.py      the lock with its repair, holds, dead processes, quotas of namespaces
arena.py     records: reserve, publish, pin, delete, evict; `check` recounts everything
backend.py   the contract of backends, over the arena
"""

from __future__ import annotations

from kvkeep.store.backends.shm.backend import ShmBackend

__all__ = ["ShmBackend"]
