"""The contract of a prefix index: tokens in, page ids out, and what may be evicted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.core.extras import Extras
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.table import PageArray
    from kvkeep.core.prefix.marks import Marks
    from kvkeep.core.prefix.owners import Owner, Owners
    from kvkeep.core.prefix.pinned import Pinned
    from kvkeep.core.prefix.walk import TreeWalk
    from kvkeep.core.tokens import TokenArray

__all__ = ["Encoder", "Hold", "Inserted", "Look", "PrefixIndex", "PrefixMatch", "PrefixRun"]

Hold = TypeVar("Hold")
"""What an index hands out for the end of a path it keeps; opaque to everybody else."""


class Encoder(ABC):
    """Turns the tokens of one sequence into what an index compares; one per sequence.

    Tokens with extras are marks, negative ids of the index's `Marks`.
    It may keep what it computed for the leading pages, so it must be told when those change.
    """

    @abstractmethod
    def lookup(self, tokens: TokenArray) -> bytes:
        """What to match for a prompt of these tokens."""

    @abstractmethod
    def pages(self, tokens: TokenArray, start: int, stop: int) -> bytes:
        """What to insert for the full pages ``start`` … ``stop`` of these tokens."""

    @abstractmethod
    def cut(self, pages: int) -> None:
        """Only the first ``pages`` pages are still the same tokens."""

    @abstractmethod
    def fork(self) -> Encoder:
        """An encoder for a sequence that has the same tokens so far."""


@dataclass(slots=True, eq=False)
class PrefixMatch(Generic[Hold]):
    """The longest cached prefix of a prompt; good until the index changes.

    ``pages`` are the full pages, int32, in order. ``partial_page`` is the page whose first
    ``partial_tokens`` tokens also match (-1 and 0 where there is none, always for an index
    over full pages). ``end`` is where the full pages end and ``source`` what holds the partial
    page: both for the index alone.
    """

    pages: PageArray
    end: Hold
    taken: int
    partial_page: int = -1
    partial_tokens: int = 0
    source: Hold | None = field(default=None, repr=False)

    def without_partial(self) -> PrefixMatch[Hold]:
        """The same match at its last full page."""
        return PrefixMatch(self.pages, self.end, self.taken)


class Inserted(NamedTuple, Generic[Hold]):
    """What an insert did: the ``hold`` moved to the end, and pages that were ``existing``.

    ``existing`` (int32) stand for the first of the pages given: another had computed them before.
    """

    hold: Hold
    existing: PageArray


class PrefixRun(NamedTuple):
    """One run of the tree, for people: see `PrefixIndex.runs`."""

    depth: int
    start: int
    """Pages before it."""
    pages: PageArray
    symbols: bytes
    """What the index keeps for it: int32 tokens and marks, or 32-byte keys."""
    tokens: TokenArray | None
    """Its tokens, when the index keeps them."""
    children: int
    holders: int
    pins: int
    state: str
    """What the eviction policy says of it."""
    extras: Extras = ()
    """Those of its tokens, where it has any; positions count from its first token."""


class Look(NamedTuple):
    """One run by its id, or the root of a namespace: see `PrefixIndex.look`."""

    namespace: Namespace
    path: tuple[int, ...]
    """Ids from the root to the run that it hangs from."""
    start: int
    """Pages before it."""
    pages: PageArray
    symbols: bytes
    children: int
    state: str
    """What the eviction policy says of it."""


class PrefixIndex(ABC, Generic[Hold]):
    """Finds the longest cached prefix of a prompt and keeps the order of eviction.

    The index holds page ids and never touches tensors or reference counts: what it stores, its
    owner retains; what `evict`, `drop` and `clear` return, its owner releases. Everything that is
    stored is prefix-closed: a page is there only while all pages before it are.

    A **hold** on the end of a path protects the path: nothing on it is evicted. `hold` gives one,
    `insert` and `shorten` move it, `release` ends it. ``num_evictable`` is exact: so many pages
    could be evicted now, one by one, whatever the order.

    `match` changes nothing at all. Namespaces share nothing.

    Thread safety: none; called under the cache's lock. Cost: see the implementations.
    """

    name: str
    page_size: int
    policy: EvictionPolicy
    marks: Marks
    """What stands for tokens with extras among the tokens that it is given."""
    num_pages: int
    """Pages stored."""
    num_evictable: int
    """Pages that nobody holds; soft pins count as evictable."""
    pins_broken: int
    """Soft pins that gave way to memory pressure, or to `clear`; all that there ever were."""
    broken: list[Pinned]
    """Those of them that their owner has not taken from here yet."""
    owners: Owners | None = None
    """Who uses what, once `keep_owners` was called."""

    def keep_owners(self) -> Owners:
        """Begin to keep who uses what; what is stored already counts as shared.

        `InvalidValue` for an index that cannot: hints are no part of what an index must do.
        """
        raise InvalidValue(f"the {self.name} index keeps no owners, so it takes no hints")

    @abstractmethod
    def encoder(self, namespace: Namespace) -> Encoder:
        """An encoder for a new sequence in ``namespace``."""

    @abstractmethod
    def match(self, symbols: bytes, namespace: Namespace) -> PrefixMatch[Hold] | None:
        """The longest cached prefix, or None when the namespace is empty. Changes nothing."""

    @abstractmethod
    def protects(self, match: PrefixMatch[Hold] | None) -> int:
        """How many evictable pages `hold` would protect: pages that then cannot be evicted."""

    @abstractmethod
    def hold(
        self, match: PrefixMatch[Hold] | None, namespace: Namespace, *, used: bool = True
    ) -> tuple[Hold, Hold | None]:
        """Protect a match: a hold on its full pages, and one on its partial page if it has one.

        ``used`` counts as a hit on its full pages.
        """

    @abstractmethod
    def again(self, hold: Hold) -> Hold:
        """A second hold on the same path, for a fork."""

    @abstractmethod
    def insert(
        self,
        hold: Hold,
        symbols: bytes,
        pages: PageArray,
        priority: int,
        *,
        known: bool = False,
        owner: Owner | None = None,
    ) -> Inserted[Hold]:
        """Store ``pages`` after the path of ``hold`` and move the hold to their end.

        ``known`` is for the policy: they were asked for before. ``owner``: on whose behalf.
        """

    @abstractmethod
    def shorten(self, hold: Hold, pages: int) -> Hold:
        """Move a hold back so that it covers the first ``pages`` pages."""

    @abstractmethod
    def move(self, hold: Hold, path: Hold, pages: int) -> Hold:
        """Move a hold to the first ``pages`` pages of another's path, which begins with its own."""

    @abstractmethod
    def release(self, hold: Hold, *, used: bool = True) -> None:
        """End a hold; ``used`` counts as a use of its path.

        After a hold that was no use, the index may join what it had cut for that hold.
        """

    @abstractmethod
    def drop(self, hold: Hold, keep: int) -> PageArray:
        """End a hold and forget its path beyond ``keep`` pages, so far as nobody else needs it."""

    @abstractmethod
    def evict(self, count: int) -> PageArray:
        """Forget ``count`` pages (all evictable ones if they are fewer) and return their ids."""

    @abstractmethod
    def clear(self, namespace: Namespace | None = None) -> PageArray:
        """Forget all that nobody holds, in one namespace or in all, and return the page ids."""

    @abstractmethod
    def pin(self, hold: Hold, pin: Pinned, *, hard: bool = False) -> None:
        """Set ``pin`` on this path: it stays until nothing else is left, its beginning longest.

        The pin stays where ``hold`` is now, wherever the hold is moved later. A ``hard`` pin
        takes over the hold itself, so that nothing of the path goes.
        """

    @abstractmethod
    def unpin(self, pin: Pinned) -> None:
        """Take a pin away, and end the hold of a hard one; a broken one was taken away already."""

    @abstractmethod
    def pinned(self, pin: Pinned) -> int:
        """Pages on the path of ``pin`` that are still there; 0 when it is broken or was ended."""

    @property
    @abstractmethod
    def num_pinned(self) -> int:
        """Pages on the paths of pins, each counted once."""

    @property
    @abstractmethod
    def num_hard_pinned(self) -> int:
        """Pages on the paths of hard pins, each counted once."""

    @abstractmethod
    def would_keep(self, hold: Hold) -> int:
        """What ``num_hard_pinned`` would be with a hard pin of this path."""

    @abstractmethod
    def length(self, hold: Hold) -> int:
        """Pages on the path of ``hold``."""

    # --- the map: an index may do without ----------------------------------------------------

    @property
    def moment(self) -> int:
        """How many events the policy has counted; what ``last_used`` is compared with."""
        return 0

    def walk(self, columns: Iterable[str], top: Namespace | Hold | None = None) -> TreeWalk:
        """A walk over all there is, one namespace (with its root), or a hold and all behind it.

        `InvalidValue` for an index that has no nodes to walk over.
        """
        raise InvalidValue(f"the {self.name} index cannot be walked over, so it has no map")

    def keeps(self, place: Hold) -> bool:
        """Whether what a walk has found is still there."""
        raise InvalidValue(f"the {self.name} index has no map")

    def look(self, place: Hold) -> Look:
        """All there is to know of what a walk has found, and which is still there."""
        raise InvalidValue(f"the {self.name} index has no map")

    def before(self, place: Hold) -> tuple[Namespace, bytes]:
        """The namespace of what a walk has found, and the symbols on the way to it."""
        raise InvalidValue(f"the {self.name} index has no map")

    def at(self, place: Hold) -> PrefixMatch[Hold]:
        """As if a prompt had matched up to the end of what a walk has found."""
        raise InvalidValue(f"the {self.name} index has no map")

    def pins_at(self, place: Hold) -> list[Pinned]:
        """The soft pins that stand at the end of what a walk has found."""
        raise InvalidValue(f"the {self.name} index has no map")

    def pins_below(self, place: Hold) -> list[Pinned]:
        """The soft pins at the end of runs that `evict_below` of ``place`` takes away."""
        raise InvalidValue(f"the {self.name} index has no map")

    def top_of(self, match: PrefixMatch[Hold]) -> Hold | None:
        """The run with which the path of a match begins; None for a match without a full page."""
        raise InvalidValue(f"the {self.name} index has no map")

    def evict_below(self, place: Hold) -> PageArray:
        """Forget a run and all behind it, pinned or not, so far as nobody holds it."""
        raise InvalidValue(f"the {self.name} index has no map")

    @property
    @abstractmethod
    def num_namespaces(self) -> int:
        """Namespaces in which anything is stored or held."""

    @abstractmethod
    def namespaces(self) -> dict[Namespace, int]:
        """Pages stored per namespace."""

    @abstractmethod
    def runs(self, namespace: Namespace) -> Iterator[PrefixRun]:
        """What is stored, depth first; for people and for tests."""

    @abstractmethod
    def check(self, holds: list[Hold]) -> PageArray:
        """Recount everything given all holds there are; returns the pages stored. Asserts."""


EMPTY_PAGES: PageArray = np.empty(0, np.int32)
EMPTY_PAGES.flags.writeable = False
