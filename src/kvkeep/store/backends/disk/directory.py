"""The layout of a directory of records: names, paths and scans.

    FORMAT                 "kvkeep blocks 1"
    ledger                 bytes used, see ledger.py
    spaces                 notes on namespaces, see notes.py
    budget                 the budget it was last opened with, see notes.py
    tmp/                   records being written, each locked by its writer
    quarantine/            records that failed verification, with the reason in the name
    <space, 32 hex>/       the records of one namespace
        <key, 64 hex>      one record; its modification time is the time of its last use

File names and sizes are the index: opening a store reads no data. Foreign files beside the records
are never read, moved, deleted or counted.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvkeep.core.keys import BLOCK_ID_BYTES, SPACE_BYTES
from kvkeep.store.backends.disk.files import (
    CANNOT_WRITE,
    WRONG_KIND,
    check_kind,
    closing_fd,
    lstat,
    open_plain,
    padded,
)

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Entry", "RecordDirectory", "space_of_name"]

QUARANTINED_AT_MOST: Final = 16
_SPACE_NAME: Final = 2 * SPACE_BYTES
_KEY_NAME: Final = 2 * (BLOCK_ID_BYTES - SPACE_BYTES)

Entry = tuple[bytes | None, int, float]
"""Block id (None for anything that is no record), size in bytes, time of the last use."""


class RecordDirectory:
    """Paths of one directory of records. Holds nothing open; `opening.open_directory` makes it.

    Attributes:
        root: absolute path.
        url: the same as a URL, for messages.
        device: ``st_dev`` of the filesystem when the directory was opened.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.url = f"file://{root}"
        self.ledger = os.path.join(root, "ledger")
        self.format = os.path.join(root, "FORMAT")
        self.tmp = os.path.join(root, "tmp")
        self.quarantine = os.path.join(root, "quarantine")
        self.device = -1

    def path(self, block: bytes) -> str:
        """Return the path of the record of ``block``."""
        assert len(block) == BLOCK_ID_BYTES, "a block id is a space and a block key"
        return f"{self.space(block)}/{block[SPACE_BYTES:].hex()}"

    def space(self, block: bytes) -> str:
        """Return the path of the namespace of ``block``, given by its id or its space."""
        return f"{self.root}/{block[:SPACE_BYTES].hex()}"

    def has_space(self, block: bytes) -> bool:
        """Whether the namespace of ``block`` has a directory.

        Raises:
            OSError: ENOTDIR: something else has its name, such as a symlink. It is not followed.
        """
        path = self.space(block)
        try:
            found = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        check_kind(found, path, stat.S_IFDIR)
        return True

    def spaces(self) -> list[str]:
        """Return the names of all namespaces' directories."""
        try:
            with os.scandir(self.root) as entries:
                return [
                    entry.name
                    for entry in entries
                    if space_of_name(entry.name) and entry.is_dir(follow_symlinks=False)
                ]
        except FileNotFoundError:
            return []  # another process removed the whole directory

    def entries(self, space: str) -> Iterator[Entry]:
        """Yield everything in the directory ``space``; special files have size 0.

        Memory: 32 bytes a record while it runs. No descriptor stays open between two entries.
        """
        directory = os.path.join(self.root, space)
        keys, others = bytearray(), []
        try:
            with os.scandir(directory) as listing:
                for entry in listing:
                    key = _from_hex(entry.name, _KEY_NAME)
                    if key is None:
                        others.append(entry.name)
                    else:
                        keys += key
        except FileNotFoundError:
            return  # it was empty, and another process removed it
        prefix = bytes.fromhex(space)
        for at in range(0, len(keys), _KEY_NAME // 2):
            key = bytes(keys[at : at + _KEY_NAME // 2])
            found = lstat(f"{directory}/{key.hex()}")
            if found is None:
                continue
            if stat.S_ISREG(found.st_mode) and found.st_size:
                yield prefix + key, found.st_size, found.st_mtime
            else:
                yield None, 0, 0.0
        for name in others:
            found = lstat(f"{directory}/{name}")
            if found is not None:
                yield None, found.st_size if stat.S_ISREG(found.st_mode) else 0, 0.0

    def scan(self) -> Iterator[Entry]:
        """Yield everything in the directories of all namespaces."""
        for space in self.spaces():
            yield from self.entries(space)

    def used(self, limit: int | None = None) -> int | None:
        """Return the bytes of all records, `other_bytes` included, in whole units.

        None if the namespaces have more than ``limit`` files: then only names were read.
        """
        spaces = self.spaces()
        if limit is not None and self._has_more(spaces, limit):
            return None
        records = (entry for space in spaces for entry in self.entries(space))
        return self.other_bytes() + sum(padded(size) for block, size, _ in records if block)

    def other_bytes(self) -> int:
        """Return the bytes, in whole units, of records being written or in quarantine."""
        return sum(padded(size) for path in (self.tmp, self.quarantine) for _, size in _files(path))

    def quarantine_surplus(self, capacity: int | None) -> list[str]:
        """Return the files to delete from quarantine, oldest first.

        The newest 16 stay, in a sixteenth of ``capacity`` at most.
        """
        kept = sorted(_files(self.quarantine))  # by name, which begins with the time
        room = sys.maxsize if capacity is None else capacity // QUARANTINED_AT_MOST
        held, surplus = sum(padded(size) for _, size in kept), []
        for place, (path, size) in enumerate(kept):
            if held <= room and len(kept) - place <= QUARANTINED_AT_MOST:
                break
            surplus.append(path)
            held -= padded(size)
        return surplus

    def abandoned(self) -> Iterator[str]:
        """Yield the paths of unfinished records whose writers have died.

        Call it with the ledger's lock held: then every living writer has its file locked.
        """
        for path, _ in _files(self.tmp):
            try:
                fd = open_plain(path, os.O_RDWR)
            except OSError as error:
                if error.errno not in CANNOT_WRITE | WRONG_KIND | {errno.ENOENT}:
                    raise
                continue  # a foreign file
            with closing_fd(fd), suppress(BlockingIOError):  # locked: its writer lives
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path

    def empty_spaces(self) -> list[str]:
        """Return the names of namespaces' directories that are empty."""
        return [space for space in self.spaces() if self._is_empty(space)]

    def remove_spaces(self, spaces: Iterable[str]) -> None:
        """Remove directories of namespaces if they are empty. The ledger's lock must be held."""
        for space in spaces:
            try:
                os.rmdir(f"{self.root}/{space}")
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}:
                    raise

    def _is_empty(self, space: str) -> bool:
        try:
            with os.scandir(f"{self.root}/{space}") as listing:
                return next(listing, None) is None
        except FileNotFoundError:
            return False

    def _has_more(self, spaces: Iterable[str], limit: int) -> bool:
        seen = 0
        for space in spaces:
            try:
                with os.scandir(f"{self.root}/{space}") as listing:
                    seen += sum(1 for _ in itertools.islice(listing, limit + 1))
            except FileNotFoundError:
                continue
            if seen > limit:
                return True
        return False


def space_of_name(name: str) -> bytes | None:
    """Return the space whose directory is called ``name``; None for other names."""
    return _from_hex(name, _SPACE_NAME)


def _from_hex(name: str, length: int) -> bytes | None:
    """Undo `bytes.hex` if ``name`` has ``length`` lower-case digits; else None."""
    if len(name) != length:
        return None
    try:
        data = bytes.fromhex(name)
    except ValueError:
        return None
    return data if data.hex() == name else None


def _files(directory: str) -> Iterator[tuple[str, int]]:
    """Yield path and size in bytes of the regular files in ``directory``."""
    with os.scandir(directory) as listing:
        for entry in listing:
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(found.st_mode):
                yield entry.path, found.st_size
