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
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from urllib.parse import quote
from weakref import WeakSet

from kvkeep.core.errors import BackendFailed, OutOfRoom
from kvkeep.core.keys import BLOCK_ID_BYTES, SPACE_BYTES
from kvkeep.store.backends.base import Listed
from kvkeep.store.backends.disk.files import (
    CANNOT_WRITE,
    WRONG_KIND,
    check_kind,
    check_owner,
    closing_fd,
    lstat,
    open_plain,
    padded,
    pin,
    regular_files,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvkeep.store.backends.disk.directory import RecordDirectory

__all__ = ["DiskIndex", "Draft", "LastBudget"]

T = TypeVar("T")
_LOG = logging.getLogger("kvkeep.tiers")
_VERSION: Final = 1
_SCHEMA: Final = (
    "CREATE TABLE records(block BLOB PRIMARY KEY, size INTEGER NOT NULL, used INTEGER NOT NULL) "
    "WITHOUT ROWID",
    "CREATE TABLE room(name TEXT PRIMARY KEY, bytes INTEGER NOT NULL, block BLOB) WITHOUT ROWID",
    "CREATE TABLE spaces(space BLOB PRIMARY KEY, note BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE facts(name TEXT PRIMARY KEY, value) WITHOUT ROWID",
    "INSERT INTO room VALUES ('', 0, NULL)",
    f"PRAGMA user_version = {_VERSION}",
)
_BUSY: Final = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_DAMAGED: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
_LOST: Final = {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}  # so it looks if a file is removed
_ERRNOS: Final = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_PERM: errno.EACCES,
}
_NETWORK: Final = ("nfs", "cifs", "smb", "afs", "ceph", "lustre", "gluster", "beegfs", "gpfs")
_CACHE_KIB: Final = 16 << 10
_CHECKPOINT: Final = 4000  # pages of the log, then they are copied into the index
_TRIES: Final = 5  # of an operation that collides with the removal of files
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


