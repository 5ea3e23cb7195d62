"""`Listing`: keeps a tier's catalogue in step with what its backend holds."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from kvkeep.store.tiers.notes import difference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvkeep.store.backends import Listed
    from kvkeep.store.tiers.calls import BackendCalls
    from kvkeep.store.tiers.known import KnownBlocks
    from kvkeep.store.tiers.loss_log import LossLog
    from kvkeep.store.tiers.space import TierSpace
    from kvkeep.store.tiers.workers import Workers

__all__ = ["Listing"]

_LOG = logging.getLogger("kvkeep.tiers")
_NOTED_KEPT = 4096
_PARTS = 64  # of a budget: what is evicted at once where it was reduced


class _ListFailed(Exception):
    """The backend failed to list its records; counted and logged already."""


class Listing:
    """Lists a backend into the catalogue, and compares the namespaces found with the store's own.

    ``notes`` describe the store's namespaces, by space (`kvkeep.store.tiers.notes`).

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
