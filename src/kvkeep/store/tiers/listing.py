"""`Listing`: keeps a tier's catalogue in step with what its backend holds."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING

from kvkeep.core.errors import OutOfRoom
from kvkeep.core.keys import SPACE_BYTES, Namespace
from kvkeep.store.tiers.reserving import AGAIN, Again, Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kvkeep.store.backends import Listed
    from kvkeep.store.backends.budget import WriteBucket
    from kvkeep.store.tiers.calls import BackendCalls
    from kvkeep.store.tiers.known import KnownBlocks
    from kvkeep.store.tiers.loss_log import LossLog
    from kvkeep.store.tiers.workers import Workers

__all__ = ["NOTE_BYTES", "Listing", "TierSpace", "difference", "note_of"]

_LOG = logging.getLogger("kvkeep.tiers")
_NOTED_KEPT = 4096
_PARTS = 64  # of a budget: what is evicted at once where it was reduced
NOTE_BYTES = 4096
"""Maximum bytes of a note; longer ones are ignored."""

_FORMAT = "kvkeep namespace 1"
_LONGEST = 160  # characters; of a longer field the note has a digest
_SHOWN = 60
_TENANTS = frozenset(("tenant", "scope"))  # separate what is shared; both change without a fault
_NAMES = tuple(sorted(field.name for field in fields(Namespace)))
_TRIES = 8  # attempts to make room for one record, in competition with other writers
_DELETED_AT_ONCE = 1000  # blocks; more could take longer than the backend's timeout
_BUDGET = "write budget"
_RELIST_AFTER = 1.0  # seconds that a listing of a shared backend is good for


class _ListFailed(Exception):
    """The backend failed to list its records; counted and logged already."""


class Listing:
    """Lists a backend into the catalogue, and compares the namespaces found with the store's own.

    ``notes`` describe the store's namespaces, by space (`note_of`).

    Thread safety: all methods. One listing runs at a time.

    Attributes:
        at: when the backend was listed last, in seconds of the monotonic clock.
        seconds: how long that took.
        complete: the backend has been listed once.
    """

    def __init__(
        self,
        calls: BackendCalls,
        known: KnownBlocks,
        losses: LossLog,
        notes: Mapping[bytes, bytes] | None,
    ) -> None:
        self.at = 0.0
        self.seconds = 0.0
        self.complete = False
        self._calls = calls
        self._backend = calls.backend
        self._known = known
        self._losses = losses
        self._notes = {} if notes is None else notes  # filled later: an empty one is kept
        self._running = threading.Lock()
        self._comparing = threading.Lock()
        self._noted: set[bytes] = set()
        self._expected: bytes | None = None  # the namespace that `compare` looks for
        self._excess = 0

    def relist(self, space: TierSpace) -> None:
        """List the backend; others may have written or deleted there.

        Records larger than the budget are deleted through ``space``: they were written under a
        larger budget, and even evicting everything else would not make room for them.
        """
        timeout = self._backend.timeout
        if not self._running.acquire(timeout=timeout):
            return  # a listing hangs; do not block the caller any longer
        try:
            if self._calls.breaker("list").allows():
                self._fill(space)
            self.at = time.monotonic()
        finally:
            self._running.release()
        if self.complete:
            self.compare()

    def _fill(self, space: TierSpace) -> None:
        started = time.monotonic()
        catalogue = self._known.catalogue
        try:
            gone = catalogue.fill(self._records(space))
        except _ListFailed:
            pass  # `fill` took over the blocks listed before the failure, and forgot none
        else:
            self._losses.note(gone, self._calls.name, "removed", "gone")
            self.complete = True
            self._excess = self._over()
        self.seconds = time.monotonic() - started

    def _listed(self) -> Iterator[Listed]:
        # An exception of this generator's consumer never reaches the `with` statement.
        with self._calls.to("list", "list") as call:
            for item in self._backend.list():
                call.due = time.monotonic() + self._backend.timeout  # it makes progress
                yield item
        if call.failed:
            raise _ListFailed

    def _records(self, space: TierSpace) -> Iterator[Listed]:
        """Yield the listed records that may stay."""
        budget = self._backend.capacity or 0
        for one in self._listed():
            if one.size > budget:
                space.evict([one.block])
            else:
                yield one

    def _over(self) -> int:
        """Return the bytes above the budget, by the backend's count of all processes if any."""
        used: int | None = None
        with self._calls.to("used"):
            used = self._backend.used()
        taken = self._known.catalogue.total_bytes if used is None else used
        return taken - (self._backend.capacity or 0)

    def trim(self, space: TierSpace, writing: Workers) -> None:
        """Evict down to the budget in parts, each behind the writes that wait then.

        The bytes are counted anew for each part, so that processes that open a place together
        evict together what one of them would.
        """

        def evict() -> None:
            over = self._over()
            part = max(1, (self._backend.capacity or 0) // _PARTS)
            if over > 0 and space.make_room(min(over, part)):
                writing.submit(evict, 0)

        if self._excess > 0:
            writing.submit(evict, 0)

    def blocks(self, space: bytes, proceed: Callable[[], bool]) -> tuple[set[bytes], bool]:
        """Return the ids of a namespace in the backend, and whether those are all.

        ``proceed`` is called for each record that is listed; False ends the listing.
        """
        found: set[bytes] = set()
        self._calls.report_hung("list")
        if not self._calls.allowed("list"):
            return found, False
        try:
            for item in self._listed():
                if item.block.startswith(space):
                    found.add(item.block)
                if not proceed():
                    return found, False
        except _ListFailed:
            return found, False
        return found, True

    def recheck(self, blocks: Sequence[bytes]) -> None:
        """Forget blocks that other processes deleted; otherwise they are never written again."""
        for part, found in self._calls.by_part(blocks).items():
            if not self._calls.breaker("lookup", part).allows():
                continue
            sizes: list[int | None] = []
            with self._calls.to("sizes", "lookup", part):
                sizes = self._backend.sizes(found)
            for block, size in zip(found, sizes, strict=False):  # empty if the call failed
                if size is None and self._known.catalogue.forget(block):
                    self._losses.note([block], self._calls.name, "removed", "gone")

    # --- namespaces ------------------------------------------------------------------------------

    def expect(self, space: bytes) -> None:
        """Make `compare` log, once, if the backend holds blocks but none of this namespace."""
        self._expected = space

    def compare(self) -> None:
        """If the expected namespace is missing, log how the most similar stored one differs.

        A changed model revision or dtype makes another namespace, in which no block is found.
        """
        with self._comparing:
            space, self._expected = self._expected, None
        ours = None if space is None else self._notes.get(space)
        if space is None or ours is None:
            return
        there = self._known.catalogue.spaces() if self._known.indexed else None
        if there is not None and (not there or space in there):
            return
        notes: dict[bytes, bytes] = {}
        with self._calls.to("noted_spaces"):
            notes = self._backend.noted_spaces()
        if space in notes and there is None:
            return
        others = [note for one, note in notes.items() if there is None or one in there]
        found = difference(ours, others)
        if found is not None:
            unlike, unexpected = found
            _LOG.log(
                logging.WARNING if unexpected else logging.INFO,
                "tier %s: %s holds blocks, but none of this store; in the most similar ones, %s",
                self._calls.name, self._backend.describe(), ", ".join(unlike),
            )  # fmt: skip

    def note(self, space: bytes) -> None:
        """Write the note of namespace ``space`` to the backend once; a block of it was written."""
        if space in self._noted:
            return
        if len(self._noted) >= _NOTED_KEPT:
            self._noted.clear()
        self._noted.add(space)
        note = self._notes.get(space)
        if note is not None:
            with self._calls.to("note_space"):
                self._backend.note_space(space, note)


def note_of(namespace: Namespace) -> bytes:
    """Return the note of ``namespace``: one line of JSON in ASCII."""
    told = {name: _told(name, value) for name in _NAMES if (value := getattr(namespace, name))}
    return json.dumps({"format": _FORMAT, "fields": told}).encode()


def difference(ours: bytes, others: Iterable[bytes]) -> tuple[list[str], bool] | None:
    """Compare ``ours`` with the note in ``others`` that differs in the fewest fields.

    Return a text for each of these fields, as ``model is 'a' there and 'b' here``, and whether that
    is unexpected: both are of one model, and not only of different tenants. None if no readable
    note differs.
    """
    mine = _read(ours)
    assert mine is not None, "our own note"
    nearest: list[str] | None = None
    unexpected = False
    for other in others:
        theirs = _read(other)
        if theirs is None:
            continue
        unlike = [name for name in _NAMES if mine.get(name) != theirs.get(name)]
        if unlike and (nearest is None or len(unlike) < len(nearest)):
            nearest = [_sentence(name, theirs.get(name), mine.get(name)) for name in unlike]
            unexpected = "model" not in unlike and not _TENANTS.issuperset(unlike)
    return None if nearest is None else (nearest, unexpected)


def _told(name: str, value: str) -> str:
    if name == "tenant" or len(value) > _LONGEST:
        return f"sha256:{hashlib.sha256(value.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
    return value


def _read(note: bytes) -> dict[str, str] | None:
    """Return the fields of a note; None if it is not a valid note."""
    if len(note) > NOTE_BYTES:
        return None
    try:
        read = json.loads(note)
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict) or read.get("format") != _FORMAT:
        return None
    told = read.get("fields")
    if not isinstance(told, dict) or not all(isinstance(value, str) for value in told.values()):
        return None
    return {name: told[name] for name in _NAMES if name in told}


def _sentence(name: str, theirs: str | None, mine: str | None) -> str:
    if name == "tenant":
        return "tenant is different"
    return f"{name} is {_shown(theirs)} there and {_shown(mine)} here"


def _shown(value: str | None) -> str:
    """Return ``value`` quoted, escaped and shortened, so that a forged one is safe in a log."""
    return "empty" if value is None else ascii(value[:_SHOWN] + "…" * (len(value) > _SHOWN))


class TierSpace:
    """Manages the space of one tier: evicts, deletes, and keeps namespaces within their quotas.

    ``evicting`` is called with each block before it is evicted. ``take_room(block, needed)``
    forgets and returns later blocks of the prompt of ``block`` (`WriteOrder.take_room`). ``relist``
    lists the backend; ``listed_at`` returns when that was done last (monotonic seconds). ``bucket``
    limits what is written.

    Thread safety: all methods.
    """

    def __init__(
        self,
        calls: BackendCalls,
        known: KnownBlocks,
        losses: LossLog,
        writers: int,
        *,
        evicting: Callable[[bytes], None],
        take_room: Callable[[bytes, int], list[bytes]],
        relist: Callable[[], None],
        listed_at: Callable[[], float],
        bucket: WriteBucket | None = None,
    ) -> None:
        self._calls = calls
        self._backend = calls.backend
        self._known = known
        self._catalogue = known.catalogue
        self._losses = losses
        self._evicting = evicting
        self._take_room = take_room
        self._relist = relist
        self._listed_at = listed_at
        self._bucket = bucket
        self._turns = Turns(_TRIES, writers)
        self._quota_lock = threading.Lock()
        self._coming: dict[bytes, int] = {}  # bytes being written, by namespace

    def put(self, block: bytes, record: memoryview) -> bool:
        """Write ``record``, evicting others for it; return False if there is no room.

        Raises:
            PutFailed: the backend failed, counted and logged already; or the tier's write budget is
                spent.
        """

        short_by = 0
        if self._bucket is not None and not self._bucket.spend(len(record)):
            raise PutFailed(_BUDGET)

        def attempt() -> bool | Again:
            nonlocal short_by
            started = time.monotonic()
            try:
                with self._calls.to("put", "write", self._backend.part(block)) as call:
                    self._backend.put(block, record)
            except OutOfRoom as short:
                short_by = short.needed
                return AGAIN if self.make_room(short.needed) else False
            if call.failed:
                raise PutFailed
            took = time.monotonic() - started
            counters = self._calls.counters
            counters.count(writes=1, written_bytes=len(record), write_seconds=took)
            return True

        while not self._turns.take(attempt):
            if not self._evict_later(block, short_by):
                return False
        return True

    @contextmanager
    def within_quota(self, block: bytes, size: int) -> Iterator[bool]:
        """Reserve ``size`` bytes in the quota of the block's namespace; yield whether they fit.

        Evicts blocks of the namespace if needed. Reservations of concurrent writes count; this one
        lasts until the ``with`` statement ends.

        Raises:
            PutFailed: the write budget is known to be spent.
        """
        space, bucket = block[:SPACE_BYTES], self._bucket
        if bucket is not None and bucket.left() < size:  # before anything is evicted for it
            raise PutFailed(_BUDGET)
        fits = self._reserve(block, size)
        try:
            yield fits
        finally:
            if fits:
                with self._quota_lock:
                    left = self._coming.pop(space) - size
                    if left:
                        self._coming[space] = left

    def _reserve(self, block: bytes, size: int) -> bool:
        space = block[:SPACE_BYTES]
        if self._catalogue.over_quota(space, size) < 0:
            return False
        over = size
        while True:
            for _ in range(_TRIES):
                with self._quota_lock:
                    coming = self._coming.get(space, 0) + size
                    over = self._catalogue.over_quota(space, coming)
                    if not over:
                        self._coming[space] = coming
                        return True
                victims = [] if over < 0 else self._known.take_victims(over, space)
                if not victims:  # also if all that is being written together exceeds the quota
                    break
                self.evict(victims)
            if not self._evict_later(block, over if over > 0 else size):
                return False

    def _evict_later(self, block: bytes, needed: int) -> bool:
        """Evict later blocks of the prompt of ``block`` for it; return whether any were freed."""
        if self._calls.breakers.any_blocks("delete"):
            return False
        later = self._take_room(block, needed)
        return bool(later) and self.evict(later)[0] > 0

    def make_room(self, needed: int) -> bool:
        """Evict until ``needed`` bytes are free; return whether any were freed.

        Repeats deletions that failed before, then evicts. Evicts nothing if all evictable blocks
        together do not suffice. Stops once a deletion fails: further records would be forgotten and
        still occupy the backend.
        """
        if not self._known.indexed:
            return False
        freed, unit = self._delete_undeleted(needed), self._backend.unit
        if not self._catalogue.may_free(needed - freed):
            if not self._listing_is_old():
                return freed > 0
            self._relist()
            if not self._catalogue.may_free(needed - freed):
                return freed > 0
        while freed < needed and not self._calls.breakers.any_blocks("delete"):
            victims = self._known.take_victims(needed - freed)
            if not victims and self._listing_is_old():
                self._relist()  # other processes' blocks may be evicted, too
                victims = self._known.take_victims(needed - freed)
            if not victims:
                break
            got, left = self.evict(victims)
            # Records take whole units; the backend counts freed bytes without the padding.
            freed += got + (unit - 1) * len(victims) if got else 0
            if left:
                break
        return freed > 0

    def _delete_undeleted(self, needed: int) -> int:
        """Delete blocks whose deletion failed before, until ``needed`` bytes are free."""
        freed = 0
        while freed < needed and not self._calls.breakers.any_blocks("delete"):
            blocks = self._known.take_undeleted(_DELETED_AT_ONCE)
            if not blocks:
                break
            with self._known.deletion(blocks):
                got, left = self.delete(blocks)
            freed += got
            if left:
                break
        return freed

    def _listing_is_old(self) -> bool:
        return self._backend.shared and time.monotonic() - self._listed_at() > _RELIST_AFTER

    def evict(self, victims: Sequence[bytes]) -> tuple[int, list[bytes]]:
        """Delete ``victims``, which are forgotten already, and record why; see `delete`."""
        with self._known.deletion(victims):
            self._losses.note(victims, self._calls.name, "evicted", self._catalogue.policy)
            self._calls.counters.count(evictions=len(victims))
            try:
                for block in victims:
                    self._evicting(block)
            finally:
                freed, left = self.delete(victims)
            return freed, left

    def delete(
        self, blocks: Sequence[bytes], proceed: Callable[[], bool] = lambda: True
    ) -> tuple[int, list[bytes]]:
        """Delete ``blocks``; return the bytes freed, and the blocks that may be left.

        Deleting the latter is tried again when room is needed. ``proceed`` is called before each
        1,000 blocks; False ends the deletion.
        """
        freed, left = 0, dict.fromkeys(blocks)
        try:
            for part, found in self._calls.by_part(blocks).items():
                for at in range(0, len(found), _DELETED_AT_ONCE):
                    piece = found[at : at + _DELETED_AT_ONCE]
                    if not (proceed() and self._calls.allowed("delete", part)):
                        continue
                    with self._calls.to("delete", "delete", part) as call:
                        freed += self._backend.delete(piece)
                    if not call.failed:
                        for block in piece:
                            left.pop(block, None)
        finally:
            self._known.keep_undeleted(left)
        return freed, list(left)

    def remove(
        self,
        blocks: Sequence[bytes],
        proceed: Callable[[], bool] = lambda: True,
        *,
        cleared: int | None = None,
    ) -> tuple[int, list[bytes]]:
        """Delete ``blocks`` by request; return the bytes freed, and the blocks that may be left.

        The latter are hidden until they are written anew. For ``cleared`` see
        `KnownBlocks.removal`; for ``proceed``, `delete`.
        """
        with self._known.removal(blocks, cleared) as old:
            self._calls.report_hung("delete")
            freed, left = self.delete(old, proceed)
            self._known.hide(left)
        return freed, left


class PutFailed(Exception):
    """A record was not written; ``why`` says whether the write failed, or there is no budget."""

    def __init__(self, why: str = "write failed") -> None:
        self.why = why
        super().__init__(why)
