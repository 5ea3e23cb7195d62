"""`NodeTiers`: which tiers of the store hold the tokens of a map's nodes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.core.cache import BlockNames

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvkeep.core.cache import MapNode
    from kvkeep.core.keys import Namespace
    from kvkeep.serve.engine import Engine

__all__ = ["POOL", "NodeTiers", "TierTokens"]

POOL = "pool"


class TierTokens(NamedTuple):
    """The tiers that hold a node's tokens besides the pool."""

    tier: str | None
    """The last tier that holds all tokens known to it; ``pool`` if none does, None if unknown."""
    tokens: dict[str, int]
    """By tier: the node's tokens that are in its blocks."""


class NodeTiers:
    """Looks up nodes in the catalogues of one engine's store; reads no block, queries no tier.

    A store's blocks begin and end anywhere in the runs of a tree: the last tokens of a node belong
    to blocks that end in nodes behind it. The tail of a prompt or answer is stored as a shorter
    block, whose last tokens may fill no page. The tree lacks such tokens, so the tiers of a tail
    are unknown.

    Thread safety: all methods.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        store = engine.store
        self._store = store
        self.names = None if store is None else BlockNames(store.block_tokens, self._root)

    def _root(self, namespace: Namespace) -> bytes:
        assert self._store is not None
        return self._store.root(tenant=self._engine.store_tenant(namespace))

    @property
    def tiers(self) -> tuple[str, ...]:
        """The names of the pool and the store's tiers, fastest first."""
        return (POOL,) if self._store is None else (POOL, *self._store.tiers)

    def of(self, nodes: Iterable[MapNode]) -> dict[int, TierTokens]:
        """Return the tiers by node id, for runs of a map made with `names`."""
        runs = [node for node in nodes if node.pages and not node.hidden]
        if self._store is None:
            return {node.id: TierTokens(POOL, {}) for node in runs}
        known = [(node, node.blocks) for node in runs if node.blocks is not None]
        tiers_of = iter(self._store.keepers([name for _, own in known for name in own.names]))
        page_size = self._engine.cache.page_size
        parts = [
            _Node(node.id, node.parent, node.pages * page_size, own.before,
                  [next(tiers_of) for _ in own.names])
            for node, own in known
        ]  # fmt: skip
        onward = _onward(parts)
        tiers, block = self._store.tiers, self._store.block_tokens
        return {node.id: _kept(node, onward.get(node.id), tiers, block) for node in parts}


class _Node(NamedTuple):
    id: int
    parent: int | None
    tokens: int
    before: int
    """Tokens before the node that belong to the block in which the node begins."""
    blocks: list[tuple[str, ...]]
    """For each block that ends in the node, the tiers that hold the block."""


def _onward(nodes: Sequence[_Node]) -> dict[int, set[str]]:
    """Return, by node, the tiers with a block that continues behind the node, if any is known."""
    onward: dict[int, set[str]] = {}
    for node in reversed(nodes):  # children first
        first = {*node.blocks[0]} if node.blocks else onward.get(node.id)
        if first is not None and node.before and node.parent is not None:
            onward.setdefault(node.parent, set()).update(first)
    return onward


def _kept(node: _Node, onward: set[str] | None, tiers: Sequence[str], block: int) -> TierTokens:
    in_blocks = len(node.blocks) * block - node.before if node.blocks else 0
    tokens: Counter[str] = Counter()
    for number, tiers_of_block in enumerate(node.blocks):
        for tier in tiers_of_block:
            tokens[tier] += block - (0 if number else node.before)
    known = in_blocks
    if onward is not None:
        known = node.tokens
        for tier in onward:
            tokens[tier] += node.tokens - in_blocks
    whole = [tier for tier in tiers if tokens[tier] == known]
    return TierTokens((whole or [POOL])[-1] if known else None, {**tokens})
