"""Links that beside the files lead to files, and on the site to pages.

The text of one is a file's name there and a page's title here. What lies outside of ``docs`` is not
on the site: of a link to it the path is left, which is what a reader with the files needs.
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
    """The page with each link to ``page.md`` named after what it leads to."""

    def named(link: re.Match[str]) -> str:
        headings = _headings((folder / link["path"]).resolve())
        text = headings.get(link["name"] or "", link["text"])
        return link[0].replace(f"[{link['text']}]", f"[{text}]", 1)

    return _LINK.sub(named, markdown)


def onsite(markdown: str, folder: Path, docs: Path) -> str:
    """The page with each link to a file outside of ``docs`` as that file's path."""

    def path(link: re.Match[str]) -> str:
        target = (folder / link["path"]).resolve()
        if target.is_relative_to(docs) or not target.exists():
            return link[0]
        shown = f"`{target.relative_to(docs.parent)}`"
        return shown if link["text"].strip("`") in shown else f"{link['text']} ({shown})"

    return _ANY.sub(path, markdown)


@cache
def _headings(page: Path) -> dict[str, str]:
    """The headings of a page by their anchors; the first is the page's own, under no anchor."""
    if not page.is_file():
        return {}  # mkdocs says what is wrong with the link
    found: dict[str, str] = {}
    for heading in _HEADING.finditer(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        text = heading["text"].strip()
        found.setdefault("", text)
        found.setdefault(slugify(text.replace("`", ""), "-"), text)
    return found
