"""`Misses`: what a cache remembers to tell why the rest of a prompt is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvkeep.core.events import PrefixMiss
from kvkeep.core.keys import root_key
from kvkeep.core.prefix.node import TreeObserver

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from kvkeep.core.keys import Namespace
    from kvkeep.core.prefix import PrefixMatch, Tree
    from kvkeep.core.prefix.node import Node
    from kvkeep.core.tokens import TokenArray

    Place = tuple[int | bytes, bytes]
    # When and why a run left the tree, or the tail of one; its serial, by which those behind it are
    # found, which were removed before; its pages:
    Removed = tuple[tuple[float, str], int, int]

__all__ = ["Misses"]

_MOST: Final = 65_536


class Misses(TreeObserver):
    """Remembers runs that were removed, and prompts that are computed, by where they begin.

    That is the run before it, and the symbols of its first page. So a prompt that leaves the tree
    finds in one step what was there, however paths were cut.

    Thread safety: none; under the cache's lock. Memory: about 400 bytes for each of the latest
    65,536 at most, or as many as the cache has pages. Cost: 0.3 µs for each run that is removed and
    each prompt that misses a page; nothing for a full hit.
    """

    def __init__(self, tree: Tree, num_pages: int, clock: Callable[[], float]) -> None:
        self._tree = tree
        self._unit = tree.unit
        self._clock = clock
        self._most = min(_MOST, num_pages) // 2 + 1
        # In two generations, so that the oldest half is forgotten at once.
        self._new: dict[Place, Removed | int] = {}
        self._old: dict[Place, Removed | int] = {}
        self._removal = (0.0, "asked")
        tree.observe(self)

    def removing(self, by: str) -> None:
        """Runs are about to be removed, for the reason ``by``."""
        self._removal = (self._clock(), by)
        if len(self._new) > self._most:
            self._old, self._new = self._new, {}

    def computes(self, node: Node, key: bytes, sequence: int) -> None:
        """Note that a sequence computes the page with the symbols ``key`` behind ``node``."""
        self._new[node.place, key] = sequence
        if len(self._new) > self._most:
            self._old, self._new = self._new, {}

    # --- what the tree tells ---------------------------------------------------------------------

    def gone(self, leaf: Node, parent: Node) -> None:
        place = parent.serial if parent.end else parent.key  # written out: once per victim
        self._new[place, leaf.key] = self._removal, leaf.serial, leaf.size

    def trimmed(self, leaf: Node, keep: int) -> None:
        first = bytes(leaf.run[keep * self._unit : (keep + 1) * self._unit])
        self._new[leaf.serial, first] = self._removal, leaf.serial, leaf.size - keep

    # --- why -------------------------------------------------------------------------------------

    def why(
        self,
        match: PrefixMatch | None,
        symbols: bytes | memoryview,
        space: Namespace,
        running: Container[int],
    ) -> PrefixMiss:
        """Return why a prompt is computed from behind its match on.

        ``symbols`` are those of the prompt but for its last token, ``space`` is the namespace in
        which it was looked up, and ``running`` has the sequences that are not closed.
        """
        unit, size = self._unit, self._tree.page_size
        pages = 0 if match is None else len(match.pages)
        token = pages * size + (0 if match is None else match.partial_tokens)
        key = bytes(symbols[pages * unit : (pages + 1) * unit])
        if match is not None and match.taken < match.end.size:
            return PrefixMiss("differs", token, others=1)
        place = root_key(space) if match is None else match.end.place
        there = self._at(place, key)
        if isinstance(there, int) and there in running:
            return PrefixMiss("computing", token, sequence=there)
        if isinstance(there, tuple):
            until = pages + self._pages_of(there, symbols[pages * unit :])
            at, by = there[0]
            return PrefixMiss("evicted", token, until=until * size, at=at, by=by)
        children = 0 if match is None else len(match.end.children)
        return PrefixMiss("differs" if children else "unseen", token, others=children)

    def _at(self, place: int | bytes, key: bytes) -> Removed | int | None:
        return self._new.get((place, key)) or self._old.get((place, key))

    def _pages_of(self, there: Removed, symbols: bytes | memoryview) -> int:
        """Return how many pages of ``symbols`` were removed, at least.

        That is all of a run that others followed, and a page of the last one.
        """
        unit, pages = self._unit, 0
        while True:
            _, serial, size = there
            end = (pages + size) * unit
            behind = self._at(serial, bytes(symbols[end : end + unit]))
            if not isinstance(behind, tuple) or behind is there:
                return pages + 1
            pages, there = pages + size, behind

    def elsewhere(
        self, match: PrefixMatch | None, tokens: TokenArray, space: Namespace
    ) -> Namespace | None:
        """Return another namespace in which a prompt goes on as its ``tokens`` do. None: nowhere.

        Of the KV behind a public prefix, whose it is. Cost: a probe for each namespace, or for each
        run behind the public prefix.
        """
        size, marks = self._tree.page_size, self._tree.marks
        pages = 0 if match is None else len(match.pages)
        wanted = tokens[pages * size : (pages + 1) * size].tobytes()
        if not self._tree.exact or len(wanted) < self._tree.unit:
            return None
        if not pages:
            others = (other for other, root in self._tree.roots.items() if wanted in root.children)
            return next((other for other in others if other != space), None)
        assert match is not None
        if match.taken == match.end.size and match.end.namespace.scope:
            for child in match.end.children.values():
                if not child.namespace.scope and marks.plain_bytes(child.key) == wanted:
                    return child.namespace
        return None
