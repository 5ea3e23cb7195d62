"""A directory of records: what lies where in it, and who may call it theirs.

    FORMAT                 "kvkeep blocks 1"
    ledger                 bytes used, see disk_ledger
    spaces                 what the namespaces are, see disk_notes
    tmp/                   records being written, each locked by its writer
    quarantine/            records that did not verify, with the reason in the name
    <space, 32 hex>/       the records of one namespace
        <key, 64 hex>      one record; its modification time is when it was last used

The names are the index: opening a store reads no data. Other files may lie beside the records; they
are never read, moved, deleted or counted.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import sys
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import BackendFailed, InvalidValue
from kvkeep.core.keys import BLOCK_ID_BYTES, SPACE_BYTES
from kvkeep.store.backends.disk.files import kind_of, open_plain, padded, sync_path
from kvkeep.store.backends.disk.notes import NOTES

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Home"]

QUARANTINED_AT_MOST: Final = 16
LEDGER_MAGIC: Final = b"kvledger"
_FORMAT: Final = b"kvkeep blocks 1\n"
_OURS: Final = {"FORMAT", "ledger", "tmp", "quarantine"}
_REFUSALS: Final = {errno.EROFS, errno.EACCES, errno.EPERM}
_WRONG: Final = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.EINVAL, errno.ENXIO}
SMALL: Final = 8192
"""Files that are counted while others wait for the lock; more are counted by a listing."""
_SPACE_NAME: Final = 2 * SPACE_BYTES
_KEY_NAME: Final = 2 * (BLOCK_ID_BYTES - SPACE_BYTES)

Entry = tuple[bytes | None, int, float]
"""The block id, or None for what is no record of ours; bytes; when it was last used."""


class Home:
    """The paths of one directory of records. It holds nothing open.

    Attributes:
        device: the filesystem that the directory was on when it was opened.

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
            self.device = os.stat(self.root).st_dev
        except OSError as error:
            if error.errno in _REFUSALS | _WRONG:
                raise InvalidValue(f"{self.root} cannot hold records: {error}") from error
            raise BackendFailed(error.errno, f"{self.root} cannot be opened: {error}") from error

    def path(self, block: bytes) -> str:
        """Where the record of ``block`` lies."""
        assert len(block) == BLOCK_ID_BYTES, "a block id is a space and a block key"
        return f"{self.space(block)}/{block[SPACE_BYTES:].hex()}"

    def space(self, block: bytes) -> str:
        """The directory of the namespace that ``block`` is of."""
        return f"{self.root}/{block[:SPACE_BYTES].hex()}"

    def has_space(self, block: bytes) -> bool:
        """Whether the directory of the namespace of ``block`` is there.

        Raises:
            OSError: ENOTDIR, something else is in its place: nothing is read or written behind it.
        """
        path = self.space(block)
        try:
            mode = os.stat(path, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(mode):
            raise OSError(errno.ENOTDIR, f"it is a {kind_of(mode)} and must be a directory", path)
        return True

    def spaces(self) -> list[str]:
        """Names of the directories of all namespaces."""
        try:
            with os.scandir(self.root) as entries:
                return [
                    entry.name
                    for entry in entries
                    if _from_hex(entry.name, _SPACE_NAME) and entry.is_dir(follow_symlinks=False)
                ]
        except FileNotFoundError:
            return []  # the whole directory was taken away

    def entries(self, space: str) -> Iterator[Entry]:
        """All that lies in the directory ``space``; what is no file counts 0 bytes.

        Memory: 32 bytes a record while it runs. Nothing stays open between two of them.
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
            return  # it was empty, and somebody took it away
        prefix = bytes.fromhex(space)
        for at in range(0, len(keys), _KEY_NAME // 2):
            key = bytes(keys[at : at + _KEY_NAME // 2])
            found = _stat(f"{directory}/{key.hex()}")
            if found is None:
                continue
            if stat.S_ISREG(found.st_mode) and found.st_size:
                yield prefix + key, found.st_size, found.st_mtime
            else:
                yield None, 0, 0.0
        for name in others:
            found = _stat(f"{directory}/{name}")
            if found is not None:
                yield None, found.st_size if stat.S_ISREG(found.st_mode) else 0, 0.0

    def scan(self) -> Iterator[Entry]:
        """All that lies in the directories of all namespaces."""
        for space in self.spaces():
            yield from self.entries(space)

    def used(self, limit: int | None = None) -> int | None:
        """Bytes of all records, in whole units, with those being written and in quarantine.

        None when there are more than ``limit`` files among them: nothing but names was looked at.
        """
        spaces = self.spaces()
        if limit is not None and self._has_more(spaces, limit):
            return None
        records = (entry for space in spaces for entry in self.entries(space))
        return self.beside() + sum(padded(size) for block, size, _ in records if block)

    def beside(self) -> int:
        """Bytes, in whole units, of what is being written or in quarantine."""
        return sum(padded(size) for path in (self.tmp, self.quarantine) for _, size in _files(path))

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
            try:
                fd = open_plain(path, os.O_RDWR)
            except OSError as error:
                if error.errno not in _REFUSALS | _WRONG | {errno.ENOENT}:
                    raise
                continue  # none of ours
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path
            except BlockingIOError:
                pass  # its writer lives
            finally:
                os.close(fd)

    def empty_spaces(self) -> list[str]:
        """Names of the directories of namespaces without records."""
        return [space for space in self.spaces() if self._is_empty(space)]

    def sweep(self, spaces: Iterable[str]) -> None:
        """Take away directories of namespaces if they are empty; the ledger's lock is held."""
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

    def restore(self) -> None:
        """Make what is missing of a home that was emptied, removed or replaced while it was open.

        On another filesystem nothing is made: a disk that is not mounted leaves such a place.

        Raises:
            BackendFailed: it can be no home now, and why.
        """
        above = self.root
        while not os.path.isdir(above):
            above = os.path.dirname(above)
        if os.stat(above).st_dev != self.device:
            raise BackendFailed(
                errno.ENOENT,
                f"{self.root} is gone and {above} is on another filesystem; mount its disk again",
            )
        try:
            self._open(known=True)
        except InvalidValue as error:
            raise BackendFailed(errno.EINVAL, str(error)) from error

    # -- opening --------------------------------------------------------------------------------

    def _open(self, *, known: bool = False) -> None:
        """``known``: it was ours a moment ago, so records may lie there without a format."""
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        self._check_owner()
        with os.scandir(self.root) as entries:
            there = {entry.name for entry in entries}
        self._check_format(there, known=known)
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

    def _check_format(self, there: set[str], *, known: bool) -> None:
        try:
            fd = open_plain(self.format, os.O_RDONLY)
        except FileNotFoundError:
            found = b""
        else:
            try:
                found = os.pread(fd, 64, 0)
            finally:
                os.close(fd)
        if found == _FORMAT:
            return
        if found.startswith(b"kvkeep blocks "):
            raise InvalidValue(
                f"{self.root} holds {found.decode('ascii', 'replace').strip()!r} and this kvkeep "
                f"writes {_FORMAT.decode().strip()!r}; give another directory, or delete that one"
            )
        # Without a format: empty, or its first opener was killed in between.
        others = there - _OURS - {NOTES}
        if known or self._has_ledger():
            others = {name for name in others if not _from_hex(name, _SPACE_NAME)}
        if found or others:
            other = "FORMAT" if found else min(others)
            raise InvalidValue(
                f"{self.root} holds what is not kvkeep's ({other!r}); give an empty directory, "
                "or one that does not exist, such as a directory beneath it"
            )

    def _has_ledger(self) -> bool:
        """Whether a ledger of ours lies here: then records may do so, too."""
        try:
            fd = open_plain(self.ledger, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            return os.pread(fd, len(LEDGER_MAGIC), 0) == LEDGER_MAGIC
        finally:
            os.close(fd)

    def _complete(self, there: set[str]) -> None:
        if stat.S_IMODE(os.stat(self.root).st_mode) & 0o077:
            os.chmod(self.root, 0o700)
        for directory in (self.tmp, self.quarantine):
            try:
                os.mkdir(directory, 0o700)
            except FileExistsError:
                _check_directory(directory)
        fd = open_plain(self.ledger, os.O_RDWR | os.O_CREAT)
        try:
            if not os.fstat(fd).st_size:
                # A block of its own, which says "not counted": else a full disk, on which it could
                # not be written, would be one on which nothing can be deleted.
                os.pwrite(fd, bytes(64), 0)
        finally:
            os.close(fd)
        fd = open_plain(self.format, os.O_RDWR | os.O_CREAT)
        try:
            if os.fstat(fd).st_size:
                return
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


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _check_directory(path: str) -> None:
    """Raise OSError unless ``path`` is a directory of ours, and no link to one."""
    found = os.stat(path, follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode):
        kind = kind_of(found.st_mode)
        raise OSError(errno.ENOTDIR, f"it is a {kind} and must be a directory", path)
    if found.st_uid != os.geteuid():
        owner = f"it belongs to user {found.st_uid} and this process is {os.geteuid()}"
        raise OSError(errno.EINVAL, owner, path)


def _from_hex(name: str, length: int) -> bytes | None:
    """What `bytes.hex` wrote as ``name``, when it has ``length`` digits; None for other names."""
    if len(name) != length:
        return None
    try:
        data = bytes.fromhex(name)
    except ValueError:
        return None
    return data if data.hex() == name else None
