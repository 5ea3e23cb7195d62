"""The prefix trees, drawn as text for ``/kv/map?format=text``."""

from __future__ import annotations

import io
from functools import partial
from typing import TYPE_CHECKING

from kvkeep.core.errors import require
from kvkeep.core.prefix.render import draw

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.server.service import Service

__all__ = ["drawn", "spaces"]

# The most characters of a run, namespaces and runs in all that are shown.
_PREVIEW = 80
_MOST_SPACES = 64
_WIDTH = 160
_MOST_LINES = 2000


def spaces(service: Service, salt: str | None) -> Mapping[Namespace, int]:
    """Return pages by namespace: of one ``cache_salt``, or of the 64 largest."""
    stored = service.engine.cache.namespaces()
    if salt is not None:
        one = service.namespace(salt)
        return {one: stored.get(one, 0)}
    largest = sorted(stored.items(), key=lambda item: item[1], reverse=True)
    return dict(largest[:_MOST_SPACES])


def drawn(service: Service, shown: Mapping[Namespace, int], depth: int, branches: int) -> str:
    """Draw the trees, ``depth`` runs deep and ``branches`` wide; see `draw`."""
    console = require("rich.console", "cli").Console(
        file=io.StringIO(),
        width=_WIDTH,
        highlight=False,
        legacy_windows=False,
        color_system=None,
        force_terminal=False,
    )
    decode = partial(_text, service) if service.settings.text else _nothing
    lines = _MOST_LINES // max(1, len(shown))
    for space, pages in shown.items():
        runs = service.engine.cache.runs(space)
        title = f"cache_salt {space.tenant!r}, {pages} pages of {service.engine.cache.page_size}"
        console.print(draw(title, runs, depth=depth, branches=branches, lines=lines, decode=decode))
    text: str = console.file.getvalue()
    return text or "nothing is cached\n"


def _text(service: Service, tokens: TokenArray) -> str:
    return service.tokenizer.decode(tokens[:_PREVIEW].tolist())[:_PREVIEW]


def _nothing(tokens: TokenArray) -> str:
    """Return no text: the decoder of a server that shows none."""
    del tokens
    return ""
