"""`Keepers`: which tiers of the store have what the pool has, node by node of a map."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.core.cache import BlockNames

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvkeep.core.cache import MapNode
    from kvkeep.core.keys import Namespace
    from kvkeep.serve.engine import Engine

__all__ = ["POOL", "Keepers", "Kept"]

POOL = "pool"


class Kept(NamedTuple):
    """Who has a node's tokens besides the pool."""

    tier: str | None
    """The last tier that has all of them of which it can be told; ``pool`` where none has, None
    where nothing can be told."""
    tokens: dict[str, int]
    """By tier: how many of them it has in blocks."""


class Keepers:
    """Asks one engine's store, which asks nobody and reads nothing.

    A store keeps blocks, which begin and end anywhere in the runs of a tree: what a node ends with
    is of blocks that end further down. What a whole prompt or answer ends with is stored as a
    shorter piece, which has tokens that fill no page; the tree does not know them, so it cannot be
    told who has it.

    Thread safety: all methods.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        store = engine.store
        self._store = store
        # Made once: a cache tells by it that the same is asked.
        self.names = None if store is None else BlockNames(store.block_tokens, self._root)

    def _root(self, namespace: Namespace) -> bytes:
        assert self._store is not None
        return self._store.root(tenant=self._engine.store_tenant(namespace))

    @property
    def tiers(self) -> tuple[str, ...]:
        """The pool and the store's tiers, fastest first."""
        return (POOL,) if self._store is None else (POOL, *self._store.tiers)

    def of(self, nodes: Iterable[MapNode]) -> dict[int, Kept]:
        """By the ids of nodes of a map made with `names`; nothing of those that are no run."""
        runs = [node for node in nodes if node.pages and not node.hidden]
        if self._store is None:
            return {node.id: Kept(POOL, {}) for node in runs}
        told = [(node, node.blocks) for node in runs if node.blocks is not None]
        keepers = iter(self._store.keepers([name for _, own in told for name in own.names]))
        page_size = self._engine.cache.page_size
        parts = [
            _Node(node.id, node.parent, node.pages * page_size, own.before,
                  [next(keepers) for _ in own.names])
            for node, own in told
        ]  # fmt: skip
        onward = _onward(parts)
        tiers, block = self._store.tiers, self._store.block_tokens
        return {node.id: _kept(node, onward.get(node.id), tiers, block) for node in parts}


class _Node(NamedTuple):
    id: int
    parent: int | None
    tokens: int
    before: int
    """Tokens before it of the block in which it begins."""
    blocks: list[tuple[str, ...]]
    """Who has each of those that end in it."""


def _onward(nodes: Sequence[_Node]) -> dict[int, set[str]]:
    """By node: who has a block that goes on behind it; without those where none is known."""
    onward: dict[int, set[str]] = {}
    for node in reversed(nodes):  # children first
        first = {*node.blocks[0]} if node.blocks else onward.get(node.id)
        if first is not None and node.before and node.parent is not None:
            onward.setdefault(node.parent, set()).update(first)
    return onward


def _kept(node: _Node, onward: set[str] | None, tiers: Sequence[str], block: int) -> Kept:
    in_blocks = len(node.blocks) * block - node.before if node.blocks else 0
    tokens: Counter[str] = Counter()
    for number, keepers in enumerate(node.blocks):
        for tier in keepers:
            tokens[tier] += block - (0 if number else node.before)
    known = in_blocks
    if onward is not None:
        known = node.tokens
        for tier in onward:
            tokens[tier] += node.tokens - in_blocks
    whole = [tier for tier in tiers if tokens[tier] == known]
    return Kept((whole or [POOL])[-1] if known else None, {**tokens})
