"""The prefix trees for ``/kv/tree``: as JSON, and drawn as text."""

from __future__ import annotations

import io
from functools import partial
from typing import TYPE_CHECKING

from kvkeep.core.errors import require
from kvkeep.core.prefix.render import draw
from kvkeep.serve.server.schemas.kv import Hidden, KVTree, Run, Space
from kvkeep.serve.server.text import showable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvkeep.core.keys import Namespace
    from kvkeep.core.prefix.results import PrefixRun as StoredRun
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.server.service import Service

__all__ = ["as_json", "as_text", "spaces"]

# The most characters of a run and namespaces that are shown.
_PREVIEW = 80
_MOST_SPACES = 64
_WIDTH = 160


def spaces(service: Service, salt: str | None) -> Mapping[Namespace, int]:
    """Return pages by namespace: of one ``cache_salt``, or of the 64 largest."""
    stored = service.engine.cache.namespaces()
    if salt is not None:
        one = service.namespace(salt)
        return {one: stored.get(one, 0)}
    largest = sorted(stored.items(), key=lambda item: item[1], reverse=True)
    return dict(largest[:_MOST_SPACES])


def as_json(service: Service, shown: Mapping[Namespace, int], depth: int, branches: int) -> KVTree:
    """Return the trees, ``depth`` runs deep and ``branches`` wide; other runs are counted."""
    cache = service.engine.cache
    return KVTree(
        page_size=cache.page_size,
        namespaces=[
            _space(service, space, pages, depth, branches) for space, pages in shown.items()
        ],
    )


def as_text(service: Service, shown: Mapping[Namespace, int], depth: int, branches: int) -> str:
    """Return the trees as text; see `kvkeep.core.prefix.render`."""
    console = require("rich.console", "cli").Console(
        file=io.StringIO(), width=_WIDTH, highlight=False, legacy_windows=False
    )
    decode = partial(_text, service) if service.settings.text else _nothing
    for space, pages in shown.items():
        runs = service.engine.cache.runs(space)
        title = f"cache_salt {space.tenant!r}, {pages} pages of {service.engine.cache.page_size}"
        console.print(draw(title, runs, depth=depth, branches=branches, decode=decode))
    text: str = console.file.getvalue()
    return text or "nothing is cached\n"


def _space(service: Service, space: Namespace, pages: int, depth: int, branches: int) -> Space:
    top = Space(cache_salt=showable(space.tenant), num_pages=pages, runs=[])
    path: list[Space | Run] = [top]  # the ancestors of the current run
    skip: int | None = None  # the depth of a run that was left out, and so are all runs below it
    for stored in service.engine.cache.runs(space):
        if skip is not None and stored.depth > skip:
            _hide(path[skip], stored)
            continue
        skip = None
        del path[stored.depth + 1 :]
        parent = path[stored.depth]
        if stored.depth >= depth or len(parent.runs) >= branches:
            _hide(parent, stored)
            skip = stored.depth
            continue
        run = _run(service, stored)
        path.append(run)
        parent.runs.append(run)
    return top


def _run(service: Service, stored: StoredRun) -> Run:
    return Run(
        num_tokens=len(stored.pages) * service.engine.cache.page_size,
        num_pages=len(stored.pages),
        references=stored.holders,
        pins=stored.pins,
        policy=stored.state,
        text=_beginning(service, stored),
        runs=[],
    )


def _beginning(service: Service, stored: StoredRun) -> str | None:
    if stored.tokens is None:
        return f"key {stored.symbols[:4].hex()}…"
    return showable(_text(service, stored.tokens)) if service.settings.text else None


def _text(service: Service, tokens: TokenArray) -> str:
    return service.tokenizer.decode(tokens[:_PREVIEW].tolist())[:_PREVIEW]


def _nothing(tokens: TokenArray) -> str:
    """Return no text: the decoder of a server that shows none."""
    del tokens
    return ""


def _hide(parent: Space | Run, stored: StoredRun) -> None:
    before = parent.hidden or Hidden(runs=0, pages=0)
    parent.hidden = Hidden(runs=before.runs + 1, pages=before.pages + len(stored.pages))
