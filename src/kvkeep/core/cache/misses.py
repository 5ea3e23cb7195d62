"""`Misses`: records of removed runs and running prompts, which say why a prompt is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvkeep.core.events import PrefixMiss
from kvkeep.core.extras import extra_bytes, extras_between
from kvkeep.core.keys import KEY_BYTES, chain_keys, root_key
from kvkeep.core.prefix.node import TreeObserver
from kvkeep.core.tokens import TOKEN_BYTES, TOKEN_DTYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvkeep.core.keys import Namespace
    from kvkeep.core.prefix import PrefixMatch, Tree
    from kvkeep.core.prefix.node import Node

    # `Node.stable_id` of a run, the pages up to its end, the content of the page behind it.
    Place = tuple[int | bytes, int, bytes]
    Removal = tuple[float, str]  # time and reason

__all__ = ["Misses"]

_MOST: Final = 65_536


class Misses(TreeObserver):
    """Remembers runs that were removed, and prompts that are computed, by where they begin.

    That is the run before it, and the content of its first page. So one dictionary lookup says what
    was there where a prompt leaves the tree. These are forgotten, and count as unseen: the oldest
    half once the table is full, runs behind one that lost its tail, or was removed, and was stored
    again, and, rarely, those that began where runs were joined, or grew, since.

    Thread safety: none; under the cache's lock. Memory: about 300 bytes for each of the latest
    65,536 runs at most, or as many as the cache has pages. Cost: 0.3 µs for each run that is
    removed and each prompt that misses a page; nothing for a full hit.
    """

    def __init__(self, tree: Tree, num_pages: int, clock: Callable[[], float]) -> None:
        self._tree = tree
        self._unit = tree.unit
        self._marks = tree.marks
        self._clock = clock
        self._most = min(_MOST, num_pages) // 2 + 1
        # In two generations, so that the oldest half is forgotten at once.
        self._new: dict[Place, Removal] = {}
        self._old: dict[Place, Removal] = {}
        self._removal: Removal = (0.0, "asked")
        self._computing: dict[Place, int] = {}  # sequences, of which some are elsewhere by now
        tree.observe(self)

    def removing(self, by: str) -> None:
        """Record the reason ``by`` for which runs are removed next."""
        self._removal = (self._clock(), by)
        if len(self._new) > self._most:
            self._old, self._new = self._new, {}

    def computes(self, prompt: Any, hold: Node, sequence: int, running: Mapping[int, Any]) -> None:
        """Record that a sequence computes the page of ``prompt`` behind ``hold``, if it is full.

        ``running`` has the sequences that are not closed.
        """
        key = self._page(prompt, hold.end)
        if key:
            computing, place = self._computing, (hold.stable_id, hold.end, key)
            if place not in computing or not self._computes(place, running):
                computing[place] = sequence
            if len(computing) > 2 * len(running) + 64:
                there = (at for at in computing if self._computes(at, running))
                self._computing = {at: computing[at] for at in there}

    def _computes(self, place: Place, running: Mapping[int, Any]) -> int:
        """Return the sequence that was recorded at ``place`` and is still there; 0 for none."""
        sequence = running.get(self._computing.get(place, 0))
        if sequence is None or (sequence.hold.stable_id, sequence.hold.end) != place[:2]:
            return 0
        return int(sequence.id) if self._page(sequence, place[1]) == place[2] else 0

    def _page(self, prompt: Any, at: int) -> bytes:
        """Return the content of a page of a prompt or sequence; b"" if it is not full."""
        size, tree, extras = self._tree.page_size, self._tree, prompt.extras
        start, stop = at * size, (at + 1) * size
        tokens: bytes = prompt.tokens[start:stop].tobytes()
        if len(tokens) < size * TOKEN_BYTES:
            return b""
        if extras:
            extras = extras_between(extras, start, stop)
        if tree.exact:
            return tokens + extra_bytes(extras) if extras else tokens
        before = prompt.encoder.pages(prompt.tokens, at - 1, at) if at else root_key(prompt.space)
        return chain_keys(before, tokens, len(tokens), extras)[0]

    def _stored(self, symbols: bytes) -> bytes:
        """Return the content of a stored page: what does not change with its marks."""
        tree = self._tree
        if not tree.exact or not tree.marks.living:
            return symbols
        tokens, extras = tree.marks.plain(np.frombuffer(symbols, TOKEN_DTYPE))
        return tokens.tobytes() + extra_bytes(extras)

    # --- observer of the tree --------------------------------------------------------------------

    def gone(self, leaf: Node, parent: Node) -> None:
        key = self._stored(leaf.key) if self._marks.living else leaf.key
        self._new[parent.stable_id, parent.end, key] = self._removal

    def trimmed(self, leaf: Node, keep: int) -> None:
        first = bytes(leaf.run[keep * self._unit : (keep + 1) * self._unit])
        self._new[leaf.stable_id, leaf.depth + keep, self._stored(first)] = self._removal

    # --- why -------------------------------------------------------------------------------------

    def why(
        self,
        match: PrefixMatch | None,
        query: Any,
        token: int,
        running: Mapping[int, Any],
    ) -> PrefixMiss:
        """Return why a prompt is computed from ``token`` on, which is behind its match.

        ``running`` has the sequences that are not closed.
        """
        if match is not None and match.end_pages < match.end.size:
            return PrefixMiss("differs", token, others=1)
        pages = 0 if match is None else match.end.end
        end = root_key(query.space) if match is None else match.end.stable_id
        place = end, pages, self._page(query, pages)
        sequence = self._computes(place, running) if place in self._computing else 0
        if sequence:
            return PrefixMiss("computing", token, sequence=sequence)
        removal = self._new.get(place)
        if removal is None and self._old:
            removal = self._old.get(place)
        if removal is not None:
            return PrefixMiss("evicted", token, at=removal[0], by=removal[1])
        # Private runs behind public ones are those of all tenants.
        others = 0 if match is None or match.end.namespace.scope else len(match.end.children)
        return PrefixMiss("differs" if others else "unseen", token, others=others)

    def elsewhere(self, match: PrefixMatch | None, query: Any) -> Namespace | None:
        """Return another namespace that has the next page of a prompt; None: no other.

        Of the KV behind a public prefix, whose it is. Cost: a walk for each namespace, or a probe
        for each run behind the public prefix.
        """
        tree, pages = self._tree, 0 if match is None else len(match.pages)
        page = self._page(query, pages)
        if not tree.exact or not page:
            return None
        first = bytes(query.symbols[: tree.unit])
        for other, root in tree.roots.items():
            if first in root.children and other not in {query.space, query.namespace}:
                found = tree.trails.follow(root, query.symbols)
                if len(found.pages) > pages:
                    return other
        if match is not None and match.end_pages == match.end.size and match.end.namespace.scope:
            # Behind the tokens: a separator, and the first digest with its position, the salt.
            salt, rest = tree.unit + 2 * TOKEN_BYTES, tree.unit + 2 * TOKEN_BYTES + KEY_BYTES
            plain = page[TOKEN_BYTES : tree.unit] if len(page) == rest else b""
            for child in match.end.children.values():
                stored = self._stored(child.key) if child.key.endswith(plain) else b""
                if stored[:salt] == page[:salt] and stored[rest:] == page[rest:]:
                    return child.namespace
        return None
