"""Which records change while a directory is counted, noted behind the count in the ledger's file.

    40  which recount the notes are for, 0 for none
    48  where they end
    64  notes: the id of a block, and a checksum of the recount and the id

Whoever is killed while a note is written leaves a file that is longer than it says. Such a journal,
or one that is damaged or cut short, is not trusted: it is given up, and nothing is counted by it.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import Final

from kvkeep.core.keys import BLOCK_ID_BYTES

__all__ = ["HEAD", "ChangeJournal"]

HEAD: Final = 64
"""Bytes of the ledger's file before the first note."""
JOURNAL_AT_MOST: Final = 1 << 24
"""Bytes: a journal that becomes longer is given up. The recount is repeated later."""
_STATE: Final = struct.Struct("<QQ")
_STATE_AT: Final = 40
_NOTE: Final = struct.Struct(f"<{BLOCK_ID_BYTES}sI")


class ChangeJournal:
    """The journal in the open file ``fd``, whose lock is held; ``head`` is its first `HEAD` bytes.

    Thread safety: none, the lock is held for as long as this object is used.
    """

    __slots__ = ("_end", "_fd", "_token")

    def __init__(self, fd: int, head: bytes) -> None:
        self._fd = fd
        self._token: int
        self._end: int
        self._token, self._end = _STATE.unpack_from(head, _STATE_AT)

    def __bool__(self) -> bool:
        """Whether changes are noted."""
        return self._token != 0

    def begin(self, token: int) -> None:
        """Note changes for the recount ``token``; another one that is going on has to give up."""
        os.ftruncate(self._fd, HEAD)
        self._set(token, HEAD)

    def end(self) -> None:
        """Note no more changes, and forget those that were noted."""
        self._set(0, HEAD)
        os.ftruncate(self._fd, HEAD)

    def note(self, block: bytes) -> None:
        """Tell who recounts that this record may change. Before it does: we may be killed.

        Where that cannot be noted, as on a full disk, the journal is given up: on such a disk
        records must be deleted.
        """
        if not self:
            return
        if self._end > JOURNAL_AT_MOST or not self._is_whole():
            self.end()
            return
        note = _NOTE.pack(block, self._sum(block))
        try:
            written = os.pwrite(self._fd, note, self._end)
        except OSError:
            written = 0
        if written == len(note):
            self._set(self._token, self._end + written)
        else:
            self.end()

    def changed(self, token: int) -> set[bytes] | None:
        """The records that changed since ``token`` began, and perhaps more.

        None when another recount took over, or the journal was given up or cannot be trusted.
        """
        if self._token != token or not self._is_whole():
            return None
        size = self._end - HEAD
        notes = os.pread(self._fd, size, HEAD)
        if len(notes) != size or size % _NOTE.size:
            return None
        found = set()
        for block, checksum in _NOTE.iter_unpack(notes):
            if checksum != self._sum(block):
                return None
            found.add(block)
        return found

    def _is_whole(self) -> bool:
        return os.fstat(self._fd).st_size == self._end

    def _sum(self, block: bytes) -> int:
        return zlib.crc32(block, zlib.crc32(self._token.to_bytes(8, "little")))

    def _set(self, token: int, end: int) -> None:
        # Within one page, as the count: whoever is killed has written all of it or nothing.
        os.pwrite(self._fd, _STATE.pack(token, end), _STATE_AT)
        self._token, self._end = token, end
