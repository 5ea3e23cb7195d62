"""The index of a directory: a SQLite file that all processes share.

    records   block → size in bytes, time of the last use in nanoseconds
    room      name → bytes: ``""`` the sum of ``records``, ``quarantine``, and each writer's bytes
    facts     the last budget, the boot in which the directory was swept; space → note

The files are the truth, and `DiskIndex._settle` is the only way in which rows follow them: it makes
the rows of some blocks what their files are. Whoever changes files notes their blocks as stale, and
each transaction settles these first. Before it writes, a writer reserves bytes in its row of
``room``; they stay there until its records are settled. So the files never exceed the sum of
``room``, whatever is killed, and no record is changed within a transaction.

A writer holds the lock of a file in ``tmp/`` while its row has bytes. A row without one is of a
killed process: a sweep compares all names with all rows, and then deletes it.

SQLite never syncs here: after a loss of power, another boot, the index is checked and each file
compared with its row; so is an index that is a copy. One that is damaged or lost is made anew. It
has a rollback journal, not a log (WAL): that maps a file into memory, and a process that reads it
dies if that file is cut short.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import sqlite3
import stat
import threading
import time
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from urllib.parse import quote
from weakref import WeakSet

from kvkeep.core.errors import BackendFailed, OutOfRoom
from kvkeep.core.keys import BLOCK_ID_BYTES, SPACE_BYTES
from kvkeep.store.backends.base import ALIGNMENT, Listed
from kvkeep.store.backends.disk.files import (
    CANNOT_WRITE,
    WRONG_KIND,
    closing_fd,
    lstat,
    open_known,
    padded,
    regular_files,
    size_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvkeep.store.backends.disk.directory import RecordDirectory

__all__ = ["DiskIndex", "LastBudget"]

T = TypeVar("T")
_LOG = logging.getLogger("kvkeep.tiers")
_VERSION: Final = 1
_SCHEMA: Final = (
    "CREATE TABLE records(block BLOB PRIMARY KEY, size INTEGER NOT NULL, used INTEGER NOT NULL) "
    "WITHOUT ROWID",
    "CREATE TABLE room(name TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE facts(name PRIMARY KEY, value)",
    "INSERT INTO room VALUES ('', 0), ('quarantine', 0)",
    f"PRAGMA user_version = {_VERSION}",
)
_RECOUNT: Final = (
    "UPDATE room SET bytes = (SELECT COALESCE(SUM((size + ?) / ? * ?), 0) FROM records) "
    "WHERE name = ''"
)
_NEXT: Final = "SELECT block, size, used FROM records WHERE block > ? ORDER BY block LIMIT 1"
_RANGE: Final = "SELECT block, size, used FROM records WHERE block > ? AND block <= ?"
_BUSY: Final = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_DAMAGED: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
_ERRNOS: Final = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
}
_CACHE_KIB: Final = 16 << 10
_TRIES: Final = 5  # of a transaction whose index is damaged
_FIRST_PAUSE: Final = 0.0001  # seconds between attempts to begin a transaction
_LAST_PAUSE: Final = 0.005
_AHEAD: Final = 256 << 10  # bytes that a writer reserves beyond its record, at least
_RECORDS_AHEAD: Final = 4  # or so many of the same size
_PART_AHEAD: Final = 64  # but no more than this part of what is free
_STALE: Final = 32  # blocks from which a put settles them
_SUSPECTS: Final = 1024  # stale blocks, from which a miss is not noted
_BATCH: Final = 256  # blocks that a sweep settles at once
_PAGE: Final = 4096  # names that it compares at once
_BEHIND: Final = b"\xff" * (BLOCK_ID_BYTES - SPACE_BYTES)  # no key is larger
_NOTES: Final = 64 << 10  # bytes of all notes
_QUARANTINED: Final = 16  # files in quarantine, and the part of the capacity, at most


class LastBudget(NamedTuple):
    """A budget in bytes, whether it was given as ``size=``, and when it was last used."""

    bytes: int
    given: bool
    opened: float


class DiskIndex:
    """The index of ``directory``, for one `DiskBackend`; opened with the first use.

    All methods wait up to ``timeout`` seconds for other threads and processes.

    Raises:
        BackendFailed: another process was within a transaction for so long.
        OSError: the index cannot be read or written.

    Thread safety: all methods. A forked child starts with an index of its own.
    """

    def __init__(self, directory: RecordDirectory) -> None:
        self._directory = directory
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self.lock = threading.Lock()  # everything below; held over a transaction
        self._sweeping = threading.Lock()  # a sweep that a put waits for; before the other one
        self._db: sqlite3.Connection | None = None
        self._path = ""  # of the open index
        self._status: os.stat_result | None = None  # of its file
        self._timeout = 0.0
        self._swept = False  # whether the open index was, since the machine started
        self._token, self._serial = "", 0  # the name of this writer; drafts so far
        self._alive: int | None = None  # the locked file that shows that this writer lives
        self._free = 0  # bytes of this writer's row that no record needs yet
        self._writing = 0  # of records being written
        self._stale: dict[bytes, int | None] = {}  # block → time of a new use

    # -- records -----------------------------------------------------------------------------------

    def reserve(self, size: int, capacity: int | None, timeout: float) -> str:
        """Count ``size`` bytes as used; return the path of a file in ``tmp/`` for them.

        The caller calls `finish` once, whatever happens.

        Raises:
            OutOfRoom: they would exceed ``capacity``.
        """
        need, short, until = padded(size), 0, time.monotonic() + timeout
        while True:
            with self._held(timeout):
                if self._free < need or len(self._stale) >= _STALE:
                    short = self._transact(lambda db: self._grow(db, need, capacity))
                if self._free >= need:
                    self._free -= need
                    self._writing += need
                    self._serial += 1
                    return f"{self._directory.tmp}/{self._token}.{self._serial:x}"
            if not self._sweep_if_due(timeout) or time.monotonic() > until:
                raise OutOfRoom(short, self._directory.url)

    def _grow(self, db: sqlite3.Connection, need: int, capacity: int | None) -> int:
        """Reserve ``need`` bytes, and some ahead; return by how many they exceed ``capacity``."""
        ahead = max(_AHEAD, _RECORDS_AHEAD * need)
        if capacity is not None:
            free = capacity - _used(db) - need
            if free < 0 or not self._swept:
                return max(-free, 1)
            ahead = min(ahead, free // _PART_AHEAD)
            ahead *= ahead >= _AHEAD
        self._register()
        self._set_room(db, self._writing + need + ahead)
        self._free = need + ahead
        return 0

    def finish(self, block: bytes, size: int, used: int | None) -> None:
        """Let the record of ``block`` be settled instead of ``size`` reserved bytes.

        ``used``: the time of its use in nanoseconds, None if it may not have been written.
        """
        with self.lock:
            self._stale[block] = used
            self._writing -= padded(size)

    def suspect(self, block: bytes) -> None:
        """Note that the file of ``block`` is missing: its row goes with the next transaction."""
        if len(self._stale) < _SUSPECTS:
            self._stale.setdefault(block, None)

    def settle(self, blocks: Iterable[bytes], timeout: float) -> None:
        """Make the rows of ``blocks`` what their files are; if this fails, a later call does.

        On a full disk that is no failure: too many bytes count as used until there is room.
        """
        self._stale.update(dict.fromkeys(blocks))
        try:
            self.change(lambda db: None, timeout)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise

    def touch(self, blocks: Sequence[bytes], used: Sequence[int], timeout: float) -> None:
        """Set the times of the last use, in nanoseconds; later ones stay."""
        query = "UPDATE records SET used = max(used, ?) WHERE block = ?"
        rows = list(zip(used, blocks, strict=True))

        def work(db: sqlite3.Connection) -> None:
            if not self._swept:
                self._settle(db, dict.fromkeys(blocks))
            db.executemany(query, rows)

        self.change(work, timeout)

    def trim_quarantine(self, block: bytes, capacity: int | None, timeout: float) -> None:
        """Settle ``block``, which is in quarantine now, and delete the oldest files there."""
        kept, most = 0, float("inf") if capacity is None else capacity // _QUARANTINED
        newest = sorted(regular_files(self._directory.quarantine), reverse=True)
        for number, (path, size) in enumerate(newest):
            kept += padded(size)
            if number >= _QUARANTINED or kept > most:
                with suppress(FileNotFoundError):
                    os.unlink(path)
        self._stale[block] = None
        self.change(self._count_quarantine, timeout)

    def used(self, timeout: float) -> int:
        """Return the bytes used by all processes."""

        def work(db: sqlite3.Connection) -> int:
            self._rest(db)
            return _used(db)

        self._sweep_if_due(timeout)
        return self.change(work, timeout)

    # -- writers -----------------------------------------------------------------------------------

    def _register(self) -> None:
        """Show that this writer lives; under a new name if the directory was emptied."""
        while self._alive is None or not _is_at(self._alive_path, os.fstat(self._alive)):
            self._let_go()
            self._token = f"{os.getpid()}-{os.urandom(8).hex()}"
            self._alive = self._directory.create(self._alive_path)
            try:
                fcntl.flock(self._alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another process took it for a killed writer's
                self._let_go()

    @property
    def _alive_path(self) -> str:
        return f"{self._directory.tmp}/{self._token}"

    def _let_go(self) -> None:
        if self._alive is not None:
            os.close(self._alive)
            self._alive, self._token = None, ""

    def _rest(self, db: sqlite3.Connection) -> None:
        """Let nothing of this writer be left in the directory, if it writes nothing."""
        if self._alive is not None and not self._writing:
            self._set_room(db, 0)
            with suppress(FileNotFoundError):
                os.unlink(self._alive_path)
            self._let_go()

    def _set_room(self, db: sqlite3.Connection, size: int) -> None:
        if size:
            db.execute("INSERT OR REPLACE INTO room VALUES (?, ?)", (self._token, size))
        else:
            db.execute("DELETE FROM room WHERE name = ?", (self._token,))

    def _dead(self, db: sqlite3.Connection) -> list[str]:
        """Remove the files of killed writers; return the names of writers that are to be swept.

        A living writer that has no row, as the index was lost, gets one for its files; it corrects
        that itself with its next transaction.
        """
        rows = dict(db.execute("SELECT name, bytes FROM room WHERE name NOT IN ('', 'quarantine')"))
        files: dict[str, list[tuple[str, int]]] = {name: [] for name in rows}
        for path, size in regular_files(self._directory.tmp):
            files.setdefault(os.path.basename(path).partition(".")[0], []).append((path, size))
        files.pop(self._token, None)
        dead = []
        for name, there in files.items():
            if not _bury(f"{self._directory.tmp}/{name}"):
                size = sum(padded(size) for _, size in there)
                if size and name not in rows:
                    db.execute("INSERT INTO room VALUES (?, ?)", (name, size))
                continue
            dead.append(name)
            for path, _ in there:
                with suppress(FileNotFoundError):
                    os.unlink(path)
        return dead

    # -- listing -----------------------------------------------------------------------------------

    def _sweep_if_due(self, timeout: float) -> bool:
        """Sweep if the index is new or a writer was killed; one thread does, others wait."""
        if not self._sweeping.acquire(timeout=timeout):
            raise BackendFailed(f"the index of {self._directory.url} is still being made")
        try:
            is_due = self.change(lambda db: bool(self._dead(db)) or not self._swept, timeout)
            if is_due:
                for _ in self.sweep(timeout):
                    pass
        finally:
            self._sweeping.release()
        return is_due

    def sweep(self, timeout: float) -> Iterator[Listed | int]:
        """Yield each record; for each file that is none its size in bytes.

        Reads names and rows; looks at a file only where they differ, after a loss of power, and
        after a kill: that writer may have replaced records.
        Memory: 64 bytes a record of the namespace being listed.
        """

        def begin(db: sqlite3.Connection) -> tuple[bool, list[str], str]:
            self._rest(db)
            return self._swept, self._dead(db), self._made()

        swept, dead, made = self.change(begin, timeout)
        spaces = set(self._directory.spaces())
        for space in sorted(spaces | self._spaces_of_rows(timeout)):
            names, others = self._directory.names(space) if space in spaces else (b"", [])
            yield from others
            for files, rows in self._pages(bytes.fromhex(space), names, timeout):
                differ = files ^ rows.keys()
                if dead or not swept:
                    same = files & rows.keys()
                    differ |= {b for b in same if size_of(self._directory.path(b)) != rows[b][0]}
                for block, (size, used) in rows.items():
                    if block not in differ:
                        yield Listed(block, size, used / 1e9)
                yield from self._settled(sorted(differ), timeout)
            if not names and not others:
                self._directory.remove_space(space)

        def end(db: sqlite3.Connection) -> None:
            if self._made() == made:  # else the index was lost meanwhile
                db.executemany("DELETE FROM room WHERE name = ?", [(name,) for name in dead])
                db.execute(_RECOUNT, (ALIGNMENT - 1, ALIGNMENT, ALIGNMENT))
                self._count_quarantine(db)
                db.execute("INSERT OR REPLACE INTO facts VALUES ('swept', ?)", (made,))
                self._swept = True

        self.change(end, timeout)

    def _spaces_of_rows(self, timeout: float) -> set[str]:
        """Return the names of namespaces that have rows, by one search each."""
        spaces: set[str] = set()
        after = b""
        while rows := self._rows(_NEXT, (after,), timeout):
            space = next(iter(rows))[:SPACE_BYTES]
            spaces.add(space.hex())
            after = space + _BEHIND
        return spaces

    def _pages(
        self, space: bytes, names: bytes, timeout: float
    ) -> Iterator[tuple[set[bytes], dict[bytes, tuple[int, int]]]]:
        """Yield blocks of the sorted ``names``, and the rows up to the last of them, in pages."""
        width, after = BLOCK_ID_BYTES - SPACE_BYTES, space
        for start in range(0, len(names) + 1, width * _PAGE):
            page = names[start : start + width * _PAGE]
            is_last = start + width * _PAGE > len(names)
            last = space + (_BEHIND if is_last else page[-width:])
            rows = self._rows(_RANGE, (after, last), timeout)
            yield {space + page[at : at + width] for at in range(0, len(page), width)}, rows
            after = last

    def _settled(self, blocks: list[bytes], timeout: float) -> Iterator[Listed | int]:
        """Settle ``blocks``; yield their records, and 0 for an odd file."""
        for start in range(0, len(blocks), _BATCH):
            some = dict.fromkeys(blocks[start : start + _BATCH])
            rows = self.change(partial(self._settle, uses=some), timeout)
            for block in some:
                if block in rows:
                    size, used = rows[block]
                    yield Listed(block, size, used / 1e9)
                elif lstat(self._directory.path(block)) is not None:
                    yield 0

    # -- within a transaction ----------------------------------------------------------------------

    def _settle(
        self, db: sqlite3.Connection, uses: dict[bytes, int | None]
    ) -> dict[bytes, tuple[int, int]]:
        """Make the rows of blocks what their files are; return those that are there.

        ``uses``: with each block the time of a new use, or None.
        """
        rows: dict[bytes, tuple[int, int]] = {}
        grown, is_missing = 0, False
        spaces = {block[:SPACE_BYTES] for block in uses}
        spaces -= {space for space in spaces if not self._directory.has_space(space)}
        for block, new_use in uses.items():
            there = lstat(self._directory.path(block)) if block[:SPACE_BYTES] in spaces else None
            size = there.st_size if there is not None and stat.S_ISREG(there.st_mode) else 0
            query = "SELECT size, used FROM records WHERE block = ?"
            row = db.execute(query, (block,)).fetchone()
            grown += padded(size) - padded(row[0] if row else 0)
            if there is not None and size:
                used = new_use or (row[1] if row else there.st_mtime_ns)
                rows[block] = size, used
                if row != (size, used):
                    db.execute("INSERT OR REPLACE INTO records VALUES (?,?,?)", (block, size, used))
            elif row:
                db.execute("DELETE FROM records WHERE block = ?", (block,))
                is_missing = True
        if grown:
            db.execute("UPDATE room SET bytes = bytes + ? WHERE name = ''", (grown,))
        if is_missing:  # its file may be in quarantine, and whoever moved it killed
            self._count_quarantine(db)
        return rows

    def _count_quarantine(self, db: sqlite3.Connection) -> None:
        size = sum(padded(size) for _, size in regular_files(self._directory.quarantine))
        db.execute("UPDATE room SET bytes = ? WHERE name = 'quarantine'", (size,))

    # -- notes and the budget ----------------------------------------------------------------------

    def add_note(self, space: bytes, note: bytes, timeout: float) -> None:
        """Add a note on ``space``, unless it has one or there are too many."""

        def work(db: sqlite3.Connection) -> None:
            query = "SELECT COALESCE(SUM(LENGTH(value)), 0) FROM facts WHERE TYPEOF(name) = 'blob'"
            if db.execute(query).fetchone()[0] + len(note) <= _NOTES:
                db.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (space, note))

        self.change(work, timeout)

    def notes(self, timeout: float) -> dict[bytes, bytes]:
        """Return the notes by space."""
        return self._facts(_notes, timeout)

    def last_budget(self, timeout: float) -> LastBudget | None:
        """Return the budget that the directory was last opened with."""
        return self._facts(_last_budget, timeout)

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
            last = _last_budget(dict(db.execute("SELECT name, value FROM facts")))
            budget = choose(last, _used(db))
            db.execute("INSERT OR REPLACE INTO facts VALUES ('budget', ?)", (json.dumps(budget),))
            return budget

        if sweep:
            self._sweep_if_due(timeout)
        return self.change(work, timeout)

    def _rows(
        self, query: str, values: Sequence[object], timeout: float
    ) -> dict[bytes, tuple[int, int]]:
        """Return size and time of use of blocks."""

        def read(db: sqlite3.Connection) -> dict[bytes, tuple[int, int]]:
            rows = {}
            for block, size, used in db.execute(query, values):
                if not (type(block) is bytes and len(block) == BLOCK_ID_BYTES and size > 0):
                    raise sqlite3.DatabaseError("a row is no record's")
                rows[block] = size, used
            return rows

        with self._held(timeout):
            return self._tried(read)

    def _facts(self, read: Callable[[dict[Any, Any]], T], timeout: float) -> T:
        query = "SELECT name, value FROM facts ORDER BY rowid"
        with self._held(timeout):
            return self._tried(lambda db: read(dict(db.execute(query).fetchall())))

    # -- transactions ------------------------------------------------------------------------------

    def change(self, work: Callable[[sqlite3.Connection], T], timeout: float) -> T:
        """Call ``work`` within a transaction; again if the index was lost or damaged meanwhile."""
        with self._held(timeout):
            return self._transact(work)

    @contextmanager
    def _held(self, timeout: float) -> Iterator[None]:
        if not self.lock.acquire(timeout=timeout):
            raise self._locked(timeout)
        try:
            self._timeout = timeout
            yield
        finally:
            self.lock.release()

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def transaction(db: sqlite3.Connection) -> T:
            db.execute("BEGIN EXCLUSIVE")
            batch: dict[bytes, int | None] = {}
            try:
                self._free = 0
                while self._stale:  # a note of what changes from here on stays
                    block, used = self._stale.popitem()
                    batch[block] = used
                self._settle(db, batch)
                if self._alive is not None:
                    self._set_room(db, self._writing)
                result = work(db)
                db.execute("COMMIT")
                if not self._is_current():
                    raise _Replaced
            except BaseException:
                self._free = 0  # the row may have more, until the next transaction
                for block, used in batch.items():
                    self._stale[block] = self._stale.get(block) or used
                with suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise
            return result

        return self._tried(transaction)

    def _tried(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Call ``work`` with the connection; again while it is locked, lost or damaged."""
        until, pause, tries = time.monotonic() + self._timeout, _FIRST_PAUSE, _TRIES
        while True:
            try:
                return work(self._open())
            except sqlite3.ProgrammingError:
                raise
            except (_Replaced, sqlite3.Error) as error:
                code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
                if code == sqlite3.SQLITE_IOERR_SHORT_READ:  # it is cut short
                    code = sqlite3.SQLITE_CORRUPT
                code &= 0xFF
                if code in _BUSY:
                    if time.monotonic() > until:
                        raise self._locked(self._timeout) from None
                    time.sleep(pause)
                    pause = min(pause * 1.5, _LAST_PAUSE)
                    continue
                is_lost = not self._is_current()
                self._disconnect()
                tries -= not is_lost
                may_retry = tries and time.monotonic() < until
                if not may_retry or not (is_lost or code in _DAMAGED):
                    raise self._failed(error, code) from error
                if not is_lost and self._directory.remove_index(self._path):
                    _LOG.warning("%s is damaged and is made anew: %s", self._path, error)

    def _failed(self, error: Exception, code: int) -> OSError:
        number = _ERRNOS.get(code, errno.EIO)
        if code == sqlite3.SQLITE_IOERR and not os.statvfs(self._directory.root).f_bavail:
            number = errno.ENOSPC
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        return OSError(number, f"{os.strerror(number)}: {error} ({name})", self._path)

    def _locked(self, timeout: float) -> BackendFailed:
        return BackendFailed(
            f"the index of {self._directory.url} was locked for more than {timeout:g} s: "
            "one of the processes that write there is stopped or hangs"
        )

    # -- the connection ----------------------------------------------------------------------------

    def _is_current(self) -> bool:
        """Whether the connection's file has the name of the index."""
        return self._status is not None and _is_at(self._path, self._status)

    def _open(self) -> sqlite3.Connection:
        """Return the connection to the file that has the name now."""
        if self._db is not None and not self._is_current():
            self._disconnect()
        if self._db is None:
            if (index := self._directory.index()) is None:
                self._directory.restore()
                if (index := self._directory.index()) is None:
                    raise _Replaced
            if not os.access(self._directory.root, os.W_OK):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), self._directory.root)
            self._path, self._status = index
            self._free = 0
            uri = f"file:{quote(self._path)}?mode=rw"
            self._db = sqlite3.connect(
                uri, timeout=0, isolation_level=None, check_same_thread=False, uri=True
            )
            try:
                self._prepare(self._db)
            except BaseException:
                self._db.close()
                self._db = None
                raise
        return self._db

    def _prepare(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA journal_mode = PERSIST")
        db.execute("PRAGMA synchronous = OFF")
        db.execute("PRAGMA mmap_size = 0")
        db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        if db.execute("PRAGMA user_version").fetchone() != (_VERSION,):
            db.execute("BEGIN EXCLUSIVE")
            try:
                (version,) = db.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    self._create(db)
                elif version != _VERSION:
                    raise sqlite3.DatabaseError(f"it has version {version}, not {_VERSION}")
                db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise
            self._directory.remove_former()
        swept = db.execute("SELECT value FROM facts WHERE name = 'swept'").fetchone()
        self._swept = swept == (self._made(),)
        if not self._swept and db.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("it was replaced, or not synced when the machine stopped")

    def _create(self, db: sqlite3.Connection) -> None:
        for statement in _SCHEMA:
            db.execute(statement)
        facts = self._directory.former_facts()
        if not self._directory.spaces():
            facts["swept"] = self._made()
        db.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())

    def _made(self) -> str:
        """Return what names this file and this boot; rows of another are not trusted.

        A copy has another inode, and an index made anew another name; that inode may be used again.
        """
        inode = self._status.st_ino if self._status else 0
        return f"{_boot()} {inode} {os.path.basename(self._path)}"

    def _disconnect(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def close(self, timeout: float) -> None:
        """Settle stale blocks, and close the index; the next use opens it again."""
        if self._stale or self._alive is not None:
            with suppress(OSError):
                self.change(self._rest, timeout)
        with self._held(timeout):
            self._disconnect()

    def begin_in_child(self) -> None:
        """Leave everything to the parent process: its connection must not be closed here."""
        _inherited.append(self._db)
        if self._alive is not None:
            os.close(self._alive)
        self._begin()

    def __del__(self) -> None:
        with suppress(Exception):
            if self._alive is not None:
                os.close(self._alive)
            self._disconnect()


class _Replaced(Exception):
    """The index was lost while a transaction changed it."""


def _is_at(path: str, status: os.stat_result) -> bool:
    """Whether the file of ``status`` has the name ``path``."""
    there = lstat(path)
    return there is not None and os.path.samestat(there, status)


def _used(db: sqlite3.Connection) -> int:
    """Return the bytes used."""
    (used,) = db.execute("SELECT SUM(bytes) FROM room").fetchone()
    return int(used)


def _last_budget(facts: dict[Any, Any]) -> LastBudget | None:
    """Return the budget; one that is none was damaged, and with it the index."""
    if "budget" not in facts:
        return None
    try:
        size, given, opened = json.loads(facts["budget"])
        if type(size) is int and size > 0:
            return LastBudget(size, bool(given), float(opened))
    except (TypeError, ValueError):
        pass
    raise sqlite3.DatabaseError("the budget in it is none")


def _notes(facts: dict[Any, Any]) -> dict[bytes, bytes]:
    notes = {name: note for name, note in facts.items() if isinstance(name, bytes)}
    return {name: note for name, note in notes.items() if isinstance(note, bytes)}


def _bury(path: str) -> bool:
    """Remove the locked file of a killed writer; return False if it lives, or is foreign."""
    try:
        fd = open_known(path, os.O_RDWR)[0]
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in CANNOT_WRITE | WRONG_KIND:
            raise
        return False
    with closing_fd(fd):
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        with suppress(FileNotFoundError):
            os.unlink(path)  # locked: so no writer that begins relies on it
    return True


@cache
def _boot() -> str:
    """Return what names this boot of the machine; "" if the system does not tell."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
        return file.read().strip()
    return ""


_all: WeakSet[DiskIndex] = WeakSet()
_fork = threading.Lock()  # one thread forks at a time
_held: list[threading.Lock] = []  # by the forking thread: a child would inherit SQLite's own locks
_inherited: list[object] = []  # connections of a parent process, which a child must not close


def _before_fork() -> None:
    _fork.acquire()
    _held[:] = [index.lock for index in list(_all) if index.lock.acquire(timeout=1.0)]


def _after_fork() -> None:
    for lock in _held:
        lock.release()
    _fork.release()


def _in_child() -> None:
    for index in list(_all):
        index.begin_in_child()
    _fork.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
