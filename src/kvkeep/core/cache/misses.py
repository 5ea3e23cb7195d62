"""`Misses`: records of removed runs and running prompts, which say why a prompt is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvkeep.core.events import PrefixMiss
from kvkeep.core.keys import root_key
from kvkeep.core.prefix.node import TreeObserver

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kvkeep.core.keys import Namespace
    from kvkeep.core.prefix import PrefixMatch, Tree
    from kvkeep.core.prefix.node import Node
    from kvkeep.core.tokens import TokenArray

    # `Node.stable_id` of a run, the pages up to its end, the symbols of the page behind it.
    Place = tuple[int | bytes, int, bytes]
    Removal = tuple[float, str]  # time and reason

__all__ = ["Misses"]

_MOST: Final = 65_536


class Misses(TreeObserver):
    """Remembers runs that were removed, and prompts that are computed, by where they begin.

    That is the run before it, and the symbols of its first page. So one dictionary lookup says what
    was there where a prompt leaves the tree. These are forgotten, and count as unseen: the oldest
    half once the table is full, runs behind one that was removed and stored again, and, rarely,
    those that began where runs were joined since.

    Thread safety: none; under the cache's lock. Memory: about 300 bytes for each of the latest
    65,536 runs at most, or as many as the cache has pages. Cost: 0.3 µs for each run that is
    removed and each prompt that misses a page; nothing for a full hit.
    """

    def __init__(self, tree: Tree, num_pages: int, clock: Callable[[], float]) -> None:
        self._tree = tree
        self._unit = tree.unit
        self._clock = clock
        self._most = min(_MOST, num_pages) // 2 + 1
        # In two generations, so that the oldest half is forgotten at once.
        self._new: dict[Place, Removal] = {}
        self._old: dict[Place, Removal] = {}
        self._removal: Removal = (0.0, "asked")
        self._computing: dict[Place, int] = {}  # sequences, of which some have ended
        tree.observe(self)

    def removing(self, by: str) -> None:
        """Record the reason ``by`` for which runs are removed next."""
        self._removal = (self._clock(), by)
        if len(self._new) > self._most:
            self._old, self._new = self._new, {}

    def computes(self, node: Node, key: bytes, sequence: int, running: Collection[int]) -> None:
        """Record that a sequence computes the page with the symbols ``key`` behind ``node``.

        ``running`` has the sequences that are not closed.
        """
        computing, place = self._computing, (node.stable_id, node.end, key)
        if computing.get(place, 0) not in running:
            computing[place] = sequence
        if len(computing) > 2 * len(running) + 64:
            self._computing = {at: each for at, each in computing.items() if each in running}

    # --- observer of the tree --------------------------------------------------------------------

    def gone(self, leaf: Node, parent: Node) -> None:
        stable_id = parent.serial if parent.end else parent.key  # inlined: once per victim
        self._new[stable_id, parent.end, leaf.key] = self._removal

    def trimmed(self, leaf: Node, keep: int) -> None:
        first = bytes(leaf.run[keep * self._unit : (keep + 1) * self._unit])
        self._new[leaf.serial, leaf.depth + keep, first] = self._removal

    # --- why -------------------------------------------------------------------------------------

    def why(
        self,
        match: PrefixMatch | None,
        symbols: bytes | memoryview,
        space: Namespace,
        running: Collection[int],
    ) -> PrefixMiss:
        """Return why a prompt is computed from the end of its match on.

        ``symbols`` are those of the prompt but for its last token, ``space`` is the namespace in
        which it was looked up, and ``running`` has the sequences that are not closed.
        """
        unit, size = self._unit, self._tree.page_size
        pages = 0 if match is None else len(match.pages)
        token = pages * size + (0 if match is None else match.partial_tokens)
        key = bytes(symbols[pages * unit : (pages + 1) * unit])
        if match is not None and match.end_pages < match.end.size:
            return PrefixMiss("differs", token, others=1)
        place = (root_key(space) if match is None else match.end.stable_id, pages, key)
        sequence = self._computing.get(place)
        if sequence is not None and sequence in running:
            return PrefixMiss("computing", token, sequence=sequence)
        removal = self._new.get(place) or self._old.get(place)
        if removal is not None:
            return PrefixMiss("evicted", token, at=removal[0], by=removal[1])
        children = 0 if match is None else len(match.end.children)
        return PrefixMiss("differs" if children else "unseen", token, others=children)

    def elsewhere(
        self, match: PrefixMatch | None, tokens: TokenArray, space: Namespace
    ) -> Namespace | None:
        """Return another namespace that has the next page of these ``tokens``; None if none has.

        Only for the first page of a prompt, and for the first one behind a public prefix. Cost: a
        probe for each namespace, or for each run behind the public prefix.
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
        if match.end_pages == match.end.size and match.end.namespace.scope:
            for child in match.end.children.values():
                if not child.namespace.scope and marks.plain_bytes(child.key) == wanted:
                    return child.namespace
        return None