class _SweepDue(Exception):
    """A change needs rows that are compared with the files."""


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
        self._lock = threading.Lock()  # the connection, and a transaction on it
        self._sweeping = threading.Lock()  # one sweep that a put waits for
        self._db: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._swept = False
        self._token, self._serial = f"{self._pid}-{os.urandom(8).hex()}", 0

    # -- records -----------------------------------------------------------------------------------

    def reserve(self, block: bytes, size: int, capacity: int | None, timeout: float) -> Draft:
        """Create the file of a draft, whose ``size`` bytes count as used from now on.

        Raises:
            OutOfRoom: they would exceed ``capacity``.
        """
        need = padded(size)
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
            short = self.change(work, timeout, swept=capacity is not None)
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

    def quarantine(self, block: bytes, name: str, capacity: int | None, timeout: float) -> bool:
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

        self.change(work, timeout, swept=True)

    def suspect(self, block: bytes) -> None:
        """Note that the file of ``block`` is missing; its row goes with the next transaction."""
        if len(self._suspects) < _SUSPECTS:
            self._suspects.add(block)

    def used(self, timeout: float) -> int:
        """Return the bytes used by all processes."""

        def work(db: sqlite3.Connection) -> int:
            self._add_finished(db)
            self._recover(db)
            return _used(db)[0]

        return self.change(work, timeout, swept=True)

    # -- listing -----------------------------------------------------------------------------------

    def _sweep_once(self, timeout: float) -> None:
        """Sweep, or wait for the thread that does."""
        if not self._sweeping.acquire(timeout=timeout):
            raise BackendFailed(f"the index of {self._directory.url} is still being made")
        try:
            if not self._is_swept(timeout):
                for _ in self.sweep(timeout):
                    pass
        finally:
            self._sweeping.release()

    def _is_swept(self, timeout: float) -> bool:
        """Whether a process has swept since the index was made and since the machine started."""

        def read(db: sqlite3.Connection) -> bool:
            row = db.execute("SELECT value FROM facts WHERE name = 'swept'").fetchone()
            self._swept = row == (_boot(),)
            return self._swept

        return self._connected(read, timeout)

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
        for space in sorted(spaces | self._spaces_of_rows(timeout)):
            is_there = space in spaces
            names, others = self._directory.names(space) if is_there else (b"", [])
            yield from others
            differ: list[bytes] = []
            for listed, is_same in self._merged(bytes.fromhex(space), names, timeout):
                if is_same and trusted:
                    yield listed
                    continue
                differ.append(listed.block)
                if len(differ) == _BATCH:
                    yield from self._settle_all(differ, is_there, timeout)
                    differ.clear()
            yield from self._settle_all(differ, is_there, timeout)
            if is_there and not names and not others:
                self._directory.remove_space(space)

        def end(db: sqlite3.Connection) -> None:
            db.execute("INSERT OR REPLACE INTO facts VALUES ('swept', ?)", (_boot(),))

        if not trusted:
            self.change(end, timeout)
            self._swept = True

    def _spaces_of_rows(self, timeout: float) -> set[str]:
        """Return the names of namespaces that have rows, by one search each."""
        found: set[str] = set()
        after = b""
        query = "SELECT block FROM records WHERE block > ? ORDER BY block LIMIT 1"
        while rows := self._read(query, (after,), timeout):
            space = rows[0][0][:SPACE_BYTES]
            found.add(space.hex())
            after = space + b"\xff" * (BLOCK_ID_BYTES - SPACE_BYTES)
        return found

    def _merged(self, space: bytes, names: bytes, timeout: float) -> Iterator[tuple[Listed, bool]]:
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

    def _settle_all(
        self, blocks: Sequence[bytes], is_there: bool, timeout: float
    ) -> list[Listed | int]:
        """Settle blocks of a namespace; of one without a directory, the rows go."""
        if not blocks:
            return []

        def work(db: sqlite3.Connection) -> list[Listed | int]:
            found: list[Listed | int] = []
            for block in blocks:
                if not is_there:
                    _set_row(db, block, _row(db, block), 0, 0)
                elif (row := self.settle(db, block)) is not None:
                    found.append(Listed(block, row[0], row[1] / 1e9))
                elif lstat(self._directory.path(block)) is not None:
                    found.append(0)  # an empty or special file
            return found

        return self.change(work, timeout)

    # -- within a transaction ----------------------------------------------------------------------

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
        batch, self._settled = self._finished[:], set(self._suspects)
        self._added = len(batch)  # they stay until the commit
        for name, block, size, used in batch:
            if db.execute("DELETE FROM room WHERE name = ?", (name,)).rowcount:
                _set_row(db, block, _row(db, block), size, used)
        for block in self._settled:
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
                with suppress(FileNotFoundError):  # finished meanwhile
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
        """Make the rows of files in quarantine what is there."""
        there = {
            _QUARANTINE + os.path.basename(path): padded(size)
            for path, size in regular_files(self._directory.quarantine)
        }
        rows = dict(db.execute("SELECT name, bytes FROM room WHERE name LIKE 'quarantine/%'"))
        for name in rows.keys() - there.keys():
            db.execute("DELETE FROM room WHERE name = ?", (name,))
        for name in there.keys() - rows.keys():
            db.execute("INSERT INTO room VALUES (?, ?, NULL)", (name, there[name]))
            if (block := _quarantined(name)) is not None:
                self.settle(db, block)

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
        for _ in range(_TRIES):
            try:
                os.rename(draft.path, target)
            except FileNotFoundError:
                if lstat(draft.path) is None:
                    raise
                # The namespace is new, or its directory was empty, and a sweep removed it.
                if not self._directory.has_space(draft.block):
                    with suppress(FileExistsError):
                        os.mkdir(self._directory.space(draft.block), 0o700)
            else:
                return
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), target)

    # -- notes and the budget ----------------------------------------------------------------------

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
        self,
        choose: Callable[[LastBudget | None, int], LastBudget],
        timeout: float,
        *,
        sweep: bool,
    ) -> LastBudget:
        """Remember the budget that ``choose(last, bytes used)`` returns, in one transaction.

        Without ``sweep`` the bytes used may be outdated.
        """

        def work(db: sqlite3.Connection) -> LastBudget:
            last = _last_budget(db.execute("SELECT name, value FROM facts").fetchall())
            budget = choose(last, _used(db)[0])
            db.executemany(
                "INSERT OR REPLACE INTO facts VALUES (?, ?)",
                [("budget", budget.bytes), ("given", budget.given), ("opened", budget.opened)],
            )
            return budget

        return self.change(work, timeout, swept=sweep)

    # -- the connection ----------------------------------------------------------------------------

    def change(
        self, work: Callable[[sqlite3.Connection], T], timeout: float, *, swept: bool = False
    ) -> T:
        """Call ``work`` within a transaction; it is called again if the index was damaged.

        With ``swept``, files and rows are compared first if that is due.

        Raises:
            BackendFailed: another process was within a transaction for ``timeout`` seconds.
            OSError: the index cannot be written.
        """

        def transaction(db: sqlite3.Connection) -> T:
            if swept and not self._swept:
                raise _SweepDue
            self._added, self._settled = 0, set()
            db.execute("BEGIN IMMEDIATE")
            try:
                result = work(db)
                db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise
            del self._finished[: self._added]
            self._suspects -= self._settled
            return result

        while True:
            try:
                return self._connected(transaction, timeout)
            except _SweepDue:
                self._sweep_once(timeout)

    def _read(self, query: str, values: Sequence[object], timeout: float) -> list[tuple[Any, ...]]:
        """Return rows. A reader does not wait for writers."""
        return self._connected(lambda db: db.execute(query, values).fetchall(), timeout)

    def _connected(self, work: Callable[[sqlite3.Connection], T], timeout: float) -> T:
        """Call ``work`` with the connection; wait for others, and replace a damaged index once."""
        until, pause, tries = time.monotonic() + timeout, _FIRST_PAUSE, _TRIES
        if self._pid != os.getpid():
            self.close_connection()
            self._begin()
        while True:
            if not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
                raise self._locked(timeout)
            try:
                return work(self._open())
            except sqlite3.ProgrammingError:
                raise
            except sqlite3.Error as error:
                code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
                tries -= code not in _BUSY
                if code in _DAMAGED | _LOST and tries:
                    self._replace(error, is_damaged=code in _DAMAGED)
                elif code not in _BUSY:
                    self.close_connection()
                    number, path = _ERRNOS.get(code, errno.EIO), self._directory.index
                    raise OSError(number, f"{os.strerror(number)}: {error}", path) from error
                elif time.monotonic() > until:
                    raise self._locked(timeout) from None
            finally:
                self._lock.release()
            time.sleep(pause)
            pause = min(pause * 1.5, 0.005)

    def _locked(self, timeout: float) -> BackendFailed:
        return BackendFailed(
            f"{self._directory.index} was locked for more than {timeout:g} s: one of the "
            "processes that write there is stopped or hangs"
        )

    def _open(self) -> sqlite3.Connection:
        """Return the connection to the file that has the name now."""
        found = lstat(self._directory.index)
        if self._db is not None:
            if found is not None and (found.st_dev, found.st_ino) == self._identity:
                return self._db
            self.close_connection()
        if found is None:
            self._directory.restore()
            found = os.lstat(self._directory.index)
        check_kind(found, self._directory.index, stat.S_IFREG)
        check_owner(found, self._directory.index)
        if not os.access(self._directory.root, os.W_OK):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), self._directory.root)
        self._identity = found.st_dev, found.st_ino
        db = sqlite3.connect(
            f"file:{quote(self._directory.index)}?mode=rw",
            timeout=0,
            isolation_level=None,
            check_same_thread=False,
            uri=True,
        )
        try:
            self._prepare(db)
        except BaseException:
            db.close()
            raise
        self._db, self._swept = db, False
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        if self._directory.is_remote:
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = OFF")
        db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        db.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT}")
        if db.execute("PRAGMA user_version").fetchone() == (_VERSION,):
            swept = db.execute("SELECT value FROM facts WHERE name = 'swept'").fetchone()
            if swept != (_boot(),) and db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("it was not synced when the machine stopped")
            return
        db.execute("BEGIN IMMEDIATE")
        try:
            version = db.execute("PRAGMA user_version").fetchone()
            if version == (0,):
                for statement in _SCHEMA:
                    db.execute(statement)
                self._adopt(db)
            elif version != (_VERSION,):
                raise sqlite3.DatabaseError(f"it has version {version[0]}, not {_VERSION}")
            db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise
        self._directory.remove_old()

    def _adopt(self, db: sqlite3.Connection) -> None:
        """Take over the budget and the notes of a directory that has no index yet."""
        notes, budget = self._directory.read_old()
        db.executemany("INSERT OR IGNORE INTO spaces VALUES (?, ?)", notes)
        if budget is not None:
            db.executemany("INSERT INTO facts VALUES (?, ?)", budget)
        if not self._directory.spaces():
            db.execute("INSERT INTO facts VALUES ('swept', ?)", (_boot(),))

    def _replace(self, error: sqlite3.Error, *, is_damaged: bool) -> None:
        """Close the connection, and delete a damaged index: the next use makes it anew."""
        identity = self._identity
        self.close_connection()
        if is_damaged and identity is not None and self._directory.remove_index(identity):
            _LOG.warning("%s is damaged and is made anew: %s", self._directory.index, error)

    def close_connection(self) -> None:
        """Close the connection; the next use opens it again."""
        db, self._db = self._db, None
        if db is not None and self._pid == os.getpid():
            db.close()
        elif db is not None:
            _inherited.append(db)

    def close(self, timeout: float) -> None:
        """Add finished records, and close the connection."""
        if self._finished:
            with suppress(OSError):
                self.change(self._add_finished, timeout)
        if self._pid == os.getpid() and self._lock.acquire(timeout=timeout):
            self.close_connection()
            self._lock.release()

    def __del__(self) -> None:
        with suppress(sqlite3.Error):
            self.close_connection()


