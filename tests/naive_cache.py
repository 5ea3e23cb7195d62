"""`NaiveCache`: the content of a cache as whole token lists; slow and obviously right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core.events import Evicted, Stored
from kvkeep.core.extras import signed
from kvkeep.core.keys import as_namespace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvkeep.core.events import Event
    from kvkeep.core.keys import Namespace, NamespaceLike

__all__ = ["NaiveCache", "NaiveMatch", "NaivePage"]


@dataclass(frozen=True, slots=True)
class NaivePage:
    """A stored page; ``prefix`` has all tokens up to the end of the page."""

    page: int
    parent: int
    namespace: Namespace
    prefix: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NaiveMatch:
    """The match that a cache must find; see `NaiveCache.match`."""

    pages: list[int]
    partial_tokens: int
    partial_pages: set[int]
    """Pages that begin with the partial tokens; a cache may return any of them."""


class NaiveCache:
    """A mirror of a cache, fed by its events: ``cache.subscribe(naive)``.

    Asserts that no event is illegal: a page stored twice, a page without its parent, one prefix
    under two page ids, the eviction of a page that is not stored. ``exact`` says whether the cache
    finds pages that match only in part. Tokens with extras are compared as
    `kvkeep.core.extras.signed` encodes them. Cost: each method scans all pages.
    """

    def __init__(self, page_size: int, *, exact: bool = True) -> None:
        self.page_size = page_size
        self.exact = exact
        self.pages: dict[int, NaivePage] = {}

    def __call__(self, event: Event) -> None:
        """Apply a `Stored` or `Evicted` event; ignore others."""
        if isinstance(event, Stored):
            tokens = signed(event.tokens, event.extras).tolist()
            self.store(event.namespace, event.parent, event.pages.tolist(), tokens)
        elif isinstance(event, Evicted):
            self.forget(event.pages.tolist())

    def store(
        self, namespace: NamespaceLike, parent: int, pages: list[int], tokens: list[int]
    ) -> None:
        """Store ``pages`` with ``tokens`` after the page ``parent`` (-1: at the start)."""
        space = as_namespace(namespace)
        size = self.page_size
        assert pages, "nothing was stored"
        assert len(tokens) == len(pages) * size, (len(tokens), pages)
        for at, page in enumerate(pages):
            assert page not in self.pages, f"page {page} is stored already"
            before: tuple[int, ...] = ()
            if parent >= 0:
                assert parent in self.pages, f"the parent {parent} of page {page} is not stored"
                assert self.pages[parent].namespace == space
                before = self.pages[parent].prefix
            prefix = (*before, *tokens[at * size : (at + 1) * size])
            twin = [p.page for p in self.of(space) if p.prefix == prefix]
            assert not twin, f"page {page} duplicates page {twin[0]}"
            self.pages[page] = NaivePage(page, parent, space, prefix)
            parent = page

    def forget(self, pages: Iterable[int]) -> None:
        """Remove ``pages``; the parents of the remaining pages must remain."""
        for page in pages:
            assert page in self.pages, f"page {page} is not stored"
            del self.pages[page]
        for left in self.pages.values():
            reachable = left.parent < 0 or left.parent in self.pages
            assert reachable, f"page {left.parent} was evicted before its child {left.page}"

    def of(self, namespace: NamespaceLike) -> list[NaivePage]:
        """Return the pages of one namespace."""
        space = as_namespace(namespace)
        return [page for page in self.pages.values() if page.namespace == space]

    def path(self, page: int) -> list[int]:
        """Return the page ids from the start of the prompt to ``page``; [] for -1."""
        path: list[int] = []
        while page >= 0:
            path.append(page)
            page = self.pages[page].parent
        return path[::-1]

    def match(self, tokens: Iterable[int], namespace: NamespaceLike = "") -> NaiveMatch:
        """Return the longest stored prefix: full pages, then tokens of one more page."""
        wanted = tuple(tokens)
        common = {page.page: _common(page.prefix, wanted) for page in self.of(namespace)}
        whole = [p for p, n in common.items() if n == len(self.pages[p].prefix)]
        last = max(whole, key=lambda page: common[page], default=-1)
        pages = self.path(last)
        full = len(pages) * self.page_size
        longest = max(common.values(), default=0) if self.exact else full
        partial = {p for p, n in common.items() if n == longest and self.pages[p].parent == last}
        return NaiveMatch(pages, longest - full, partial if longest > full else set())

    def __len__(self) -> int:
        return len(self.pages)


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
