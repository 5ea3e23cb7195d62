"""Records as files in a directory of a local disk, which several processes may share.

backend.py     DiskBackend, the public class: how a record is written, and space for it
ledger.py      the file that holds the count of bytes, and its lock
recount.py     counts a large directory while other processes write to it, with a journal of changes
sync.py        files that still need an fsync
directory.py   names and paths, scans
opening.py     creates a directory, or checks that an existing one is usable
files.py       whole records to and from files, with direct I/O
notes.py       a line of text about each namespace; the budget it was last opened with
"""

from __future__ import annotations

from kvkeep.store.backends.disk.backend import DiskBackend, Io
from kvkeep.store.backends.disk.notes import LastBudget
from kvkeep.store.backends.disk.sync import Sync

__all__ = ["DiskBackend", "Io", "LastBudget", "Sync"]
