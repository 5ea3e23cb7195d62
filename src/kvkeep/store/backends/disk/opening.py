"""Opens a directory of records: creates it, or checks that it is a store of this user."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import BackendFailed, InvalidValue, reason
from kvkeep.store.backends.disk.directory import RecordDirectory, space_of_name
from kvkeep.store.backends.disk.files import (
    CANNOT_WRITE,
    WRONG_KIND,
    check_kind,
    check_owner,
    closing_fd,
    open_plain,
    sync_path,
)
from kvkeep.store.backends.disk.ledger import LEDGER_MAGIC
from kvkeep.store.backends.disk.notes import BUDGET, NOTES

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["open_directory", "restore"]

_FORMAT: Final = b"kvkeep blocks 1\n"
_OURS: Final = {"FORMAT", "ledger", "tmp", "quarantine"}


def open_directory(path: str | os.PathLike[str]) -> RecordDirectory:
    """Create the directory ``path`` or open an existing one.

    Raises:
        InvalidValue: it cannot be created, another user owns it, it holds other things, or it has
            another format. Nothing was changed.
        BackendFailed: any other error of the filesystem.
    """
    directory = RecordDirectory(os.path.realpath(path))
    root = directory.root
    try:
        _prepare(directory)
        directory.device = os.stat(root).st_dev
    except OSError as error:
        why = _told(error, root)
        if error.errno in CANNOT_WRITE | WRONG_KIND:
            raise InvalidValue(f"{root} cannot hold records: {why}") from error
        raise BackendFailed(error.errno, f"{root} cannot be opened: {why}") from error
    return directory


def _told(error: OSError, root: str) -> str:
    """Return why the directory ``root`` cannot be opened, with the file in it that is wrong."""
    file = error.filename
    return reason(error) + (f" ({file})" if file is not None and file != root else "")


def restore(directory: RecordDirectory) -> None:
    """Create the missing parts of a directory that was emptied, removed or replaced while open.

    Nothing is created on another filesystem: an unmounted disk leaves an empty mount point.

    Raises:
        BackendFailed: the directory cannot be restored; the message says why.
    """
    above = directory.root
    while not os.path.isdir(above):
        above = os.path.dirname(above)
    if os.stat(above).st_dev != directory.device:
        raise BackendFailed(
            errno.ENOENT,
            f"{directory.root} is gone and {above} is on another filesystem; mount its disk again",
        )
    try:
        _prepare(directory, known=True)
    except InvalidValue as error:
        raise BackendFailed(errno.EINVAL, str(error)) from error


def _prepare(directory: RecordDirectory, *, known: bool = False) -> None:
    """Create or check the directory.

    ``known``: it was open before, so it may have records but no FORMAT.
    """
    root = directory.root
    os.makedirs(root, mode=0o700, exist_ok=True)
    _check_root(root)
    with os.scandir(root) as entries:
        names = {entry.name for entry in entries}
    _check_format(directory, names, known=known)
    try:
        _complete(directory)
    except OSError as error:
        if not (names >= _OURS and error.errno in CANNOT_WRITE):
            raise
        # Read-only and complete, so it can still be read.


def _check_root(root: str) -> None:
    owner = os.stat(root).st_uid
    if owner != os.geteuid():
        raise InvalidValue(
            f"{root} belongs to user {owner} and this process is user {os.geteuid()}; "
            "records contain prompts, so use a directory of this user, or one below it"
        )


def _check_format(directory: RecordDirectory, names: Collection[str], *, known: bool) -> None:
    found = _head(directory.format, 64)
    if found == _FORMAT:
        return
    if found and _FORMAT.startswith(found):
        raise InvalidValue(
            f"{directory.format} is cut short: it has {len(found)} of the {len(_FORMAT)} bytes "
            f"{_FORMAT!r}; write these, or delete the directory"
        )
    if found.startswith(b"kvkeep blocks "):
        raise InvalidValue(
            f"{directory.root} holds {found.decode('ascii', 'replace').strip()!r} and this kvkeep "
            f"writes {_FORMAT.decode().strip()!r}; give another directory, or delete that one"
        )
    # Without FORMAT the directory is empty, or the process creating it was killed.
    others = {*names} - _OURS - {BUDGET, NOTES, "writes"}
    if known or _head(directory.ledger, len(LEDGER_MAGIC)) == LEDGER_MAGIC:
        others = {name for name in others if not space_of_name(name)}
    if found or others:
        other = "FORMAT" if found else min(others)
        raise InvalidValue(
            f"{directory.root} holds {other!r}, which is not kvkeep's; give an empty directory, "
            "or one that does not exist yet, such as a directory below it"
        )


def _head(path: str, size: int) -> bytes:
    """Return the first ``size`` bytes of a file, b"" if it does not exist."""
    try:
        with closing_fd(open_plain(path, os.O_RDONLY)) as fd:
            return os.pread(fd, size, 0)
    except FileNotFoundError:
        return b""


def _complete(directory: RecordDirectory) -> None:
    """Create the missing parts of the directory, and tighten its mode to 0700."""
    if stat.S_IMODE(os.stat(directory.root).st_mode) & 0o077:
        os.chmod(directory.root, 0o700)
    for path in (directory.tmp, directory.quarantine):
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            found = os.stat(path, follow_symlinks=False)
            check_kind(found, path, stat.S_IFDIR)
            check_owner(found, path)
    with closing_fd(open_plain(directory.ledger, os.O_RDWR | os.O_CREAT)) as fd:
        if not os.fstat(fd).st_size:
            # Allocates the ledger's block, with the count "unknown". Without a block, nothing could
            # be deleted on a full disk, because the ledger could not be written.
            os.pwrite(fd, bytes(64), 0)
    with closing_fd(open_plain(directory.format, os.O_RDWR | os.O_CREAT)) as fd:
        if os.fstat(fd).st_size:
            return
        os.pwrite(fd, _FORMAT, 0)
        # A loss of power must not leave records in a directory without FORMAT.
        os.fsync(fd)
    sync_path(directory.root)
