"""`TierRoom`: room in one tier: quotas, evictions and deletions."""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

from kvkeep.core.keys import SPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.store.tiers.calls import BackendCalls
    from kvkeep.store.tiers.index import Index
    from kvkeep.store.tiers.loss_log import LossLog
    from kvkeep.store.tiers.prompt_writes import TierWrites
    from kvkeep.store.tiers.states import BlockStates, Deletion
    from kvkeep.store.tiers.workers import Workers

__all__ = ["TierRoom"]

_TRIES = 20  # attempts to make room in a quota, in competition with other writers
_DELETED_AT_ONCE = 1000  # blocks; more could take longer than the backend's timeout
_PARTS = 64  # of a budget: one is kept free, and evicted at once …
_RECORDS_AHEAD = 4  # … if it has room for so many records


class TierRoom:
    """Makes room in a tier with a budget, and deletes its blocks.

    Of a large budget a part is kept free, in batches and by a writer thread, so that writes need
    not wait for room. Blocks that have to make room are passed to ``evicting`` first, which may
    copy them. ``relist`` lists the backend if that may tell more; it returns whether it did.

    Thread safety: all methods.

    Attributes:
        making: a lock; its holder alone takes what is freed.
    """

    def __init__(
        self,
        calls: BackendCalls,
        catalogue: Index,
        states: BlockStates,
        losses: LossLog,
        writing: Workers,
        *,
        evicting: Callable[[Deletion], None],
        relist: Callable[[], bool],
    ) -> None:
        self.making = threading.Lock()
        self._calls = calls
        self._backend = calls.backend
        self._catalogue = catalogue
        self._states = states
        self._losses = losses
        self._writing = writing
        self._evicting = evicting
        self._relist = relist
        self._trimming = False

    def reserve(self, block: bytes, size: int, prompt: TierWrites | None) -> bool:
        """Reserve ``size`` bytes in the quota of the block's namespace (`Index.reserve`).

        Evicts blocks of the namespace if needed. Returns whether they fit. Nothing fits while
        blocks of the namespace are left whose deletion failed: they are not counted any more.
        """
        space, catalogue = block[:SPACE_BYTES], self._catalogue
        limit = catalogue.quota(space)
        if (limit is not None and size > limit) or not self._none_left(space):
            return False
        while True:
            over = size
            for _ in range(_TRIES):
                over = catalogue.reserve(space, size)
                if not over:
                    # Blocks that are being deleted are not counted any more, but still there.
                    fits = False
                    try:
                        gone = self._states.wait_deleted(space, self._backend.timeout)
                        fits = gone and self._none_left(space)
                    finally:
                        if not fits:
                            catalogue.unreserve(space, size)
                    return fits
                victims = None if over < 0 else self._states.victims(over, space)
                if not victims:  # also if all that is being written together exceeds the quota
                    break
                if not self.evict(victims)[1]:
                    return False
            if prompt is None or not prompt.make_room(block, over if over > 0 else size):
                return False

    def _none_left(self, space: bytes) -> bool:
        """Delete blocks of a namespace whose deletion failed before; return whether all went."""
        if self._states.undeleted(space):
            self._delete_left(sys.maxsize, space)
        return not self._states.undeleted(space)

    def make(self, needed: int) -> bool:
        """Evict until ``needed`` bytes are free; return whether any were freed.

        Repeats deletions that failed before, then evicts. Evicts nothing if all evictable blocks
        together do not suffice. Stops once a deletion fails: further records would be forgotten and
        still occupy the backend.
        """
        if self._backend.capacity is None:
            return False
        freed = self._delete_left(needed)
        while freed < needed and not self._calls.any_blocks("delete"):
            lacking = needed - freed
            victims = self._states.victims(lacking) if self._catalogue.may_free(lacking) else None
            if not victims:
                if self._relist():
                    continue  # others' blocks may be evicted, too
                break
            bytes_freed, complete = self.evict(victims)
            # Records take whole units; the backend counts freed bytes without the padding.
            freed += bytes_freed + (self._backend.unit - 1) * len(victims) if bytes_freed else 0
            if not complete:
                break
        return freed > 0

    def _delete_left(self, needed: int, space: bytes = b"") -> int:
        """Delete blocks whose deletion failed before, until ``needed`` bytes are free.

        Of one namespace, or all.
        """
        freed = 0
        while freed < needed and not self._calls.any_blocks("delete"):
            left = self._states.left(_DELETED_AT_ONCE, space)
            if not left:
                break
            got, complete = self.delete(left)
            freed += got
            if not complete:
                break
        return freed

    def evict(self, victims: Deletion) -> tuple[int, bool]:
        """Delete ``victims`` and record why; see `delete`."""
        blocks = victims.blocks
        self._losses.note(blocks, self._calls.name, "evicted", self._catalogue.policy)
        self._calls.counters.count(evictions=len(blocks))
        try:
            self._evicting(victims)
        finally:
            freed, complete = self.delete(victims)
        return freed, complete

    def give_up(self, blocks: Sequence[bytes], needed: int) -> list[bytes]:
        """Evict the first of ``blocks`` that together free ``needed`` bytes; return them.

        The caller has held each once. Blocks that others hold, or that are pinned, are skipped.
        """
        if self._calls.any_blocks("delete"):
            return []
        victims = self._states.victims(needed, of=blocks)
        gone = victims.blocks
        if gone:
            self.evict(victims)
        return gone

    def delete(
        self, deletion: Deletion, proceed: Callable[[], bool] = lambda: True
    ) -> tuple[int, bool]:
        """Delete the blocks of ``deletion`` and end it; return the bytes freed, whether all went.

        ``proceed`` is called before each 1,000 blocks; False ends the deletion.
        """
        freed = 0
        with deletion:
            deletion.failed = dict.fromkeys(deletion.blocks)
            for part, here in self._calls.by_part(deletion.blocks).items():
                for at in range(0, len(here), _DELETED_AT_ONCE):
                    piece = here[at : at + _DELETED_AT_ONCE]
                    if not (proceed() and self._calls.allowed("delete", part)):
                        continue
                    with self._calls.to("delete", "delete", part) as call:
                        freed += self._backend.delete(piece)
                    if not call.failed:
                        for block in piece:
                            del deletion.failed[block]
        return freed, not deletion.failed

    def trim_ahead(self, size: int) -> None:
        """`trim` if less than half of what is kept free for writes of ``size`` is free."""
        capacity = self._backend.capacity
        if capacity is None or self._trimming:
            return
        ahead = capacity // _PARTS
        if ahead >= _RECORDS_AHEAD * size and self._catalogue.total_bytes > capacity - ahead // 2:
            self.trim(ahead)

    def trim(self, ahead: int) -> None:
        """Evict down to the budget less ``ahead`` in a writer, in parts behind writes that wait.

        The bytes are counted anew for each part, so that processes that have a place together evict
        together what one of them would.
        """
        self._trimming = True
        if not self._writing.submit(partial(self._trim, ahead), 0):
            self._trimming = False

    def _trim(self, ahead: int) -> None:
        capacity = self._backend.capacity or 0
        again = False
        try:
            used: int | None = None
            with self._calls.to("used"):
                used = self._backend.used()
            over = (self._catalogue.total_bytes if used is None else used) + ahead - capacity
            again = over > 0 and self.make(min(over, max(1, capacity // _PARTS)))
        finally:
            if again:
                self.trim(ahead)
            else:
                self._trimming = False
