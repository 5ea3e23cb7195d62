"""Records that change during the recount of a large directory, in the ledger after the count.

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
from typing import Final

from kvkeep.core.keys import BLOCK_ID_BYTES

__all__ = ["HEAD", "ChangeJournal"]

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
