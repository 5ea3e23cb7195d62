"""Drawings that take the colours of the page.

A drawing is a file that can be looked at by itself: its own style knows light and dark by what the
system says. On the site a reader can choose otherwise, so there the drawing becomes a part of the
page, without its style, and ``assets/site.css`` colours it.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["inlined"]

_IMAGE = re.compile(r'<p>\s*<img alt="[^"]*" src="[^"]*drawings/(?P<name>[^"/]+\.svg)" ?/>\s*</p>')
_STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)


def inlined(html: str, docs: str) -> str:
    """The page with each drawing in place of the image that names it."""
    return _IMAGE.sub(lambda image: _drawing(Path(docs) / "drawings" / image["name"]), html)


def _drawing(file: Path) -> str:
    text = _STYLE.sub("", file.read_text(encoding="utf-8"))
    return f'<figure class="drawing">{text.strip()}</figure>'
