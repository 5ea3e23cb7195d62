"""Pieces of HTML. All text that comes in is escaped here, once."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["bar", "details", "glossary", "key", "paragraphs", "scrolling", "table"]


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1) -> str:
    """A table whose first ``names`` columns are names and the others figures."""
    top = "".join(
        f'<th scope="col"{_align(at, names)}>{escape(text)}</th>' for at, text in enumerate(head)
    )
    body = "".join(f"<tr>{_row(row, names)}</tr>" for row in rows)
    return scrolling(
        f"<table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table>",
        caption,
    )


def scrolling(content: str, label: str) -> str:
    """What may be wider than the page; the keyboard reaches it to scroll."""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}">{content}</div>'
    )


def _row(row: Sequence[str], names: int) -> str:
    cells = []
    for at, text in enumerate(row):
        tag = 'th scope="row"' if at == 0 else f"td{_align(at, names)}"
        cells.append(f"<{tag}><bdi>{escape(text)}</bdi></{tag[:2]}>")
    return "".join(cells)


def _align(at: int, names: int) -> str:
    return ' class="n"' if at >= names else ""


def details(summary: str, content: str) -> str:
    """What is folded away until somebody asks."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def bar(label: str, note: str, parts: Sequence[tuple[str, float, str]]) -> str:
    """One stacked bar: (class, part of the whole, what it says) from the left."""
    drawn, at = [], 0.0
    for css, part, text in parts:
        if part > 0:
            drawn.append(
                f'<rect class="{css}" x="{1000 * at:.2f}" y="0" width="{1000 * part:.2f}" '
                f'height="1"><title>{escape(text)}</title></rect>'
            )
        at += part
    spoken = escape(f"{label}: " + "; ".join(text for _, part, text in parts if part > 0))
    return (
        f'<div class="bar"><span class="name"><bdi>{escape(label)}</bdi></span>'
        f'<svg viewBox="0 0 1000 1" preserveAspectRatio="none" role="img" aria-label="{spoken}">'
        f'{"".join(drawn)}</svg><span class="note">{escape(note)}</span></div>'
    )


def key(parts: Iterable[tuple[str, str]]) -> str:
    """What the colours of bars mean: (class, text)."""
    return '<ul class="key">' + "".join(
        f'<li><svg viewBox="0 0 1 1" aria-hidden="true"><rect class="{css}" width="1" height="1"/>'
        f"</svg>{escape(text)}</li>"
        for css, text in parts
    ) + "</ul>"  # fmt: skip


def glossary(words: Iterable[tuple[str, str]]) -> str:
    """Words and what they mean, or facts and what they are."""
    return "<dl>" + "".join(
        f"<div><dt>{escape(word)}</dt><dd><bdi>{escape(text)}</bdi></dd></div>"
        for word, text in words
    ) + "</dl>"  # fmt: skip


def paragraphs(text: str) -> str:
    """Text with blank lines between its paragraphs."""
    return "".join(f"<p>{escape(one.strip())}</p>" for one in text.split("\n\n") if one.strip())
