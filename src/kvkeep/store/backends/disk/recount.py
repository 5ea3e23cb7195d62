"""Counts a large directory while other processes write there, in three steps.

1. Under the lock: begin a journal (journal.py). From now on it lists every record that changes.
2. Without the lock: add up the sizes of all records. Changes meanwhile may be seen or not.
3. Under the lock: look again at each record in the journal; write the count; end the journal.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.store.backends.disk.files import padded, size_of

if TYPE_CHECKING:
    from kvkeep.store.backends.disk.directory import RecordDirectory
    from kvkeep.store.backends.disk.ledger import DiskLedger

__all__ = ["Recount"]


class Recount:
    """One recount of ``directory``: construct it, call `saw` for each record, then `finish`.

    Memory: 16 bytes a record, until `finish`.
    """

    def __init__(self, ledger: DiskLedger, directory: RecordDirectory, timeout: float) -> None:
        self._ledger = ledger
        self._directory = directory
        self._names: list[np.ndarray] = []
        self._sizes: list[np.ndarray] = []
        self._name_buffer: list[int] = []
        self._size_buffer: list[int] = []
        # Not zero, which means no recount, and unlikely to be another recount's.
        self._token = int.from_bytes(os.urandom(8), "little") | 1
        with ledger.held(timeout) as count:
            count.journal.begin(self._token)

    def saw(self, block: bytes, size: int) -> None:
        """Add the record of ``block``, ``size`` bytes long, which the scan found."""
        self._name_buffer.append(hash(block))
        self._size_buffer.append(padded(size))
        if len(self._name_buffer) >= 1 << 14:
            self._pack()

    def finish(self, timeout: float) -> bool:
        """Write the count. Writes nothing and returns False if the journal cannot be trusted."""
        self._pack()
        names = np.concatenate(self._names)
        # A record replaced during the scan may be seen twice; the journal has it as well.
        names, first = np.unique(names, return_index=True)
        sizes = np.concatenate(self._sizes)[first]
        total = int(sizes.sum())
        with self._ledger.held(timeout) as count:
            changed = count.journal.changed(self._token)
            if changed is None:
                return False
            for block in changed:
                at = int(np.searchsorted(names, hash(block)))
                if at < len(names) and names[at] == hash(block):
                    total -= int(sizes[at])
                total += padded(size_of(self._directory.path(block)) or 0)
            count.mark()
            count.used = total + self._directory.other_bytes()
            count.journal.end()
        self._ledger.counted()
        return True

    def _pack(self) -> None:
        self._names.append(np.array(self._name_buffer, np.int64))
        self._sizes.append(np.array(self._size_buffer, np.int64))
        self._name_buffer, self._size_buffer = [], []
