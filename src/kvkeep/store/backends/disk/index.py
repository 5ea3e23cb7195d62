"""The index of a directory: a SQLite file that all processes share.

    records   block → size in bytes, time of the last use in nanoseconds
    room      name → bytes: what the directory holds. ``""`` is the sum of ``records``; each record
              being written and each file in quarantine has a row of its own
    spaces    notes on namespaces
    facts     the budget that the directory was last opened with; the boot that it was swept in

A put reserves its bytes in ``room`` before it writes, so the files never have more than the sum of
``room``. A killed process leaves rows, not uncounted files. The files are the truth: `settle` makes
the rows of one block what its file is, and whatever finds a difference calls it.

SQLite never syncs here (``synchronous=OFF``): after a loss of power, another boot, the index is
checked, and each file compared with its row. An index that is damaged or lost is made anew.

Each change is one short transaction; writing data and reading records need none. A process stopped
within a transaction lets the others fail after their timeout.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import sqlite3
import stat
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar
from weakref import WeakSet

import numpy as np

from kvkeep.core.errors import BackendFailed, OutOfRoom
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.backends.base import ALIGNMENT, Listed
from kvkeep.store.backends.disk.files import (
    ABSENT,
    CANNOT_WRITE,
    WRONG_KIND,
    check_kind,
    check_owner,
    closing_fd,
    lstat,
    open_plain,
    padded,
    pin,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvkeep.store.backends.disk.directory import RecordDirectory

__all__ = ["DiskIndex", "Draft", "LastBudget"]

T = TypeVar("T")
_LOG = logging.getLogger("kvkeep.tiers")
_VERSION: Final = 1
_SCHEMA: Final = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS records(
    block BLOB PRIMARY KEY, size INTEGER NOT NULL, used INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS room(
    name TEXT PRIMARY KEY, bytes INTEGER NOT NULL, block BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spaces(space BLOB PRIMARY KEY, note BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
INSERT OR IGNORE INTO room VALUES ('', 0, NULL);
PRAGMA user_version = {_VERSION};
COMMIT;
"""
_BUSY: Final = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_DAMAGED: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
_ERRNOS: Final = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_PERM: errno.EACCES,
}
_NETWORK: Final = ("nfs", "cifs", "smb", "afs", "ceph", "lustre", "gluster", "beegfs", "gpfs")
_FIRST_PAUSE: Final = 0.0001  # seconds between attempts to begin a transaction
_FINISHED: Final = 32  # finished records that one transaction adds to ``records``
_BATCH: Final = 256  # blocks that one transaction settles
_PAGE: Final = 4096  # rows read at once
_SUSPECTS: Final = 1024  # blocks whose file was missing, until the next transaction
_NOTES: Final = 64 << 10  # bytes of all notes
_QUARANTINE: Final = "quarantine/"
_QUARANTINED_AT_MOST: Final = 16
_PIN_FROM: Final = 64 * 1024
"""Bytes from which an unlink takes so long that the file's blocks are freed after the commit."""


class LastBudget(NamedTuple):
    """A budget in bytes, whether it was given as ``size=``, and when it was last used."""

    bytes: int
    given: bool
    opened: float


class Draft(NamedTuple):
    """A record being written: its open, locked file in ``tmp/``.

    ``alone``: there was no record of the block, nor another draft. Its file can be renamed without
    a transaction.
    """

    fd: int
    name: str
    path: str
    block: bytes
    alone: bool


