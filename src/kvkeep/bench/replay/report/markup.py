"""Pieces of HTML. All text goes through `escaped`."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from kvkeep.bench.replay.words import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "bar",
    "chart",
    "choice",
    "details",
    "escaped",
    "glossary",
    "key",
    "paragraphs",
    "scrolling",
    "section",
    "table",
]


_LONGEST = 4000


def escaped(given: str) -> str:
    """Escape text for an element or an attribute; invisible characters are spelt out."""
    return escape(shown(given, _LONGEST))


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1) -> str:
    """Return a table whose first ``names`` columns are names and the others figures."""
    top = "".join(
        f'<th scope="col"{_align(at, names)}>{escaped(one)}</th>' for at, one in enumerate(head)
    )
    body = "".join(f"<tr>{_row(row, names)}</tr>" for row in rows)
    return scrolling(
        f"<table><caption>{escaped(caption)}</caption><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table>",
        caption,
    )


def section(name: str, title: str, *content: str) -> str:
    """Return a section of the page, with the id ``name``; ``content`` is HTML."""
    return (
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">'
        f"{escaped(title)}</h2>{''.join(content)}</section>"
    )


def chart(name: str, title: str, note: str, behind: str = "") -> str:
    """Return the place where the page's script draws; ``behind`` is its text alternative."""
    return (
        f'<figure class="chart" data-chart="{name}"><figcaption><h3 id="{name}-chart">'
        f'{escaped(title)}</h3><p>{escaped(note)}</p></figcaption><div class="plot" tabindex="0" '
        f'role="img" aria-labelledby="{name}-chart" aria-describedby="keys"></div>'
        f'<div class="legend"></div><p class="said" aria-live="polite"></p>{behind}</figure>'
    )


def choice(name: str, label: str, options: Sequence[tuple[str, str]], first: int = 0) -> str:
    """Return a menu for the charts below it, with the entry ``first`` selected."""
    inside = "".join(
        f'<option value="{escaped(value)}"{" selected" * (at == first)}>{escaped(text)}</option>'
        for at, (value, text) in enumerate(options)
    )
    chosen = f'<select id="{name}">{inside}</select>'
    return f'<p class="choice"><label>{escaped(label)} {chosen}</label></p>'


def scrolling(content: str, label: str) -> str:
    """Wrap content that may be wider than the page, so that the keyboard can scroll it."""
    name = escaped(label)
    return f'<div class="wide" tabindex="0" role="region" aria-label="{name}">{content}</div>'


def _row(row: Sequence[str], names: int) -> str:
    cells = []
    for at, text in enumerate(row):
        tag = 'th scope="row"' if at == 0 else f"td{_align(at, names)}"
        cells.append(f"<{tag}><bdi>{escaped(text)}</bdi></{tag[:2]}>")
    return "".join(cells)


def _align(at: int, names: int) -> str:
    return ' class="n"' if at >= names else ""


def details(summary: str, content: str) -> str:
    """Return content that is folded away until it is opened."""
    return f"<details><summary>{escaped(summary)}</summary>{content}</details>"


def bar(label: str, note: str, parts: Sequence[tuple[str, float, str]]) -> str:
    """Return a stacked bar of (class, share, text) from the left."""
    drawn, at = [], 0.0
    for css, part, text in parts:
        if part > 0:
            drawn.append(
                f'<rect class="{css}" x="{1000 * at:.2f}" y="0" width="{1000 * part:.2f}" '
                f'height="1"><title>{escaped(text)}</title></rect>'
            )
        at += part
    spoken = escaped(f"{label}: " + "; ".join(text for _, part, text in parts if part > 0))
    return (
        f'<div class="bar"><span class="name"><bdi>{escaped(label)}</bdi></span>'
        f'<svg viewBox="0 0 1000 1" preserveAspectRatio="none" role="img" aria-label="{spoken}">'
        f'{"".join(drawn)}</svg><span class="note">{escaped(note)}</span></div>'
    )


def key(parts: Iterable[tuple[str, str]]) -> str:
    """Return a legend of colours: (class, text)."""
    return '<ul class="key">' + "".join(
        f'<li><svg viewBox="0 0 1 1" aria-hidden="true"><rect class="{css}" width="1" height="1"/>'
        f"</svg>{escaped(text)}</li>"
        for css, text in parts
    ) + "</ul>"  # fmt: skip


def glossary(words: Iterable[tuple[str, str]]) -> str:
    """Return a list of terms and their descriptions."""
    return "<dl>" + "".join(
        f"<div><dt>{escaped(word)}</dt><dd><bdi>{escaped(text)}</bdi></dd></div>"
        for word, text in words
    ) + "</dl>"  # fmt: skip


def paragraphs(text: str) -> str:
    """Return text as paragraphs, which blank lines separate; line breaks are kept."""
    found = re.split(r"\n\s*\n", text.strip())
    return "".join(
        f"<p>{'<br>'.join(escaped(line) for line in one.splitlines())}</p>" for one in found
    )