def _used(db: sqlite3.Connection, block: bytes = b"") -> tuple[int, int]:
    """Return the bytes used, and how many drafts of ``block`` there are."""
    used, drafts = db.execute("SELECT SUM(bytes), SUM(block IS ?) FROM room", (block,)).fetchone()
    return used, drafts


def _row(db: sqlite3.Connection, block: bytes) -> tuple[int, int] | None:
    """Return size and last use of ``block``, None if it has no row."""
    row: tuple[int, int] | None = db.execute(
        "SELECT size, used FROM records WHERE block = ?", (block,)
    ).fetchone()
    return row


def _set_row(
    db: sqlite3.Connection, block: bytes, row: tuple[int, int] | None, size: int, used: int
) -> None:
    """Replace ``row`` of ``block``; a size of 0 is no row."""
    if size and row != (size, used):
        db.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", (block, size, used))
    elif row and not size:
        db.execute("DELETE FROM records WHERE block = ?", (block,))
    if more := padded(size) - padded(row[0] if row else 0):
        db.execute("UPDATE room SET bytes = bytes + ? WHERE name = ''", (more,))


def _last_budget(rows: Sequence[tuple[str, Any]]) -> LastBudget | None:
    facts = dict(rows)
    if "budget" not in facts:
        return None
    return LastBudget(facts["budget"], bool(facts["given"]), float(facts["opened"]))