class DiskIndex:
    """The index of ``directory``.

    Thread safety: all methods; one connection, which a lock guards. A forked child opens its own.
    """

    def __init__(self, directory: RecordDirectory) -> None:
        self._directory = directory
        self._finished: list[tuple[str, bytes, int, int]] = []
        self._suspects: set[bytes] = set()
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self.lock = threading.Lock()  # the connection, and a transaction on it
        self._sweeping = threading.Lock()  # one sweep that a put waits for
        self._db: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._swept = False
        self._token, self._serial = f"{self._pid}-{os.urandom(8).hex()}", 0

    # -- records --------------------------------------------------------------------------------

    def reserve(self, block: bytes, size: int, capacity: int | None, timeout: float) -> Draft:
        """Create the file of a draft, whose ``size`` bytes count as used from now on.

        Raises:
            OutOfRoom: they would exceed ``capacity``.
        """
        need = padded(size)
        if capacity is not None:
            self.sweep_once(timeout)
        draft: Draft | None = None

        def work(db: sqlite3.Connection) -> int:
            nonlocal draft
            if len(self._finished) >= _FINISHED:
                self._add_finished(db)
            used, others = _used(db, block)
            if capacity is not None and used + need > capacity:
                self._add_finished(db)
                self._recover(db)
                used, others = _used(db, block)
                if used + need > capacity:
                    return used + need - capacity
            alone = not others and _row(db, block) is None
            self._serial += 1
            name = f"{self._token}{self._serial:08x}"
            path = f"{self._directory.tmp}/{name}"
            draft = Draft(self._create(path), name, path, block, alone)
            db.execute("INSERT INTO room VALUES (?, ?, ?)", (name, need, block))
            return 0

        try:
            short = self.change(work, timeout)
        except BaseException:
            if draft is not None:  # the transaction failed
                os.close(draft.fd)
                with suppress(OSError):
                    os.unlink(draft.path)
            raise
        if short:
            raise OutOfRoom(short, self._directory.url)
        assert draft is not None
        return draft

    def finish(self, draft: Draft, size: int, timeout: float) -> None:
        """Give the draft's file, of ``size`` bytes, the name of its record."""
        target, used = self._directory.path(draft.block), time.time_ns()
        if draft.alone:
            # Whoever reserves the same block from now on sees this draft and is not alone.
            self._rename(draft, target)
            self._finished.append((draft.name, draft.block, size, used))
            return
        held: list[int] = []

        def work(db: sqlite3.Connection) -> None:
            self._add_finished(db)
            if (old := pin(target)) is not None:
                held.append(old[0])
            if lstat(draft.path) is not None:
                self._rename(draft, target)
            self.settle(db, draft.block, used)

        try:
            self.change(work, timeout)
        finally:
            for fd in held:
                os.close(fd)

    def discard(self, draft: Draft, timeout: float) -> None:
        """Remove the file of a failed put. One that stays is removed as of a killed writer."""

        def work(db: sqlite3.Connection) -> None:
            os.unlink(draft.path)
            db.execute("DELETE FROM room WHERE name = ?", (draft.name,))

        with suppress(OSError):
            self.change(work, timeout)

    def delete(self, blocks: Sequence[bytes], timeout: float) -> int:
        """Unlink records; return their sizes."""
        freed: dict[bytes, int] = {}
        held: list[int] = []

        def work(db: sqlite3.Connection) -> None:
            self._unlink(blocks, freed, held)
            self._add_finished(db)
            for block in blocks:
                self.settle(db, block)

        try:
            try:
                self.change(work, timeout)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                # No space even for the index: too many bytes count as used until there is.
                self._unlink(blocks, freed, held)
                while held:
                    os.close(held.pop())
                self.change(work, timeout)
        finally:
            for fd in held:
                os.close(fd)
        return sum(freed.values())

    def _unlink(self, blocks: Sequence[bytes], freed: dict[bytes, int], held: list[int]) -> None:
        for block in blocks:
            path = self._directory.path(block)
            found = lstat(path)
            if found is None or not stat.S_ISREG(found.st_mode):
                continue
            if found.st_size >= _PIN_FROM and (opened := pin(path)) is not None:
                held.append(opened[0])
            os.unlink(path)
            freed[block] = found.st_size

    def quarantine(
        self, block: bytes, name: str, capacity: int | None, timeout: float
    ) -> bool:
        """Move a record to ``quarantine/name``; return False if it is missing."""
        source, target = self._directory.path(block), f"{self._directory.quarantine}/{name}"

        def work(db: sqlite3.Connection) -> bool:
            self._add_finished(db)
            try:
                os.rename(source, target)
            except FileNotFoundError:
                if (found := lstat(source)) is not None and stat.S_ISREG(found.st_mode):
                    self._directory.restore()  # quarantine/ itself is missing
                    os.rename(source, target)
                else:
                    self.settle(db, block)
                    return False
            self.settle(db, block)
            self._count_quarantine(db)
            kept = db.execute(
                "SELECT name, bytes FROM room WHERE name LIKE 'quarantine/%' ORDER BY name DESC"
            ).fetchall()
            held, most = 0, float("inf") if capacity is None else capacity // _QUARANTINED_AT_MOST
            for number, (kept_name, size) in enumerate(kept):
                held += size
                if number >= _QUARANTINED_AT_MOST or held > most:
                    with suppress(FileNotFoundError):
                        os.unlink(f"{self._directory.root}/{kept_name}")
                    db.execute("DELETE FROM room WHERE name = ?", (kept_name,))
            return True

        return self.change(work, timeout)

    def touch(self, blocks: Sequence[bytes], used: Sequence[int], timeout: float) -> None:
        """Set the times of the last use, in nanoseconds; later ones stay."""

        def work(db: sqlite3.Connection) -> None:
            self._add_finished(db)
            db.executemany(
                "UPDATE records SET used = max(used, ?) WHERE block = ?",
                zip(used, blocks, strict=True),
            )

        self.change(work, timeout)

    def suspect(self, block: bytes) -> None:
        """Note that the file of ``block`` is missing; its row goes with the next transaction."""
        if len(self._suspects) < _SUSPECTS:
            self._suspects.add(block)

    def used(self, timeout: float) -> int:
        """Return the bytes used by all processes."""
        self.sweep_once(timeout)

        def work(db: sqlite3.Connection) -> int:
            self._add_finished(db)
            self._recover(db)
            return _used(db)[0]

        return self.change(work, timeout)

    # -- listing --------------------------------------------------------------------------------

    def sweep_once(self, timeout: float) -> None:
        """Compare files and rows, unless this or another process has since the index was made."""
        if self._swept:
            return
        if not self._sweeping.acquire(timeout=timeout):
            raise BackendFailed(f"the index of {self._directory.url} is still being made")
        try:
            if not self._is_swept(timeout):
                for _ in self.sweep(timeout):
                    pass
        finally:
            self._sweeping.release()

    def _is_swept(self, timeout: float) -> bool:
        # This connects, which may create the index.
        self._swept = self.read_fact("swept", timeout) == _boot()
        return self._swept

    def sweep(self, timeout: float) -> Iterator[Listed | int]:
        """Yield each record; for each file that is none its size in bytes.

        Reads names and rows; looks at a file only where they differ, or after another boot.
        Memory: 64 bytes a record of the namespace being listed.
        """
        trusted = self._is_swept(timeout)

        def begin(db: sqlite3.Connection) -> None:
            self._add_finished(db)
            self._recover(db)

        self.change(begin, timeout)
        spaces = set(self._directory.spaces())
        rows = self._read("SELECT DISTINCT substr(block, 1, ?) FROM records", (SPACE_BYTES,), timeout) if not trusted else []
        for space in sorted(spaces | {row[0].hex() for row in rows}):
            names, others = self._directory.names(space)
            yield from others
            differ: list[bytes] = []
            for listed, is_same in self._merged(bytes.fromhex(space), names, timeout):
                if is_same and trusted:
                    yield listed
                    continue
                differ.append(listed.block)
                if len(differ) == _BATCH:
                    yield from self._settle_all(differ, timeout)
                    differ.clear()
            yield from self._settle_all(differ, timeout)
            if not names and not others:
                self._directory.remove_space(space)

        def end(db: sqlite3.Connection) -> None:
            db.execute("INSERT OR REPLACE INTO facts VALUES ('swept', ?)", (_boot(),))

        if not trusted:
            self.change(end, timeout)
            self._swept = True

    def _merged(
        self, space: bytes, names: bytes, timeout: float
    ) -> Iterator[tuple[Listed, bool]]:
        """Yield the union of sorted ``names`` and rows, and whether a block is in both."""
        width = BLOCK_ID_BYTES - SPACE_BYTES
        at, after, more = 0, space, True
        while more:
            rows = self._read(
                "SELECT block, size, used FROM records WHERE block > ? AND block < ? "
                "ORDER BY block LIMIT ?", (after, space + b"\xff" * (width + 1), _PAGE), timeout,
            )  # fmt: skip
            more = len(rows) == _PAGE
            for block, size, used in rows:
                after, key = block, block[SPACE_BYTES:]
                while at < len(names) and (name := names[at : at + width]) < key:
                    yield Listed(space + name, 0, 0.0), False
                    at += width
                is_same = names[at : at + width] == key
                at += width * is_same
                yield Listed(block, size, used / 1e9), is_same
        for start in range(at, len(names), width):
            yield Listed(space + names[start : start + width], 0, 0.0), False

    def _settle_all(self, blocks: Sequence[bytes], timeout: float) -> list[Listed | int]:
        if not blocks:
            return []

        def work(db: sqlite3.Connection) -> list[Listed | int]:
            found: list[Listed | int] = []
            for block in blocks:
                row = self.settle(db, block)
                if row is not None:
                    found.append(Listed(block, row[0], row[1] / 1e9))
                elif lstat(self._directory.path(block)) is not None:
                    found.append(0)  # an empty or special file
            return found

        return self.change(work, timeout)

    # -- within a transaction ---------------------------------------------------------------------

    def settle(
        self, db: sqlite3.Connection, block: bytes, used: int | None = None
    ) -> tuple[int, int] | None:
        """Make the row of ``block`` what its file is; return size and last use.

        A draft whose file is gone from ``tmp/`` has its name, or was replaced since: its row goes.
        It is looked for before the record's file, so that no file is missed.
        """
        for (name,) in db.execute("SELECT name FROM room WHERE block = ?", (block,)).fetchall():
            if lstat(f"{self._directory.tmp}/{name}") is None:
                db.execute("DELETE FROM room WHERE name = ?", (name,))
        found = lstat(self._directory.path(block))
        size = found.st_size if found is not None and stat.S_ISREG(found.st_mode) else 0
        row = _row(db, block)
        if used is None:
            used = row[1] if row else found.st_mtime_ns if found else 0
        _set_row(db, block, row, size, used)
        return (size, used) if size else None

    def _add_finished(self, db: sqlite3.Connection) -> None:
        """Add finished records, and settle blocks whose file was missing."""
        # Both stay until the commit; if that fails, this is repeated, and finds rows as they are.
        for name, block, size, used in self._finished:
            if db.execute("DELETE FROM room WHERE name = ?", (name,)).rowcount:
                _set_row(db, block, _row(db, block), size, used)
        for block in self._suspects:
            self.settle(db, block)

    def _recover(self, db: sqlite3.Connection) -> None:
        """Remove drafts of killed writers, and finish what has its name; count the quarantine."""
        tmp = self._directory.tmp
        rows = db.execute("SELECT name, block FROM room WHERE name != ''").fetchall()
        drafts = {name: block for name, block in rows if not name.startswith(_QUARANTINE)}
        for path, size in regular_files(tmp):
            name = os.path.basename(path)
            alive = _is_locked(path)
            if alive is False:
                os.unlink(path)
            elif alive and name not in drafts:  # the index was lost while it is written
                db.execute("INSERT INTO room VALUES (?, ?, NULL)", (name, padded(size)))
        for name, block in drafts.items():
            if lstat(f"{tmp}/{name}") is None:
                db.execute("DELETE FROM room WHERE name = ?", (name,))
                if block is not None:
                    self.settle(db, block)
        self._count_quarantine(db)

    def _count_quarantine(self, db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM room WHERE name LIKE 'quarantine/%'")
        db.executemany(
            "INSERT INTO room VALUES (?, ?, NULL)",
            [
                (_QUARANTINE + os.path.basename(path), padded(size))
                for path, size in regular_files(self._directory.quarantine)
            ],
        )

    def _create(self, path: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(path, flags, 0o600)
        except FileNotFoundError:
            self._directory.restore()  # tmp/ was removed from outside
            fd = os.open(path, flags, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # shows that its writer lives
        return fd

    def _rename(self, draft: Draft, target: str) -> None:
        try:
            os.rename(draft.path, target)
        except FileNotFoundError:
            if self._directory.has_space(draft.block):
                raise
            with suppress(FileExistsError):
                os.mkdir(self._directory.space(draft.block), 0o700)
            os.rename(draft.path, target)

    # -- notes and the budget -----------------------------------------------------------------------

    def add_note(self, space: bytes, note: bytes, timeout: float) -> None:
        """Add a note on ``space``, unless it has one or there are too many."""

        def work(db: sqlite3.Connection) -> None:
            (size,) = db.execute("SELECT COALESCE(SUM(length(note)), 0) FROM spaces").fetchone()
            if size + len(note) <= _NOTES:
                db.execute("INSERT OR IGNORE INTO spaces VALUES (?, ?)", (space, note))

        self.change(work, timeout)

    def notes(self, timeout: float) -> dict[bytes, bytes]:
        """Return the notes by space."""
        return dict(self._read("SELECT space, note FROM spaces", (), timeout))

    def last_budget(self, timeout: float) -> LastBudget | None:
        """Return the budget that the directory was last opened with."""
        return _last_budget(self._read("SELECT name, value FROM facts", (), timeout))

    def agree(
        self, choose: Callable[[LastBudget | None, int], LastBudget], timeout: float
    ) -> LastBudget:
        """Remember the budget that ``choose(last, bytes used)`` returns, in one transaction."""

        def work(db: sqlite3.Connection) -> LastBudget:
            last = _last_budget(db.execute("SELECT name, value FROM facts").fetchall())
            budget = choose(last, _used(db)[0])
            db.executemany(
                "INSERT OR REPLACE INTO facts VALUES (?, ?)",
                [("budget", budget.bytes), ("given", budget.given), ("opened", budget.opened)],
            )
            return budget

        return self.change(work, timeout)

    def read_fact(self, name: str, timeout: float) -> object:
        """Return the value of one of ``facts``, None if it has none."""
        rows = self._read("SELECT value FROM facts WHERE name = ?", (name,), timeout)
        return rows[0][0] if rows else None

    # -- the connection -----------------------------------------------------------------------------

    def change(self, work: Callable[[sqlite3.Connection], T], timeout: float) -> T:
        """Call ``work`` within a transaction; it is called again if the index was damaged.

        Raises:
            BackendFailed: another process was within a transaction for ``timeout`` seconds.
            OSError: the index cannot be written.
        """

        def transaction(db: sqlite3.Connection) -> T:
            db.execute("BEGIN IMMEDIATE")
            finished, suspects = len(self._finished), set(self._suspects)
            before = db.total_changes
            try:
                result = work(db)
                db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise
            del before
            self._forget(db, finished, suspects)
            return result

        return self._with_connection(transaction, timeout)
