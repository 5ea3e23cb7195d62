"""Events that the cache reports to its hooks: one frozen record each.

A hook is any callable that takes an event; see `kvkeep.core.cache.PagedCache.subscribe`. Page ids
name stored pages: from `Stored` to `Evicted`, an id stands for the same tokens. So a mirror of the
cache needs nothing but these events.

In a cache with groups of layers, rows and checkpoints belong to stored pages (`GroupsStored`), and
go with or before them (`Evicted.groups`). A request resumes at a checkpoint if the model has
states; otherwise wherever the rows are there that its windows reach back to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvkeep.core.extras import Extras
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.tokens import TokenArray

__all__ = [
    "Closed",
    "Event",
    "Evicted",
    "GroupsLost",
    "GroupsStored",
    "Hook",
    "Opened",
    "ResumePoint",
    "Returned",
    "Stored",
    "frozen",
]


class ResumePoint(NamedTuple):
    """A checkpoint: the end of stored page ``page``, ``tokens`` from the start of the prompt."""

    page: int
    tokens: int


class Returned(NamedTuple):
    """A conversation of ``turns`` requests goes on, ``after_s`` seconds after the end of these."""

    after_s: float
    turns: int


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A sequence was opened or forked.

    ``cached_tokens`` need no computing. The KV of ``stored_tokens`` is cached in the layers that
    keep every token: more, if a window or a state was missing there. None: no more. ``returned`` is
    set in a cache whose policy follows conversations, if the prompt continues one.
    """

    sequence: int
    namespace: Namespace
    prompt_tokens: int
    cached_tokens: int
    forked_from: int | None = None
    stored_tokens: int | None = None
    returned: Returned | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Full pages of computed tokens became reusable.

    ``parent`` is the page before the first of them, -1 at the start of a prompt. ``tokens`` are the
    ``len(pages) * page_size`` tokens of these pages. ``extras`` are the digests of bytes that
    belong to some of them, at positions that count from the first of ``tokens``; pages with
    different extras differ.
    """

    sequence: int
    namespace: Namespace
    parent: int
    pages: PageArray
    tokens: TokenArray
    extras: Extras = ()


@dataclass(frozen=True, slots=True, eq=False)
class GroupsStored:
    """Rows and checkpoints of stored pages are kept for later requests.

    ``rows`` has, for each window, the pages whose rows became reusable. ``sequence`` is None if a
    pin added the checkpoint.
    """

    sequence: int | None
    checkpoints: tuple[ResumePoint, ...]
    rows: tuple[PageArray, ...]


class GroupsLost(NamedTuple):
    """Checkpoints and, for each window, pages whose rows are no longer kept.

    ``freed`` pool pages became free with them; others are still in use.
    """

    checkpoints: tuple[ResumePoint, ...]
    rows: tuple[PageArray, ...]
    freed: int


@dataclass(frozen=True, slots=True, eq=False)
class Evicted:
    """Pages are no longer reusable. ``reason``: "pressure", "asked", "dropped" or "cleared".

    ``groups`` names the rows and checkpoints that were lost, of ``pages`` and of pages that stay.
    There may be no ``pages``: "replaced" is the reason if a later checkpoint took the place of an
    earlier one, which needs no state.
    """

    pages: PageArray
    reason: str
    groups: GroupsLost | None = None

    @property
    def freed(self) -> int:
        """All pool pages that became free."""
        return len(self.pages) + (0 if self.groups is None else self.groups.freed)


@dataclass(frozen=True, slots=True, eq=False)
class Closed:
    """A sequence was closed. ``stored_pages`` are those of its pages that stay reusable."""

    sequence: int
    tokens: int
    stored_pages: int


def frozen(array: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return a read-only copy, so that no hook can change it under another."""
    array = array.copy()
    array.flags.writeable = False
    return array


Event = Opened | Stored | GroupsStored | Evicted | Closed
"""Every event of a cache."""
Hook = Callable[[Event], None]
"""Called under the cache's lock when an operation is complete; it must be quick."""