def _quarantined(name: str) -> bytes | None:
    """Return the block of a file in quarantine, None for a foreign one."""
    with suppress(ValueError, IndexError):
        block = bytes.fromhex(name.split(".")[1])
        return block if len(block) == BLOCK_ID_BYTES else None
    return None


def _is_locked(path: str) -> bool | None:
    """Whether a living writer has the draft at ``path`` open; None for a foreign file."""
    try:
        fd = open_plain(path, os.O_RDWR)
    except OSError as error:
        if error.errno not in CANNOT_WRITE | WRONG_KIND | {errno.ENOENT}:
            raise
        return None
    with closing_fd(fd):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@cache
def _boot() -> bytes:
    """Return what names this boot of the machine; b"" if the system does not tell."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return file.read().strip()
    return b""


_all: WeakSet[DiskIndex] = WeakSet()
_inherited: list[object] = []  # connections of a parent process, which a child must not close


def _before_fork() -> None:
    """Wait until no thread is within SQLite: the child would inherit SQLite's own locks."""
    _forking.acquire()
    _forking_holds[:] = [index for index in list(_all) if index._lock.acquire(timeout=1.0)]


def _after_fork() -> None:
    for index in _forking_holds:
        index._lock.release()
    _forking_holds.clear()
    _forking.release()


_forking = threading.Lock()
_forking_holds: list[DiskIndex] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )
