"""`TierSpace`: makes room in a tier within its budget and quotas, and deletes blocks."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvkeep.core.errors import OutOfRoom
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.tiers.reserving import AGAIN, Again, Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvkeep.store.backends.budget import WriteBucket
    from kvkeep.store.tiers.calls import BackendCalls
    from kvkeep.store.tiers.known import KnownBlocks
    from kvkeep.store.tiers.loss_log import LossLog

__all__ = ["TierSpace"]

_TRIES = 8  # attempts to make room for one record, in competition with other writers
_DELETED_AT_ONCE = 1000  # blocks; more could take longer than the backend's timeout
_BUDGET = "write budget"
_RELIST_AFTER = 1.0  # seconds that a listing of a shared backend is good for


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
