"""`Misses`: what a cache remembers to tell why the rest of a prompt is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.core.events import Miss
from kvkeep.core.keys import root_key
from kvkeep.core.prefix.node import Root, TreeObserver

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from kvkeep.core.keys import Namespace
    from kvkeep.core.prefix import PrefixMatch, Tree
    from kvkeep.core.prefix.node import Node
    from kvkeep.core.tokens import TokenArray

    Place = tuple[int | bytes, bytes]

__all__ = ["Misses"]

_MOST: Final = 65_536


class _Removed(NamedTuple):
    """A run that left the tree, or the tail of one."""

    at: float
    by: str
    serial: int  # of the run: those behind it were removed before
    pages: int
    last: bytes  # symbols of its last page


class Misses(TreeObserver):
    """Remembers runs that were removed, and prompts that are computed, by where they begin.

    That is the run before it, and the symbols of its first page. So a prompt that leaves the tree
    finds in one step what was there, however paths were cut.

    Thread safety: none; under the cache's lock. Memory: about 400 bytes for each of the latest
    65,536 at most, or as many as the cache has pages. Cost: 0.3 µs for each run that is removed and
    each prompt that misses a page; nothing for a full hit.

    Attributes:
        by: the reason for which runs are being removed.
    """

    def __init__(self, tree: Tree, num_pages: int, clock: Callable[[], float]) -> None:
        self._tree = tree
        self._clock = clock
        self._most = min(_MOST, num_pages) // 2 + 1
        self._new: dict[Place, _Removed | int] = {}
        self._old: dict[Place, _Removed | int] = {}
        self._at = 0.0
        self.by = "asked"
        tree.observe(self)

    def removing(self, by: str) -> None:
        """Runs are about to be removed, for this reason."""
        self.by = by
        self._at = self._clock()

    def _note(self, place: Place, what: _Removed | int) -> None:
        self._new[place] = what
        if len(self._new) > self._most:
            self._old, self._new = self._new, {}

    # --- what the tree tells ---------------------------------------------------------------------

    def gone(self, leaf: Node, parent: Node) -> None:
        last = bytes(leaf.run[-self._tree.unit :])
        self._note(
            (_place(parent), leaf.key), _Removed(self._at, self.by, leaf.serial, leaf.size, last)
        )

    def trimmed(self, leaf: Node, keep: int) -> None:
        unit, size = self._tree.unit, leaf.size
        first, last = bytes(leaf.run[keep * unit : (keep + 1) * unit]), bytes(leaf.run[-unit:])
        self._note(
            (leaf.serial, first), _Removed(self._at, self.by, leaf.serial, size - keep, last)
        )

    # --- why -------------------------------------------------------------------------------------

    def computes(self, node: Node, key: bytes, sequence: int) -> None:
        """Note that a sequence computes the page with the symbols ``key`` behind ``node``."""
        self._note((_place(node), key), sequence)

    def why(
        self,
        match: PrefixMatch | None,
        symbols: bytes | memoryview,
        space: Namespace,
        running: Container[int],
    ) -> Miss:
        """Return why a prompt is computed from behind its match on.

        ``symbols`` are those of the prompt but for its last token, ``space`` is the namespace in
        which it was looked up, and ``running`` has the sequences that are not closed.
        """
        unit, size = self._tree.unit, self._tree.page_size
        pages = 0 if match is None else len(match.pages)
        token = pages * size + (0 if match is None else match.partial_tokens)
        key = bytes(symbols[pages * unit : (pages + 1) * unit])
        if match is not None and match.taken < match.end.size:
            return Miss("differs", token, others=1)
        place = root_key(space) if match is None else _place(match.end)
        there = self._at_place(place, key)
        if isinstance(there, int) and there in running:
            return Miss("computing", token, sequence=there)
        if isinstance(there, _Removed):
            until = pages + self._removed_pages(there, symbols[pages * unit :])
            return Miss("evicted", token, until=until * size, at=there.at, by=there.by)
        children = 0 if match is None else len(match.end.children)
        return Miss("differs" if children else "unseen", token, others=children)

    def _at_place(self, place: int | bytes, key: bytes) -> _Removed | int | None:
        return self._new.get((place, key)) or self._old.get((place, key))

    def _removed_pages(self, there: _Removed, symbols: bytes | memoryview) -> int:
        """Return how many pages of ``symbols`` were removed, at least: run by run."""
        unit, pages = self._tree.unit, 0
        while True:
            end = (pages + there.pages) * unit
            if bytes(symbols[end - unit : end]) != there.last:
                return pages + 1
            pages += there.pages
            behind = self._at_place(there.serial, bytes(symbols[end : end + unit]))
            if not isinstance(behind, _Removed) or behind is there:
                return pages
            there = behind

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


def _place(node: Node) -> int | bytes:
    return root_key(node.namespace) if isinstance(node, Root) else node.serial
