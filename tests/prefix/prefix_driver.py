"""`IndexDriver`: uses a bare prefix index as a cache does, and compares it with the naive model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.keys import as_namespace
from kvkeep.core.tokens import as_tokens
from naive_cache import NaiveCache

if TYPE_CHECKING:
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.pool import PageArray
    from kvkeep.core.prefix import PrefixMatch, Tree
    from kvkeep.core.prefix.tree import Encoder

__all__ = ["HeldPath", "IndexDriver"]


@dataclass(eq=False)
class HeldPath:
    """A hold on ``pages``, the pages of a path; with ``source``, on a page to be copied from."""

    namespace: Namespace
    encoder: Encoder
    hold: Any
    pages: list[int]
    source: Any = None
    source_pages: list[int] = field(default_factory=list)


class IndexDriver:
    """Gives out page ids 0, 1, 2 …, remembers all holds, and tells the model what was stored."""

    def __init__(self, index: Tree, *, exact: bool) -> None:
        self.index = index
        self.naive = NaiveCache(index.page_size, exact=exact)
        self.held: list[HeldPath] = []
        self._pages = 0

    def match(self, tokens: list[int], namespace: str = "") -> PrefixMatch | None:
        """Look up a prompt."""
        space = as_namespace(namespace)
        symbols = self.index.encoder(space).lookup(as_tokens(tokens))
        return self.index.match(symbols, space)

    def found(self, tokens: list[int], namespace: str = "") -> list[int]:
        """The full pages of a match, [] where there is none."""
        match = self.match(tokens, namespace)
        return [] if match is None else match.pages.tolist()

    def open(self, tokens: list[int], namespace: str = "", *, used: bool = True) -> HeldPath:
        """Hold what is stored of a prompt, its partial page too."""
        space = as_namespace(namespace)
        encoder = self.index.encoder(space)
        match = self.index.match(encoder.lookup(as_tokens(tokens)), space)
        hold, source = self.index.hold(match, space, used=used)
        held = HeldPath(space, encoder, hold, [] if match is None else match.pages.tolist(), source)
        if source is not None:
            assert match is not None
            held.source_pages = self.naive.path(match.partial_page)
        self.held.append(held)
        return held

    def publish(self, held: HeldPath, tokens: list[int], priority: int = 0) -> list[int]:
        """Store the full pages of ``tokens``, which begin with the path; pages that were there."""
        size = self.index.page_size
        start, stop = len(held.pages), len(tokens) // size
        assert stop > start, "nothing to publish"
        fresh = np.arange(self._pages, self._pages + stop - start, dtype=np.int32)
        self._pages += len(fresh)
        new = fresh.tolist()
        symbols = held.encoder.pages(as_tokens(tokens), start, stop)
        inserted = self.index.insert(held.hold, symbols, fresh, priority)
        fresh[:] = -1  # the array is the caller's: it may do what it likes
        existing: list[int] = inserted.existing.tolist()
        new = new[len(existing) :]
        held.hold = inserted.hold
        held.pages += existing
        if new:
            parent = held.pages[-1] if held.pages else -1
            first = (stop - len(new)) * size
            self.naive.store(held.namespace, parent, new, tokens[first : stop * size])
        held.pages += new
        return existing

    def store(self, tokens: list[int], namespace: str = "", priority: int = 0) -> list[int]:
        """Publish a prompt as a request would that ends at once; the page ids of its path."""
        held = self.keep(tokens, namespace, priority)
        pages = held.pages
        self.close(held)
        return pages

    def keep(self, tokens: list[int], namespace: str = "", priority: int = 0) -> HeldPath:
        """Publish a prompt and hold it."""
        held = self.open(tokens, namespace)
        if held.source is not None:
            self.index.release(held.source)
            held.source = None
        if len(tokens) // self.index.page_size > len(held.pages):
            self.publish(held, tokens, priority)
        return held

    def fork(self, held: HeldPath) -> HeldPath:
        """A second hold on the same path."""
        again = self.index.retain(held.hold)
        other = HeldPath(held.namespace, held.encoder.fork(), again, held.pages.copy())
        self.held.append(other)
        return other

    def shorten(self, held: HeldPath, pages: int) -> None:
        """Hold only the first ``pages`` pages."""
        held.hold = self.index.move(held.hold, held.hold, pages)
        held.encoder.cut(pages)
        held.pages = held.pages[:pages]

    def close(self, held: HeldPath, *, used: bool = True) -> None:
        """End a hold, and that on a partial page."""
        self.held.remove(held)
        self.index.release(held.hold, used=used)
        if held.source is not None:
            self.index.release(held.source, used=used)

    def drop(self, held: HeldPath, keep: int) -> list[int]:
        """End a hold and forget what is behind ``keep`` pages, so far as nobody needs it."""
        self.held.remove(held)
        gone = self._forgotten(self.index.drop(held.hold, keep))
        if held.source is not None:
            self.index.release(held.source)
        return gone

    def evict(self, count: int) -> list[int]:
        """Evict; the page ids that went."""
        return self._forgotten(self.index.evict(count))

    def clear(self, namespace: str | None = None) -> list[int]:
        """Clear; the page ids that went."""
        space = None if namespace is None else as_namespace(namespace)
        return self._forgotten(self.index.clear(space))

    def _forgotten(self, pages: PageArray) -> list[int]:
        gone: list[int] = pages.tolist()
        kept = self.kept()
        assert not kept & set(gone), f"held pages {kept & set(gone)} were forgotten"
        self.naive.forget(gone)
        return gone

    def kept(self) -> set[int]:
        """All pages that are held."""
        return {page for held in self.held for page in self.protected(held)}

    def protected(self, held: HeldPath) -> list[int]:
        """The pages that one hold keeps."""
        return held.pages if held.source is None else held.pages + held.source_pages

    def check(self) -> None:
        """Let the index recount everything, and compare its counts with the model's."""
        holds = [held.hold for held in self.held]
        holds += [held.source for held in self.held if held.source is not None]
        stored = self.index.check(holds)
        assert sorted(stored.tolist()) == sorted(self.naive.pages)
        assert self.index.num_pages == len(self.naive)
        assert self.index.num_evictable == len(self.naive) - len(self.kept())
        spaces = {page.namespace for page in self.naive.pages.values()}
        assert {s for s, count in self.index.namespaces().items() if count} == spaces
        holders = {held.namespace for held in self.held}
        assert len(self.index.roots) == len(spaces | holders)
        for held in self.held:
            assert held.hold.end == len(held.pages)
