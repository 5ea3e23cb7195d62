"""Inline drawings, so that they take the colours of the page.

A drawing is an SVG file whose own style follows the system's light or dark mode. On the site a
reader can choose another mode, so the drawing becomes a part of the page, without its style, and
``assets/site.css`` colours it.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["inlined"]

_IMAGE = re.compile(r'<p>\s*<img alt="[^"]*" src="[^"]*drawings/(?P<name>[^"/]+\.svg)" ?/>\s*</p>')
_STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)


def inlined(html: str, docs: str) -> str:
    """Replace each image of a drawing by the drawing."""
    return _IMAGE.sub(lambda image: _drawing(Path(docs) / "drawings" / image["name"]), html)


def _drawing(file: Path) -> str:
    text = _STYLE.sub("", file.read_text(encoding="utf-8"))
    return f'<figure class="drawing">{text.strip()}</figure>'
