"""The hooks of `mkdocs.yml`: fill reference markers, inline drawings, let readers choose a version.

A page of the reference contains markers on lines of their own. They are filled when the site is
built, so that they cannot become outdated:

    <!-- kvkeep: command line -->          every command, from the parsers
    <!-- kvkeep: http -->                  every endpoint, from the OpenAPI document
    <!-- kvkeep: api kvkeep.store -->      every public name of a room, from its docstrings
    <!-- kvkeep: docstring kvkeep.core.keys --> a module's own text

The text of a link to a page becomes the title of that page.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from docs_site.api import module_text, public_names
from docs_site.commands import command_line
from docs_site.drawings import inlined
from docs_site.http import endpoints
from docs_site.links import onsite, titled

if TYPE_CHECKING:
    from collections.abc import Callable

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_MARKER = re.compile(r"^<!-- kvkeep: (?P<what>[^>]*?) -->$", re.MULTILINE)
_FILLED: dict[str, Callable[..., str]] = {
    "command line": command_line,
    "http": endpoints,
    "api": public_names,
    "docstring": module_text,
}


def on_config(config: MkDocsConfig) -> None:
    """Show a choice of versions where mike builds the site as one of several."""
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike", "default": "latest"}


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Set the text of links, and fill markers."""
    docs = Path(config.docs_dir).resolve()
    folder = (docs / page.file.src_uri).parent
    linked = titled(onsite(markdown, folder, docs), folder)
    return _MARKER.sub(lambda marker: _filled(marker["what"], page), linked)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Inline drawings, so that they take the colours of the page."""
    return inlined(html, config.docs_dir)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Label the search dialog for screen readers, which the theme omits."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')


def _filled(what: str, page: Page) -> str:
    for name, fill in _FILLED.items():
        if what == name:
            return fill()
        if what.startswith(f"{name} "):
            return fill(what.removeprefix(f"{name} "))
    raise SystemExit(f"{page.file.src_uri} asks for {what!r}; there are {', '.join(_FILLED)}")
