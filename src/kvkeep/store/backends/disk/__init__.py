"""Records as files in a directory of a local disk, which several processes may share.

backend.py     DiskBackend, the public class
index.py       the index that processes share: bytes used, times of use, notes
directory.py   names and paths; creates a directory, or checks that an existing one is usable
files.py       whole records to and from files, with direct I/O
sync.py        files that still need an fsync
"""

from __future__ import annotations

from kvkeep.store.backends.disk.backend import DiskBackend, Io
from kvkeep.store.backends.disk.index import LastBudget
from kvkeep.store.backends.disk.sync import Sync

__all__ = ["DiskBackend", "Io", "LastBudget", "Sync"]
