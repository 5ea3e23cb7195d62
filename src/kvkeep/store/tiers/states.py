"""`BlockStates`: what a tier does with each block now, and which blocks it must not serve.

A block of which nothing is said here is at rest: the tier's catalogue, or its backend, says
whether it is there. Else it is in one of five states:

    ===========  ================================================  ==============================
    state        meaning                                           the block is found
    ===========  ================================================  ==============================
    QUEUED       a write waits for a writer                        if it was found before
    WRITING      a writer writes it                                if it was found before
    DELETING     it is being deleted, or about to be               no
    UNDELETED    a deletion failed: its record may be left         no
    REFUSED      its record is intact, and not for this tier       no
    ===========  ================================================  ==============================

and moves between them by these steps:

    ===========  =================  ==========================================================
    step         from               to
    ===========  =================  ==========================================================
    queue        at rest            QUEUED
    queue        UNDELETED,REFUSED  QUEUED, over that state: to it the block returns if it fails
    queue        QUEUED, WRITING    the same; the caller is told the end of that write
    queue        DELETING           the same; the write is queued when the deletion has ended
    start        QUEUED             WRITING
    end          QUEUED, WRITING    at rest; UNDELETED if the write may have left a record
    delete       QUEUED             DELETING: the write is called off
    delete       WRITING            DELETING, which begins when the write has ended
    delete       the others         DELETING
    deleted      DELETING           at rest; UNDELETED if it failed
    refuse       at rest            REFUSED
    ===========  =================  ==========================================================
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from enum import Enum, auto
from itertools import islice
from typing import TYPE_CHECKING, Self

from kvkeep.core.keys import SPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from kvkeep.store.tiers.index import Index

__all__ = ["BlockStates", "Operation", "State"]

_RESTING_KEPT = 1 << 16  # blocks that are UNDELETED or REFUSED
_ANEW_KEPT = 1 << 16  # blocks written since their namespace was cleared
_DELETED_KEPT = 1 << 14


class State(Enum):
    """A state of a block in a tier; see the table of the module."""

    QUEUED = auto()
    WRITING = auto()
    DELETING = auto()
    UNDELETED = auto()
    REFUSED = auto()


_UNFOUND = frozenset((State.DELETING, State.UNDELETED, State.REFUSED))


class Operation:
    """What is done with one block, guarded by the lock of its `BlockStates`.

    Attributes:
        state: see the table of the module.
        waiting: of a write, called at its end with the block and whether the tier has it.
        again: of a deletion, begin the write of the block that waits for its end.
        over: the state that a write replaces, if it is not rest.
        cleared: number of the clearance of its namespace that a write began behind; 0: of none.
        before: the write or deletion that ran when a deletion began.
        free: of a deletion, whether it waits for no write, so that writes may wait for it.
        ended: whether it is over, or was called off.
        held: whether a write holds the block in the catalogue.
    """

    __slots__ = (
        "again", "before", "block", "cleared", "ended", "free", "held", "over", "state", "waiting",
    )  # fmt: skip

    def __init__(self, block: bytes, state: State) -> None:
        self.block = block
        self.state = state
        self.waiting: list[Callable[[bytes, bool], object]] = []
        self.again: list[Callable[[bytes], object]] = []
        self.held = False
        self.over: State | None = None
        self.cleared = 0
        self.before: Operation | None = None
        self.free = False
        self.ended = False


class _Cleared:
    """A cleared namespace: none of its blocks is found but those written since (``anew``)."""

    __slots__ = ("anew", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.anew: OrderedDict[bytes, None] = OrderedDict()


class BlockStates:
    """The states of the blocks of one tier, and its namespaces that were cleared.

    Memory has a bound, beyond which more is not found rather than less: of more than 65,536 blocks
    that may be left or are refused, the namespace of the oldest counts as cleared; and of more than
    65,536 blocks written since a namespace was cleared, the oldest are not found.

    Thread safety: all methods, by one lock, under which only the catalogue is called. Callbacks
    run without it. Cost: a dict probe for a block at rest.
    """

    def __init__(self, catalogue: Index) -> None:
        self._catalogue = catalogue
        self._changed = threading.Condition()
        self._busy: dict[bytes, Operation] = {}
        self._resting: OrderedDict[bytes, Operation] = OrderedDict()  # UNDELETED, REFUSED
        self._deferred = 0  # writes that begin at the end of deletions
        self._cleared: dict[bytes, _Cleared] = {}  # by namespace
        self._clears = 0
        self.deletions = 0
        """Deletions that have ended: a mark for `learn`; take it before the query."""
        self._deleted: OrderedDict[bytes, int] = OrderedDict()  # block → number of its last one
        self._deleted_before = 0  # the last deletion of any block that is not in `_deleted`

    def __len__(self) -> int:
        """Blocks that are queued, written or deleted now."""
        return len(self._busy)

    def state(self, block: bytes) -> State | None:
        """Return the state of ``block``; None at rest."""
        operation = self._busy.get(block) or self._resting.get(block)
        return None if operation is None else operation.state

    @property
    def hides_none(self) -> bool:
        """Whether every block of the catalogue is found; no lock, no loop."""
        return not (self._busy or self._resting or self._cleared)

    def hides(self, block: bytes) -> bool:
        """Whether ``block`` is not found, whatever the backend holds."""
        operation = self._busy.get(block) or self._resting.get(block)
        if operation is not None and (operation.state in _UNFOUND or operation.over is not None):
            return True
        return self.hides_space(block)

    def hides_space(self, block: bytes) -> bool:
        """Whether the namespace of ``block`` was cleared, and the block not written since."""
        cleared = self._cleared.get(block[:SPACE_BYTES]) if self._cleared else None
        return cleared is not None and block not in cleared.anew

    def under_way(self, space: bytes = b"") -> list[bytes]:
        """Return the blocks of a namespace, or all, that are queued, written or deleted."""
        with self._changed:
            return [block for block in self._busy if block.startswith(space)]

    def undeleted(self, space: bytes = b"") -> list[bytes]:
        """Return the blocks of a namespace, or all, of which a deletion failed, oldest first."""
        if not self._resting:
            return []
        with self._changed:
            return [
                operation.block
                for operation in self._resting.values()
                if operation.state is State.UNDELETED and operation.block.startswith(space)
            ]

    # --- writes ----------------------------------------------------------------------------------

    def queue(
        self,
        blocks: Iterable[bytes],
        then: Callable[[bytes, bool], object],
        again: Callable[[bytes], object] | None = None,
        *,
        held: bool = False,
    ) -> list[Operation]:
        """Begin writes of ``blocks``; each calls ``then`` at its `end`, which must follow.

        ``then`` gets the block, and whether the tier has it. None begins of a block that is being
        written: ``then`` is called at the end of that write; nor of one that is being deleted:
        ``again`` is called with it when that has ended, or without it ``then``, now, with False.
        ``held``: the caller holds the blocks in the catalogue until their ends.
        """
        begun: list[Operation] = []
        deleting: list[bytes] = []
        with self._changed:
            for block in blocks:
                before = self._busy.get(block)
                if before is None:
                    begun.append(self._queue(block, then))
                elif before.state is not State.DELETING:
                    before.waiting.append(then)
                elif again is not None:
                    before.again.append(again)
                    self._deferred += 1
                else:
                    deleting.append(block)
            if begun and not held:  # no victim while it is written
                for operation in begun:
                    operation.held = True
                self._catalogue.hold_ahead([operation.block for operation in begun])
        for block in deleting:
            then(block, False)
        return begun

    def _queue(self, block: bytes, then: Callable[[bytes, bool], object]) -> Operation:
        operation = self._busy[block] = Operation(block, State.QUEUED)
        operation.waiting.append(then)
        before = self._resting.pop(block, None) if self._resting else None
        cleared = self._cleared.get(block[:SPACE_BYTES]) if self._cleared else None
        if cleared is not None:
            operation.cleared = cleared.number
        if before is not None:
            operation.over = before.state
        elif cleared is not None and block not in cleared.anew:
            operation.over = State.UNDELETED
        return operation

    def queued(self, block: bytes, then: Callable[[bytes, bool], object]) -> bool:
        """Whether ``block`` is queued or written; ``then`` is called at the end of that write."""
        with self._changed:
            operation = self._busy.get(block)
            if operation is None or operation.state is State.DELETING:
                return False
            operation.waiting.append(then)
            return True

    def start(self, operation: Operation) -> bool:
        """Mark a queued write as running; False if it was called off."""
        with self._changed:
            if operation.ended:
                return False
            operation.state = State.WRITING
            return True

    def end(self, operation: Operation, *, saved: bool, maybe: bool = False) -> None:
        """End a write, run or not; ``maybe``: it failed, and may have left a record."""
        block = operation.block
        with self._changed:
            operation.ended = True
            waiting, operation.waiting = operation.waiting, []
            if operation.held:
                self._catalogue.free([block])
            if self._busy.get(block) is operation:
                del self._busy[block]
                if saved:
                    if self._cleared:
                        self._written(operation)
                elif maybe:
                    self._rest(block, State.UNDELETED)
                elif operation.over is not None:
                    self._rest(block, operation.over)
            self._changed.notify_all()
        for then in waiting:
            then(block, saved)

    def _written(self, operation: Operation) -> None:
        """If the block's namespace was cleared before the write began, find the block again."""
        cleared = self._cleared.get(operation.block[:SPACE_BYTES])
        if cleared is not None and cleared.number == operation.cleared:
            cleared.anew[operation.block] = None
            while len(cleared.anew) > _ANEW_KEPT:
                cleared.anew.popitem(last=False)

    # --- deletions -------------------------------------------------------------------------------

    def delete(self, blocks: Iterable[bytes], *, idle: bool = False) -> Deletion:
        """Begin a deletion of ``blocks``, and forget them in the catalogue.

        Queued writes are called off; `Deletion.wait` waits for those that run. ``idle``: leave out
        blocks that are queued, written or deleted already.
        """
        with self._changed:
            return self._delete(blocks, idle=idle)

    def delete_cleared(self, blocks: Iterable[bytes], space: bytes, number: int) -> Deletion:
        """Begin a deletion of those of ``blocks`` that were not written since a clearance.

        ``number`` is the clearance of namespace ``space``; if it was cleared again, it is of none.
        """
        with self._changed:
            cleared = self._cleared.get(space)
            if cleared is None or cleared.number != number:
                return self._delete(())
            anew = cleared.anew
            return self._delete(
                block for block in blocks if block not in anew and not self._is_written(block)
            )

    def _is_written(self, block: bytes) -> bool:
        operation = self._busy.get(block)
        return operation is not None and operation.state is not State.DELETING

    def _delete(self, blocks: Iterable[bytes], *, idle: bool = False) -> Deletion:
        operations: dict[bytes, Operation] = {}
        called_off: list[tuple[Callable[[bytes, bool], object], bytes]] = []
        for block in blocks:
            before = self._busy.get(block)
            if before is not None and idle:
                continue
            operation = Operation(block, State.DELETING)
            operation.free = idle
            if before is not None:
                if before.state is not State.DELETING:
                    called_off += [(then, block) for then in before.waiting]
                    before.waiting = []
                if before.state is State.QUEUED:
                    before.ended = True  # whoever has it queued calls `end`, which frees its hold
                else:
                    operation.before = before
            self._resting.pop(block, None)
            self._busy[block] = operations[block] = operation
            self._catalogue.forget(block)
        return Deletion(self, self._busy, self._changed, operations, called_off)

    def victims(
        self, needed: int, space: bytes | None = None, *, of: Sequence[bytes] | None = None
    ) -> Deletion:
        """Begin the deletion of blocks of ``needed`` bytes in eviction order; see `Index`.

        ``of``: only of these, in this order, which the caller has held once; see `Index.give_up`.
        """
        catalogue = self._catalogue
        with self._changed:
            if of is not None:
                of = [block for block in of if block not in self._busy]  # as they would be kept
                return self._delete(catalogue.give_up(of, needed))
            while True:
                taken = catalogue.victims(needed, space)
                deletion = self._delete(taken, idle=True)
                if deletion or not taken:  # what is deleted already may have been listed again
                    return deletion

    def wait_deleted(self, space: bytes, timeout: float) -> bool:
        """Wait for the deletions in a namespace that run now, but those that wait for writes.

        What they delete is forgotten, and still there. False if they run on after ``timeout`` s.
        """
        with self._changed:
            running = [
                operation
                for operation in self._busy.values()
                if operation.free and operation.block.startswith(space)
            ]
            return self._changed.wait_for(lambda: all(one.ended for one in running), timeout)

    def left(self, limit: int, space: bytes = b"") -> Deletion:
        """Begin anew the deletion of `undeleted` blocks, of ``limit`` at most."""
        with self._changed:
            resting = self._resting.values()
            old = (rest.block for rest in resting if rest.state is State.UNDELETED)
            mine = (block for block in old if block.startswith(space))
            return self._delete(list(islice(mine, limit)), idle=True)

    def end_deletion(self, operations: Iterable[Operation], failed: Container[bytes]) -> None:
        """End deletions; those of ``failed`` may have left their records. See `Deletion`."""
        again: list[tuple[Callable[[bytes], object], bytes]] = []
        with self._changed:
            self.deletions += 1
            for operation in operations:
                block = operation.block
                operation.ended = True
                again += [(begin, block) for begin in operation.again]
                operation.again = []
                self._deleted.pop(block, None)
                self._deleted[block] = self.deletions
                self._catalogue.forget(block)  # a listing may have found it meanwhile
                if self._busy.get(block) is not operation:
                    continue
                before = operation.before
                if before is not None and not before.ended:  # it hangs: nothing is written yet
                    self._busy[block] = before
                    continue
                del self._busy[block]
                if block in failed:
                    self._rest(block, State.UNDELETED)
            while len(self._deleted) > _DELETED_KEPT:
                self._deleted_before = self._deleted.popitem(last=False)[1]
            self._changed.notify_all()
        try:
            for begin, block in again:
                begin(block)
        finally:
            if again:
                with self._changed:
                    self._deferred -= len(again)
                    self._changed.notify_all()

    @property
    def deleting(self) -> bool:
        """Whether a block is being deleted."""
        with self._changed:
            return any(one.state is State.DELETING for one in self._busy.values())

    def begun(self, timeout: float | None) -> bool:
        """Wait until no write waits for a deletion, ``timeout`` seconds at most.

        Returns whether all have begun.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._deferred, timeout)

    def refuse(self, block: bytes) -> None:
        """Mark the record of ``block`` as not for this tier, until it is written anew."""
        with self._changed:
            if block not in self._busy:
                self._resting.pop(block, None)
                self._rest(block, State.REFUSED)

    def _rest(self, block: bytes, state: State) -> None:
        resting = self._resting
        resting[block] = Operation(block, state)
        if len(resting) > _RESTING_KEPT:
            oldest, _ = resting.popitem(last=False)
            space = oldest[:SPACE_BYTES]
            before = self._cleared.get(space)
            self._clear(space)
            if before is not None:
                self._cleared[space].anew = before.anew
                before.anew.pop(oldest, None)

    # --- namespaces ------------------------------------------------------------------------------

    def clear(self, space: bytes) -> int:
        """Find no block of a namespace any more but those written from now on.

        Returns the number of this clearance, for `delete` and `reveal`.
        """
        with self._changed:
            return self._clear(space)

    def _clear(self, space: bytes) -> int:
        self._clears += 1  # `reveal` of an earlier clearance does nothing from now on
        self._cleared[space] = _Cleared(self._clears)
        return self._clears

    def reveal(self, space: bytes, number: int) -> bool:
        """End the clearance ``number``, as none of the namespace's old blocks is left.

        False if a later clearance has taken its place, which then says what is left.
        """
        with self._changed:
            cleared = self._cleared.get(space)
            if cleared is None or cleared.number != number:
                return False
            del self._cleared[space]
            return True

    # --- queries ---------------------------------------------------------------------------------

    def learn(self, block: bytes, size: int, mark: int) -> None:
        """Add ``block``, which a query begun after ``mark`` found, to the catalogue.

        Does nothing if something is done with it, or it was deleted since ``mark``.
        """
        if block not in self._catalogue:
            with self._changed:
                deleted = self._deleted.get(block, self._deleted_before)
                if block not in self._busy and block not in self._resting and deleted <= mark:
                    self._catalogue.add(block, size)


class Deletion:
    """Blocks that are being deleted: DELETING until `end`.

    Use it as a context manager, which ends it; say before which blocks may be left (`failed`).
    """

    def __init__(
        self,
        states: BlockStates,
        busy: dict[bytes, Operation],
        changed: threading.Condition,
        operations: dict[bytes, Operation],
        called_off: list[tuple[Callable[[bytes, bool], object], bytes]],
    ) -> None:
        self._states = states
        self._busy = busy
        self._changed = changed
        self._operations = operations
        self._called_off = called_off
        self.failed: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._operations)

    @property
    def blocks(self) -> list[bytes]:
        """The blocks to delete."""
        return list(self._operations)

    def superseded(self, block: bytes) -> bool:
        """Whether something else was begun with ``block`` since, such as its removal."""
        return self._busy.get(block) is not self._operations[block]

    def wait(self, timeout: float | None) -> bool:
        """Wait for what ran when it began, ``timeout`` seconds at most; False if that runs on."""
        for then, block in self._called_off:
            then(block, False)
        self._called_off = []
        before = [one.before for one in self._operations.values() if one.before is not None]
        with self._changed:
            over = self._changed.wait_for(lambda: all(one.ended for one in before), timeout)
            for operation in self._operations.values():
                operation.free = over
            return over

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._states.end_deletion(self._operations.values(), self.failed)
