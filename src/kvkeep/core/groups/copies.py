"""`GroupCopies`: copies of rows and states that the engine has still to make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvkeep.core.groups.units import TreeUnits
    from kvkeep.core.pages.tables import PageArray

__all__ = ["GroupCopies", "RowCopy", "StateCopy"]


class RowCopy(NamedTuple):
    """Copy the first ``tokens`` tokens of a row: pool pages ``src`` to ``dst``, in all layers.

    ``window`` is the number of the window group.
    """

    window: int
    src: PageArray
    dst: PageArray
    tokens: int


class StateCopy(NamedTuple):
    """Copy a whole state: pool pages ``src`` to ``dst``."""

    src: PageArray
    dst: PageArray


@dataclass(slots=True, eq=False)
class _Waiting:
    """A copy that was not handed out yet; its source has a reference until it is made.

    The copy writes memory of ``owner``. It must be made before a pass of any of ``others``, which
    overwrites the source.
    """

    copy: RowCopy | StateCopy
    owner: GroupCopies
    others: list[GroupCopies]


class GroupCopies:
    """The copies to make before the next pass of one sequence, in order.

    A fork copies the running state of the sequence that it was made from: both wait for that, and
    the first that is asked hands it out. Thread safety: none; under the cache's lock.
    """

    __slots__ = ("_made", "_units", "_waiting")

    def __init__(self, units: TreeUnits) -> None:
        self._units = units
        self._waiting: list[_Waiting] = []
        self._made: list[PageArray] = []  # sources of copies that were handed out

    @property
    def waiting(self) -> bool:
        """Whether copies were not handed out yet."""
        return bool(self._waiting)

    def add(self, copy: RowCopy | StateCopy, others: Iterable[GroupCopies] = ()) -> None:
        """Add a copy into own memory, for which ``others`` wait too.

        Takes over a reference to the source.
        """
        waiting = _Waiting(copy, self, list(others))
        for one in (self, *waiting.others):
            one._insert(waiting)

    def _insert(self, waiting: _Waiting) -> None:
        """Add a copy at the end, but before one that overwrites its source."""
        first = waiting.copy.src[0]
        for at, before in enumerate(self._waiting):
            if before.copy.dst[0] == first:
                self._waiting.insert(at, waiting)
                return
        self._waiting.append(waiting)

    def fork_state(self, fork: GroupCopies, state: PageArray, into: PageArray) -> None:
        """Add a copy of the running ``state`` to ``into``, the state of a fork.

        If ``state`` itself waits for a copy, the fork gets one from the same source.
        """
        src, others = state, [self]
        for waiting in self._waiting:
            if isinstance(waiting.copy, StateCopy) and waiting.owner is self:
                src, others = waiting.copy.src, waiting.others
        self._units.retain(src)
        fork.add(StateCopy(src, into), others)

    def take(self) -> list[RowCopy | StateCopy]:
        """Return the waiting copies; those taken before are made."""
        self.finish()
        taken = self._waiting.copy()
        for waiting in taken:
            for one in (waiting.owner, *waiting.others):
                one._waiting.remove(waiting)
            self._made.append(waiting.copy.src)
        return [waiting.copy for waiting in taken]

    @property
    def rows_wait(self) -> bool:
        """Whether copies of rows wait: a pass was prepared and is not computed."""
        return any(isinstance(waiting.copy, RowCopy) for waiting in self._waiting)

    @property
    def forks_wait(self) -> bool:
        """Whether forks wait for copies of this sequence's state."""
        return any(waiting.owner is not self for waiting in self._waiting)

    def drop(self, needless: Callable[[RowCopy | StateCopy], bool] | None = None) -> None:
        """Drop the waiting copies into own memory that are ``needless``; default: all of them."""
        for waiting in [one for one in self._waiting if one.owner is self]:
            if needless is None or needless(waiting.copy):
                for one in (self, *waiting.others):
                    one._waiting.remove(waiting)
                self._units.release(waiting.copy.src)

    def leave(self) -> None:
        """`drop`, and no longer wait for others: there is no further pass."""
        self.finish()
        self.drop()
        for waiting in self._waiting:
            waiting.others.remove(self)
        self._waiting = []

    def finish(self) -> None:
        """Release the sources of all copies handed out so far; the caller has made them."""
        for source in self._made:
            self._units.release(source)
        self._made = []

    def sources(self) -> list[PageArray]:
        """Return the sources that this sequence has references to, for `check`."""
        return [*self._made, *(one.copy.src for one in self._waiting if one.owner is self)]
