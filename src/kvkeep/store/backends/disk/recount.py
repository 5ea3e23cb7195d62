"""Counts a large directory while other processes write there, in three steps.

1. Under the lock: begin a journal. From now on every record that changes is noted there.
2. Without the lock: add up the sizes of all records. Changes meanwhile may be seen or not.
3. Under the lock: look again at each record in the journal; write the count; end the journal.

The journal is in the ledger's file, behind the count:

    40  token of the recount, 0 if none runs
    48  offset of the journal's end
    64  entries: a block id, and a checksum of token and id

A process killed while it appends an entry leaves a file longer than the stated end. Such a journal,
or one that is damaged or cut short, is not trusted: it is ended, and its recount writes nothing.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import TYPE_CHECKING, Final

import numpy as np

from kvkeep.core.keys import BLOCK_ID_BYTES
from kvkeep.store.backends.disk.files import padded, size_of

if TYPE_CHECKING:
    from kvkeep.store.backends.disk.directory import RecordDirectory
    from kvkeep.store.backends.disk.ledger import DiskLedger

__all__ = ["HEAD", "ChangeJournal", "Recount"]

HEAD: Final = 64
"""Bytes of the ledger's file before the first entry."""
JOURNAL_AT_MOST: Final = 1 << 24
"""Bytes: a longer journal is ended. The recount is repeated later."""
_STATE: Final = struct.Struct("<QQ")
_STATE_AT: Final = 40
_ENTRY: Final = struct.Struct(f"<{BLOCK_ID_BYTES}sI")


class ChangeJournal:
    """The journal in the open file ``fd``; ``head`` is the first `HEAD` bytes of the file.

    Thread safety: none; the ledger's lock is held as long as this object is used.
    """

    __slots__ = ("_end", "_fd", "_token")

    def __init__(self, fd: int, head: bytes) -> None:
        self._fd = fd
        self._token: int
        self._end: int
        self._token, self._end = _STATE.unpack_from(head, _STATE_AT)

    def __bool__(self) -> bool:
        """Whether a recount needs the changes."""
        return self._token != 0

    def begin(self, token: int) -> None:
        """Start an empty journal for the recount ``token``; a recount that runs loses its own."""
        os.ftruncate(self._fd, HEAD)
        self._set(token, HEAD)

    def end(self) -> None:
        """Stop the journal and delete its entries."""
        self._set(0, HEAD)
        os.ftruncate(self._fd, HEAD)

    def note(self, block: bytes) -> None:
        """Append ``block``, before its record changes: this process may be killed in between.

        If the entry cannot be written, as on a full disk, the journal ends: on such a disk it must
        still be possible to delete records.
        """
        if not self:
            return
        if self._end > JOURNAL_AT_MOST or not self._is_whole():
            self.end()
            return
        entry = _ENTRY.pack(block, self._sum(block))
        try:
            written = os.pwrite(self._fd, entry, self._end)
        except OSError:
            written = 0
        if written == len(entry):
            self._set(self._token, self._end + written)
        else:
            self.end()

    def changed(self, token: int) -> set[bytes] | None:
        """Return the records that may have changed since the recount ``token`` began.

        None if another recount has replaced it, or the journal ended or cannot be trusted.
        """
        if self._token != token or not self._is_whole():
            return None
        size = self._end - HEAD
        entries = os.pread(self._fd, size, HEAD)
        if len(entries) != size or size % _ENTRY.size:
            return None
        found = set()
        for block, checksum in _ENTRY.iter_unpack(entries):
            if checksum != self._sum(block):
                return None
            found.add(block)
        return found

    def _is_whole(self) -> bool:
        return os.fstat(self._fd).st_size == self._end

    def _sum(self, block: bytes) -> int:
        return zlib.crc32(block, zlib.crc32(self._token.to_bytes(8, "little")))

    def _set(self, token: int, end: int) -> None:
        # Within one page, as the count: a killed process has written all of it or nothing.
        os.pwrite(self._fd, _STATE.pack(token, end), _STATE_AT)
        self._token, self._end = token, end


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
