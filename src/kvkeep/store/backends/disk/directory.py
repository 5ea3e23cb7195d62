"""The layout of a directory of records: creation, checks, names and paths.

    FORMAT                 "kvkeep blocks 1"
    index/<16 hex>         the index, see index.py; SQLite has <16 hex>-journal beside it
    tmp/                   records being written, each locked by its writer
    quarantine/            records that failed verification, with the reason in the name
    <space, 32 hex>/       the records of one namespace
        <key, 64 hex>      one record

Foreign files beside the records are never read, moved, deleted or counted. Kvkeep before the index
had the files ``ledger``, ``budget`` and ``spaces``: the last two are read when the index is made.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from kvkeep.core.errors import BackendFailed, InvalidValue, reason
from kvkeep.core.keys import BLOCK_ID_BYTES, SPACE_BYTES
from kvkeep.store.backends.base import Listed
from kvkeep.store.backends.disk.files import (
    CANNOT_WRITE,
    WRONG_KIND,
    check_kind,
    check_ours,
    closing_fd,
    lstat,
    open_known,
    size_of,
    sync_path,
)

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["RecordDirectory"]

_FORMAT: Final = b"kvkeep blocks 1\n"
_FORMER: Final = ("ledger", "budget", "spaces", "writes")
_OURS: Final = {"FORMAT", "index", "tmp", "quarantine", *_FORMER}
_INDEX_NAME: Final = 16
_KEY_NAME: Final = 2 * (BLOCK_ID_BYTES - SPACE_BYTES)


class RecordDirectory:
    """A directory of records, which is created if it is missing. Holds nothing open.

    Attributes:
        root: absolute path.
        url: the same as a URL, for messages.

    Raises:
        InvalidValue: it cannot be created, another user owns it, it holds other things, or it has
            another format. Nothing was changed.
        BackendFailed: any other error of the filesystem.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.root = root = os.path.realpath(path)
        self.url = f"file://{root}"
        self._indexes = os.path.join(root, "index")
        self.format = os.path.join(root, "FORMAT")
        self.tmp = os.path.join(root, "tmp")
        self.quarantine = os.path.join(root, "quarantine")
        try:
            self._prepare()
            self._device = os.stat(root).st_dev
        except OSError as error:
            at = error.filename
            why = reason(error) + (f" ({at})" if at is not None and at != root else "")
            if error.errno in _NO_LOCKS:
                raise InvalidValue(
                    f"{root} is on a filesystem without locks, which file:// needs: {why}; give a "
                    "directory on a disk of this machine, or valkey:// or s3:// to share between "
                    "machines"
                ) from error
            if error.errno in CANNOT_WRITE | WRONG_KIND:
                raise InvalidValue(f"{root} cannot hold records: {why}") from error
            raise BackendFailed(error.errno, f"{root} cannot be opened: {why}") from error

    # -- names ----------------------------------------------------------------------------------

    def path(self, block: bytes) -> str:
        """Return the path of the record of ``block``."""
        assert len(block) == BLOCK_ID_BYTES, "a block id is a space and a block key"
        return f"{self.root}/{block[:SPACE_BYTES].hex()}/{block[SPACE_BYTES:].hex()}"

    def space(self, block: bytes) -> str:
        """Return the path of the namespace of ``block``, given by its id or its space."""
        return f"{self.root}/{block[:SPACE_BYTES].hex()}"

    def check_space(self, block: bytes) -> bool:
        """Return whether the namespace of ``block`` has a directory.

        Raises:
            OSError: ENOTDIR: something else has its name, such as a symlink. It is not followed.
        """
        path = self.space(block)
        there = lstat(path)
        if there is not None:
            check_kind(there, path, stat.S_IFDIR)
        return there is not None

    def has_space(self, block: bytes) -> bool:
        """Whether the namespace of ``block`` has a directory."""
        there = lstat(self.space(block))
        return there is not None and stat.S_ISDIR(there.st_mode)

    def create(self, path: str) -> int:
        """Create a file in ``tmp/``; return its descriptor."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            self.restore()  # tmp/ was removed from outside
            return os.open(path, flags, 0o600)

    def rename(self, source: str, block: bytes) -> None:
        """Give a file in ``tmp/`` the name of the record of ``block``."""
        for _ in range(_TRIES):
            try:
                os.rename(source, self.path(block))
            except FileNotFoundError:
                if lstat(source) is None:
                    raise
                # The namespace is new, or its directory was empty, and a sweep removed it.
                if not self.check_space(block):
                    with suppress(FileExistsError):
                        os.mkdir(self.space(block), 0o700)
            else:
                return
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path(block))

    def move_away(self, block: bytes, name: str) -> bool:
        """Move the record of ``block`` to ``quarantine/name``; return False if it is missing."""
        source, target = self.path(block), f"{self.quarantine}/{name}"
        try:
            os.rename(source, target)
        except FileNotFoundError:
            if size_of(source) is None:
                return False
            self.restore()  # quarantine/ itself is missing
            os.rename(source, target)
        return True

    def spaces(self) -> list[str]:
        """Return the names of all namespaces' directories."""
        try:
            with os.scandir(self.root) as entries:
                return [
                    entry.name
                    for entry in entries
                    if _is_space(entry.name) and entry.is_dir(follow_symlinks=False)
                ]
        except FileNotFoundError:
            return []  # another process removed the whole directory

    def names(self, space: str) -> tuple[bytes, list[int]]:
        """Return the sorted keys of the files in ``space``, and the sizes of foreign files."""
        directory, keys, others = os.path.join(self.root, space), bytearray(), []
        try:
            with os.scandir(directory) as listing:
                for entry in listing:
                    key = _from_hex(entry.name, _KEY_NAME)
                    if key is None:
                        others.append(entry.name)
                    else:
                        keys += key
        except FileNotFoundError:
            return b"", []  # it was empty, and another process removed it
        there = [found for name in others if (found := lstat(f"{directory}/{name}")) is not None]
        sizes = [found.st_size if stat.S_ISREG(found.st_mode) else 0 for found in there]
        return np.sort(np.frombuffer(keys, f"S{_KEY_NAME // 2}")).tobytes(), sizes

    def scan(self) -> Iterator[Listed | int]:
        """Yield each record as its file is; for each file that is none its size in bytes."""
        for space in self.spaces():
            names, others = self.names(space)
            yield from others
            for at in range(0, len(names), _KEY_NAME // 2):
                block = bytes.fromhex(space) + names[at : at + _KEY_NAME // 2]
                there = lstat(self.path(block))
                if there is not None and stat.S_ISREG(there.st_mode) and there.st_size:
                    yield Listed(block, there.st_size, there.st_mtime)
                elif there is not None:
                    yield 0

    def remove_space(self, space: str) -> None:
        """Remove the directory of a namespace if it is empty."""
        with suppress(OSError):
            os.rmdir(f"{self.root}/{space}")

    # -- creation -------------------------------------------------------------------------------

    def restore(self) -> None:
        """Create the missing parts of a directory that was emptied, removed or replaced while open.

        Nothing is created on another filesystem: an unmounted disk leaves an empty mount point.

        Raises:
            BackendFailed: the directory cannot be restored; the message says why.
        """
        above = self.root
        while not os.path.isdir(above):
            above = os.path.dirname(above)
        if os.stat(above).st_dev != self._device:
            raise BackendFailed(
                errno.ENOENT,
                f"{self.root} is gone and {above} is on another filesystem; mount its disk again",
            )
        try:
            self._prepare(was_open=True)
        except InvalidValue as error:
            raise BackendFailed(errno.EINVAL, str(error)) from error

    def _prepare(self, *, was_open: bool = False) -> None:
        """Create or check the directory; one that ``was_open`` may have records but no FORMAT."""
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        owner = os.stat(self.root).st_uid
        if owner != os.geteuid():
            raise InvalidValue(
                f"{self.root} belongs to user {owner} and this process is user {os.geteuid()}; "
                "records contain prompts, so use a directory of this user, or one below it"
            )
        with os.scandir(self.root) as entries:
            names = {entry.name for entry in entries}
        self._check_format(names, was_open=was_open or bool(names & {"index", "ledger"}))
        try:
            self._complete()
        except OSError as error:
            if not (names >= {"FORMAT", "tmp", "quarantine"} and error.errno in CANNOT_WRITE):
                raise
            # Read-only and complete, so it can still be read.

    def _check_format(self, names: Collection[str], *, was_open: bool) -> None:
        try:
            with closing_fd(open_known(self.format, os.O_RDONLY)[0]) as fd:
                found = os.pread(fd, 64, 0)
        except FileNotFoundError:
            found = b""
        if found == _FORMAT:
            return
        if found and _FORMAT.startswith(found):
            raise InvalidValue(
                f"{self.format} is cut short: it has {len(found)} of the {len(_FORMAT)} bytes "
                f"{_FORMAT!r}; write these, or delete the directory"
            )
        if found.startswith(b"kvkeep blocks "):
            raise InvalidValue(
                f"{self.root} holds {found.decode('ascii', 'replace').strip()!r} and this kvkeep "
                f"writes {_FORMAT.decode().strip()!r}; give another directory, or delete that one"
            )
        # Without FORMAT the directory is empty, or the process creating it was killed.
        others = {name for name in names if not (was_open and _is_space(name))} - _OURS
        if found or others:
            other = "FORMAT" if found else min(others)
            raise InvalidValue(
                f"{self.root} holds {other!r}, which is not kvkeep's; give an empty directory, "
                "or one that does not exist yet, such as a directory below it"
            )

    def _complete(self) -> None:
        """Create the missing parts of the directory, and tighten its mode to 0700."""
        if stat.S_IMODE(os.stat(self.root).st_mode) & 0o077:
            os.chmod(self.root, 0o700)
        for path in (self.tmp, self.quarantine, self._indexes):
            try:
                os.mkdir(path, 0o700)
            except FileExistsError:
                check_ours(os.lstat(path), path, stat.S_IFDIR)
        with self._alone() as fd:
            if self.index() is None:
                # Each has a name of its own: SQLite finds the journal of an index by its name.
                name = f"{self._indexes}/{os.urandom(_INDEX_NAME // 2).hex()}"
                os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            if os.fstat(fd).st_size:
                return
            os.pwrite(fd, _FORMAT, 0)
            # A loss of power must not leave records in a directory without FORMAT.
            os.fsync(fd)
        sync_path(self.root)

    def index(self) -> tuple[str, os.stat_result] | None:
        """Return path and status of the index; None if it is lost.

        Only SQLite may open it: closing it elsewhere would end the locks of this process.

        Raises:
            OSError: EINVAL, ENOTDIR: it is something else, or another user's.
        """
        if (above := lstat(self._indexes)) is None:
            return None
        check_kind(above, self._indexes, stat.S_IFDIR)
        for name in sorted(os.listdir(self._indexes)):
            path = f"{self._indexes}/{name}"
            if _from_hex(name, _INDEX_NAME) and (there := lstat(path)) is not None:
                check_ours(there, path, stat.S_IFREG)
                if (journal := lstat(f"{path}-journal")) is not None:
                    check_ours(journal, f"{path}-journal", stat.S_IFREG)
                return path, there
        return None

    def remove_index(self, path: str) -> bool:
        """Remove the index ``path``; return False if it is gone already."""
        with self._alone():
            if lstat(path) is None:
                return False
            for name in (path, f"{path}-journal"):
                with suppress(FileNotFoundError):
                    os.unlink(name)
            return True

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """Hold the lock of FORMAT, under which an index is made or removed."""
        until = time.monotonic() + _PATIENCE
        with closing_fd(open_known(self.format, os.O_RDWR | os.O_CREAT)[0]) as fd:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise
                time.sleep(0.005)
            try:
                yield fd
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a child forked meanwhile has it open

    # -- files of kvkeep before the index ---------------------------------------------------------

    def former_facts(self) -> dict[str | bytes, str | bytes]:
        """Return the notes by space, and the last budget as JSON."""
        facts: dict[str | bytes, str | bytes] = {}
        for line in self._read("spaces").splitlines():
            name, _, note = line.partition(b" ")
            if space := _from_hex(name.decode("ascii", "replace"), 2 * SPACE_BYTES):
                facts[space] = note
        form = rb"kvkeep budget (\d{4,20}) (given|default) (\d{1,12})\s*"
        if found := re.fullmatch(form, self._read("budget")):
            facts["budget"] = json.dumps([int(found[1]), found[2] == b"given", int(found[3])])
        return facts

    def _read(self, name: str) -> bytes:
        try:
            with closing_fd(open_known(f"{self.root}/{name}", os.O_RDONLY)[0]) as fd:
                return os.pread(fd, _FORMER_AT_MOST, 0)
        except OSError:  # missing, or a link, a pipe, a folder
            return b""

    def remove_former(self) -> None:
        """Remove the files that the index replaces."""
        for name in _FORMER:
            with suppress(OSError):
                os.unlink(f"{self.root}/{name}")


_FORMER_AT_MOST: Final = 64 << 10  # bytes of each
_NO_LOCKS: Final = {errno.ENOLCK, errno.EOPNOTSUPP}
_TRIES: Final = 5  # of a rename whose target directory is removed meanwhile
_PATIENCE: Final = 5.0  # seconds for the lock of FORMAT


def _is_space(name: str) -> bool:
    return _from_hex(name, 2 * SPACE_BYTES) is not None


def _from_hex(name: str, length: int) -> bytes | None:
    """Undo `bytes.hex` if ``name`` has ``length`` lower-case digits; else None."""
    if len(name) != length:
        return None
    try:
        data = bytes.fromhex(name)
    except ValueError:
        return None
    return data if data.hex() == name else None
