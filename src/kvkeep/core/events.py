"""What the cache tells its hooks: one frozen record for each thing that happened.

A hook is any callable that takes an event; see `kvkeep.core.cache.PagedCache.subscribe`. Page ids
name stored pages: an id that was `Stored` stands for the same tokens until it is `Evicted`, so a
mirror of the cache needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvkeep.core.extras import Extras
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.table import PageArray
    from kvkeep.core.tokens import TokenArray

__all__ = ["Closed", "Event", "Evicted", "Hook", "Opened", "PagesShort", "Stored", "frozen"]


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A sequence was opened (or forked): how much of its prompt was there already."""

    sequence: int
    namespace: Namespace
    prompt_tokens: int
    cached_tokens: int
    forked_from: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Pages became reusable: full pages of computed tokens, in order.

    ``parent`` is the page before the first of them, -1 at the beginning of a prompt. ``tokens``
    are the tokens of these pages: ``len(pages) * page_size`` of them. ``extras`` are the digests of
    the bytes that belong to some of them, at positions that count from the first of ``tokens``:
    pages are equal only if their extras are.
    """

    sequence: int
    namespace: Namespace
    parent: int
    pages: PageArray
    tokens: TokenArray
    extras: Extras = ()


@dataclass(frozen=True, slots=True, eq=False)
class Evicted:
    """Pages are no longer reusable. ``reason``: "pressure", "asked", "dropped" or "cleared"."""

    pages: PageArray
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Closed:
    """A sequence was closed: its tokens, and how many of its pages stay reusable."""

    sequence: int
    tokens: int
    stored_pages: int


@dataclass(frozen=True, slots=True, eq=False)
class PagesShort:
    """An operation could not get its pages and was refused; nothing changed."""

    needed: int
    available: int


def frozen(array: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """A copy that one hook cannot change under another."""
    array = array.copy()
    array.flags.writeable = False
    return array


Event = Opened | Stored | Evicted | Closed | PagesShort
"""What a cache tells its hooks."""
Hook = Callable[[Event], None]
"""Called under the cache's lock, when an operation is complete: it must be quick."""
