"""Rewrite links between files to links between pages.

In the files the text of such a link is a file name; on the site it is the title of the page. Files
outside ``docs`` are not on the site: a link to one becomes its path.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from markdown.extensions.toc import slugify  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["onsite", "titled"]

_LINK = re.compile(r"\[(?P<text>[\w-]+\.md)\]\((?P<path>[^)#\s]+\.md)(?:#(?P<name>[^)\s]+))?\)")
_ANY = re.compile(r"\[(?P<text>[^\]\n]+)\]\((?P<path>\.\./[^)#\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<text>.+)$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def titled(markdown: str, folder: Path) -> str:
    """Set the text of each link to ``page.md`` to the title of its target."""

    def named(link: re.Match[str]) -> str:
        headings = _headings((folder / link["path"]).resolve())
        text = headings.get(link["name"] or "", link["text"])
        return link[0].replace(f"[{link['text']}]", f"[{text}]", 1)

    return _LINK.sub(named, markdown)


def onsite(markdown: str, folder: Path, docs: Path) -> str:
    """Replace each link to a file outside ``docs`` by the path of the file."""

    def path(link: re.Match[str]) -> str:
        target = (folder / link["path"]).resolve()
        if target.is_relative_to(docs) or not target.exists():
            return link[0]
        shown = f"`{target.relative_to(docs.parent)}`"
        return shown if link["text"].strip("`") in shown else f"{link['text']} ({shown})"

    return _ANY.sub(path, markdown)


@cache
def _headings(page: Path) -> dict[str, str]:
    """Return the headings of a page by anchor; the title is under the empty anchor."""
    if not page.is_file():
        return {}  # mkdocs says what is wrong with the link
    found: dict[str, str] = {}
    for heading in _HEADING.finditer(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        text = heading["text"].strip()
        found.setdefault("", text)
        found.setdefault(slugify(text.replace("`", ""), "-"), text)
    return found
