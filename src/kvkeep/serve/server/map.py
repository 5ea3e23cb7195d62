"""`Maps`: the prefix tree with texts, for ``/kv/map``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvkeep.core.errors import NotCached
from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.node_tiers import NodeTiers
from kvkeep.serve.server.schemas.map import (
    MapResponse,
    NodeResponse,
    NodeSummary,
)
from kvkeep.serve.server.text import showable

if TYPE_CHECKING:
    from kvkeep.core.cache import CacheMap, MapNode
    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.server.node_tiers import TierTokens
    from kvkeep.serve.server.service import Service

__all__ = ["Maps"]

# The most characters, tokens and page ids that are shown.
_PREVIEW = 80
_LONGEST_TEXT, _LONGEST_TEXT_TOKENS = 2000, 4000
_PAGE_IDS = 100
_CHECKPOINTS = 100
# Nodes behind one that are looked at for blocks which begin in it.
_FOLLOWED = 100
_KEPT_TEXTS = 20_000
_KEPT_ANSWERS = 8


class Maps:
    """Answers about the tree of one server's cache.

    The cache returns the same map for a second or longer; its JSON is cached as long. Decoded texts
    are cached, too.

    Thread safety: all methods; two threads may make the same answer at once.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._cache = service.engine.cache
        self._tiers = NodeTiers(service.engine)
        self._answers: dict[object, tuple[CacheMap, bytes]] = {}
        self._texts: dict[bytes, str] = {}  # by the tokens

    # --- maps --------------------------------------------------------------------------------

    def map(self, salt: str | None, root: int | None, nodes: int, *, tiers: bool) -> bytes:
        """Return the map as JSON; `ApiError` 404 for an unknown ``root``."""
        space = None if salt is None else self._service.namespace(salt)
        try:
            made = self._map(space, root, nodes, tiers=tiers)
        except NotCached as error:
            raise _unknown(error) from error
        arguments = salt, root, nodes, tiers
        kept = self._answers.get(arguments)
        if kept is not None and kept[0] is made:
            return kept[1]
        known = self._tiers.of(made.nodes) if tiers else {}
        answer = MapResponse(
            page_size=made.page_size,
            at=time.time(),
            total_nodes=made.runs,
            total_pages=made.pages + made.group_pages,
            tiers=self._tiers.tiers if tiers else (),
            nodes=[self._node(node, known.get(node.id)) for node in made.nodes],
        )
        data = answer.model_dump_json().encode()
        if len(self._answers) >= _KEPT_ANSWERS:
            self._answers.clear()
        self._answers[arguments] = made, data
        return data

    def _map(
        self, space: Namespace | None, root: int | None, nodes: int, *, tiers: bool
    ) -> CacheMap:
        names = self._tiers.names if tiers else None
        return self._cache.map(space, root=root, nodes=nodes, blocks=names)

    def _node(self, node: MapNode, held: TierTokens | None) -> NodeSummary:
        size = self._cache.page_size
        return NodeSummary(
            id=node.id,
            parent=node.parent,
            tokens=node.pages * size,
            pages=node.pages + node.group_pages,
            group_pages=node.group_pages,
            checkpoints=list(node.checkpoints[-_CHECKPOINTS:]),
            subtree_tokens=node.below_pages * size,
            subtree_nodes=node.below_runs,
            references=node.holders,
            pins=node.pins,
            hits=node.hits,
            text=self._beginning(node),
            tier=None if held is None else held.tier,
            tier_tokens={} if held is None else held.tokens,
            hidden=node.hidden,
            count=node.count,
        )

    def _beginning(self, node: MapNode) -> str | None:
        if node.namespace is not None:
            return showable(node.namespace.tenant)
        if node.hidden or not self._service.settings.text:
            return None
        if node.head is None:
            return f"key {node.key.hex()}…"
        return self._text(node.head)

    def _text(self, tokens: TokenArray) -> str:
        key = tokens.tobytes()
        text = self._texts.get(key)
        if text is None:
            text = showable(self._service.tokenizer.decode(tokens.tolist()))[:_PREVIEW]
            if len(self._texts) >= _KEPT_TEXTS:
                self._texts.clear()
            self._texts[key] = text
        return text

    # --- one node ----------------------------------------------------------------------------

    def node(self, number: int) -> NodeResponse:
        """Return everything known about one node; `ApiError` 404 if it is not cached."""
        try:
            view = self._cache.node(number)
            nodes: tuple[MapNode, ...] = (view.node,)
            if self._tiers.names is not None:  # blocks that begin in it end in nodes behind it
                nodes = self._map(None, number, _FOLLOWED, tiers=True).nodes
        except NotCached as error:
            raise _unknown(error) from error
        shown = self._node(view.node, self._tiers.of(nodes).get(number)).model_dump()
        if shown["text"] is not None and view.tokens is not None and number > 0:
            tokens = view.tokens[:_LONGEST_TEXT_TOKENS].tolist()
            shown["text"] = showable(self._service.tokenizer.decode(tokens))[:_LONGEST_TEXT]
        return NodeResponse(
            **shown,
            namespace=showable(view.namespace.tenant),
            path_tokens=view.start * self._cache.page_size,
            page_ids=view.page_ids[:_PAGE_IDS].tolist(),
            policy=view.state,
            children=view.children,
        )


def _unknown(error: NotCached) -> ApiError:
    return ApiError(404, str(error), param="id", code="unknown_node")
