"""Lines of cells and bars for `rich`, each of an exact width.

Imported only to draw, as rich is optional. Texts are not markup; callers pass text from servers and
files through `kvkeep.cli.drawing.visible` first.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from rich.text import Text

from kvkeep.cli.drawing import stacked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["REUSE", "bar", "cell", "fit", "hanging", "heading", "reuse_bar", "row"]

# Sources of tokens: glyph and style. The glyphs differ, so that colours are not needed.
REUSE: Final[dict[str, tuple[str, str]]] = {
    "reused": ("█", "green"),
    "loaded": ("▓", "cyan"),
    "computed": ("░", "yellow"),
}


def fit(text: Text, width: int) -> Text:
    """Pad ``text`` to ``width`` columns, or cut it with an ellipsis."""
    text.truncate(max(width, 0), overflow="ellipsis", pad=True)
    return text


def cell(content: str, width: int, style: str = "", *, right: bool = False) -> Text:
    """Return a text of exactly ``width`` columns."""
    text = Text(content, style, no_wrap=True, end="")
    if right and text.cell_len < width:
        text.pad_left(width - text.cell_len)
    return fit(text, width)


def row(*cells: Text, width: int) -> Text:
    """Join cells with a space between them, to ``width`` columns in all."""
    return fit(Text(" ", no_wrap=True, overflow="crop", end="").join([Text(), *cells]), width)


def hanging(
    head: Text, words: str, width: int, style: str = "", indent: int | None = None
) -> list[Text]:
    """Wrap ``words`` after ``head``; indent all lines but the first (default: to the words)."""
    indent = head.cell_len if indent is None else indent
    first = " " * (head.cell_len - indent)
    wrapped = textwrap.wrap(first + words, max(width - indent, 20), break_on_hyphens=False) or [
        first
    ]
    lines = [head.append(wrapped[0][len(first) :], style)]
    return [*lines, *(Text(" " * indent).append(more, style) for more in wrapped[1:])]


def heading(text: Text) -> Text:
    """Style a line as the heading of a section."""
    text.stylize("bold reverse")
    return text


def bar(parts: Sequence[tuple[float, str, str]], width: int) -> Text:
    """Draw a bar of parts (amount, glyph, style); blank if all amounts are 0."""
    drawn = Text(no_wrap=True, end="")
    for (_, glyph, style), cells in zip(
        parts, stacked([much for much, _, _ in parts], width), strict=True
    ):
        drawn.append(glyph * cells, style)
    return fit(drawn, width)


def reuse_bar(reused: Mapping[str, int], computed: int, width: int) -> Text:
    """Draw a bar of tokens from the pool, from tiers, and computed."""
    pool = reused.get("pool", 0)
    much = {"reused": pool, "loaded": sum(reused.values()) - pool, "computed": computed}
    return bar([(much[name], *REUSE[name]) for name in REUSE], width)
