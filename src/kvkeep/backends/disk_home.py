"""A directory of records: what lies where in it, and who may call it theirs.

    FORMAT                 "kvkeep blocks 1"
    ledger                 bytes used, see disk_ledger
    spaces                 what the namespaces are, see disk_notes
    tmp/                   records being written, each locked by its writer
    quarantine/            records that did not verify, with the reason in the name
    <space, 32 hex>/       the records of one namespace
        <key, 64 hex>      one record; its modification time is when it was last used

The names are the index: opening a store reads no data.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from typing import TYPE_CHECKING, Final

from kvkeep.backends.disk_files import padded, sync_path
from kvkeep.backends.disk_notes import NOTES
from kvkeep.errors import BackendFailed, InvalidValue
from kvkeep.keys import BLOCK_ID_BYTES, SPACE_BYTES

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Home"]

QUARANTINED_AT_MOST: Final = 16
_FORMAT: Final = b"kvkeep blocks 1\n"
_OURS: Final = {"FORMAT", "ledger", "tmp", "quarantine"}
_REFUSALS: Final = {errno.EROFS, errno.EACCES, errno.EPERM}
_SPACE_NAME: Final = 2 * SPACE_BYTES
_KEY_NAME: Final = 2 * (BLOCK_ID_BYTES - SPACE_BYTES)

Entry = tuple[bytes | None, int, float]
"""The block id, or None for what is no record of ours; bytes; when it was last used."""


class Home:
    """The paths of one directory of records. It holds nothing open and has no state.

    Raises:
        InvalidValue: the directory cannot be made or is not ours: it belongs to another user,
            holds other things, or was written in another format. Nothing was changed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.root = os.path.realpath(path)
        self.ledger = os.path.join(self.root, "ledger")
        self.format = os.path.join(self.root, "FORMAT")
        self.tmp = os.path.join(self.root, "tmp")
        self.quarantine = os.path.join(self.root, "quarantine")
        try:
            self._open()
        except OSError as error:
            if error.errno in _REFUSALS | {errno.ENOTDIR, errno.EEXIST, errno.ELOOP}:
                raise InvalidValue(f"{self.root} cannot hold records: {error}") from error
            raise BackendFailed(error.errno, f"{self.root} cannot be opened: {error}") from error

    def path(self, block: bytes) -> str:
        """Where the record of ``block`` lies."""
        assert len(block) == BLOCK_ID_BYTES, "a block id is a space and a block key"
        return f"{self.space(block)}/{block[SPACE_BYTES:].hex()}"

    def space(self, block: bytes) -> str:
        """The directory of the namespace that ``block`` is of."""
        return f"{self.root}/{block[:SPACE_BYTES].hex()}"

    def spaces(self) -> list[str]:
        """Names of the directories of all namespaces."""
        with os.scandir(self.root) as entries:
            return [
                entry.name
                for entry in entries
                if _from_hex(entry.name, _SPACE_NAME) and entry.is_dir(follow_symlinks=False)
            ]

    def entries(self, space: str) -> Iterator[Entry]:
        """All that lies in the directory ``space``; what is no file counts 0 bytes."""
        directory = os.path.join(self.root, space)
        try:
            # Each name once: what is replaced meanwhile could be there twice.
            names = dict.fromkeys(os.listdir(directory))
        except FileNotFoundError:
            return  # it was empty, and somebody took it away
        prefix = bytes.fromhex(space)
        for name in names:
            try:
                found = os.stat(f"{directory}/{name}", follow_symlinks=False)
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(found.st_mode):
                yield None, 0, 0.0
                continue
            size, key = found.st_size, _from_hex(name, _KEY_NAME)
            if key and size:
                yield prefix + key, size, found.st_mtime
            else:
                yield None, size, 0.0

    def scan(self) -> Iterator[Entry]:
        """All that lies in the directories of all namespaces."""
        for space in self.spaces():
            yield from self.entries(space)

    def used(self, entries: Iterable[Entry]) -> int:
        """Bytes, in whole units, of ``entries`` and of what is being written or in quarantine."""
        beside = sum(
            padded(size) for path in (self.tmp, self.quarantine) for _, size in _files(path)
        )
        return beside + sum(padded(size) for _, size, _ in entries)

    def surplus(self, capacity: int | None) -> list[str]:
        """What must leave quarantine, oldest first: 16 stay, in a sixteenth of the capacity."""
        kept = sorted(_files(self.quarantine))  # by name, which begins with the time
        room = sys.maxsize if capacity is None else capacity // QUARANTINED_AT_MOST
        held, surplus = sum(padded(size) for _, size in kept), []
        for place, (path, size) in enumerate(kept):
            if held <= room and len(kept) - place <= QUARANTINED_AT_MOST:
                break
            surplus.append(path)
            held -= padded(size)
        return surplus

    def left_behind(self) -> Iterator[str]:
        """Paths of records whose writers are gone. Only while the ledger's lock is held: then
        every writer that lives has its file locked."""
        for path, _ in _files(self.tmp):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path
            except BlockingIOError:
                pass  # its writer lives
            finally:
                os.close(fd)

    def tidy(self) -> None:
        """Take away what killed writers left, and the directories of namespaces without records.

        Only while the ledger's lock is held, and a recount follows.
        """
        for path in self.left_behind():
            os.unlink(path)
        for space in self.spaces():
            try:
                os.rmdir(f"{self.root}/{space}")
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}:
                    raise

    # -- opening --------------------------------------------------------------------------------

    def _open(self) -> None:
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        self._check_owner()
        with os.scandir(self.root) as entries:
            there = {entry.name for entry in entries}
        self._check_format(there)
        try:
            self._complete(there)
        except OSError as error:
            if not (there >= _OURS and error.errno in _REFUSALS):
                raise
            # Read-only, and complete: it can be read.

    def _check_owner(self) -> None:
        owner = os.stat(self.root).st_uid
        if owner != os.geteuid():
            raise InvalidValue(
                f"{self.root} belongs to user {owner} and this process is user {os.geteuid()}; "
                "records hold prompts: give a directory of its own, or one beneath that"
            )

    def _check_format(self, there: set[str]) -> None:
        try:
            with open(self.format, "rb") as file:
                found = file.read(64)
        except FileNotFoundError:
            found = b""
        if found == _FORMAT:
            return
        if found.startswith(b"kvkeep blocks "):
            raise InvalidValue(
                f"{self.root} holds {found.decode('ascii', 'replace').strip()!r} and this kvkeep "
                f"writes {_FORMAT.decode().strip()!r}; give another directory, or delete that one"
            )
        # Without a format: empty, or its first opener was killed in between.
        if found or not there <= _OURS | {NOTES}:
            other = "FORMAT" if found else min(there - _OURS - {NOTES})
            raise InvalidValue(
                f"{self.root} holds what is not kvkeep's ({other!r}); give an empty directory, "
                "or one that does not exist, such as a directory beneath it"
            )

    def _complete(self, there: set[str]) -> None:
        if stat.S_IMODE(os.stat(self.root).st_mode) & 0o077:
            os.chmod(self.root, 0o700)
        for directory in {"tmp", "quarantine"} - there:
            try:
                os.mkdir(os.path.join(self.root, directory), 0o700)
            except FileExistsError:
                continue  # somebody opens it at the same time
        fd = _create(self.ledger)
        try:
            if not os.fstat(fd).st_size:
                # A block of its own, which says "not counted": else a full disk, on which it could
                # not be written, would be one on which nothing can be deleted.
                os.pwrite(fd, bytes(64), 0)
        finally:
            os.close(fd)
        if "FORMAT" in there and os.path.getsize(self.format):
            return
        fd = _create(self.format)
        try:
            os.pwrite(fd, _FORMAT, 0)
            # Without this, power loss could leave records in a directory that is not known as ours.
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_path(self.root)


def _files(directory: str) -> Iterator[tuple[str, int]]:
    """Path and size in bytes of the regular files in ``directory``."""
    with os.scandir(directory) as listing:
        for entry in listing:
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(found.st_mode):
                yield entry.path, found.st_size


def _create(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _from_hex(name: str, length: int) -> bytes | None:
    """What `bytes.hex` wrote as ``name``, when it has ``length`` digits; None for other names."""
    if len(name) != length:
        return None
    try:
        data = bytes.fromhex(name)
    except ValueError:
        return None
    return data if data.hex() == name else None
