"""`Maps`: the prefix tree with texts, for ``/kv/map``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvkeep.core.errors import NotCached
from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.schemas.map import (
    MapResponse,
    NodeResponse,
    NodeSummary,
)
from kvkeep.serve.server.text import showable

if TYPE_CHECKING:
    from kvkeep.core.cache import MapNode
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.server.service import Service

__all__ = ["Maps"]

# The most characters, tokens and page ids that are shown.
_PREVIEW = 80
_LONGEST_TEXT, _LONGEST_TEXT_TOKENS = 2000, 4000
_PAGE_IDS = 100
_CHECKPOINTS = 100
_KEPT_TEXTS = 20_000


class Maps:
    """Answers about the tree of one server's cache.

    Decoded texts are cached. Thread safety: all methods.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._cache = service.engine.cache
        self._texts: dict[bytes, str] = {}  # by the tokens

    # --- maps --------------------------------------------------------------------------------

    def map(self, salt: str | None, root: int | None, nodes: int) -> bytes:
        """Return the map as JSON; `ApiError` 404 for an unknown ``root``."""
        space = None if salt is None else self._service.namespace(salt)
        try:
            made = self._cache.map(space, root=root, nodes=nodes)
        except NotCached as error:
            raise _unknown(error) from error
        answer = MapResponse(
            page_size=made.page_size,
            at=time.time(),
            total_nodes=made.runs,
            total_pages=made.pages + made.group_pages,
            nodes=[self._node(node) for node in made.nodes],
        )
        return answer.model_dump_json().encode()

    def _node(self, node: MapNode) -> NodeSummary:
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
        except NotCached as error:
            raise _unknown(error) from error
        shown = self._node(view.node).model_dump()
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
