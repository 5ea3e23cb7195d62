"""Draw a prefix tree in the terminal: which runs are shared or held, and how they rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvkeep.core.errors import require, whole
from kvkeep.core.tokens import TOKEN_DTYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.text import Text
    from rich.tree import Tree

    from kvkeep.core.extras import Extras
    from kvkeep.core.pages.pool import PageArray
    from kvkeep.core.prefix.marks import Marks
    from kvkeep.core.prefix.node import Node
    from kvkeep.core.tokens import TokenArray

__all__ = ["PrefixRun", "draw"]

_WIDTH = 48
_SHOWN_PAGES = 3
_SHOWN_POINTS = 4


class PrefixRun(NamedTuple):
    """One run of the tree, as `PagedCache.runs` lists it."""

    depth: int
    """Runs before it on its path."""
    start: int
    """Pages before it on its path."""
    pages: PageArray
    symbols: bytes
    """The symbols that the index compares: int32 tokens and marks, or 32-byte keys."""
    tokens: TokenArray | None
    """Its tokens; None for an index that stores keys."""
    children: int
    holders: int
    pins: int
    """Soft pins at its end."""
    state: str
    """How the eviction policy ranks it, in words."""
    extras: Extras = ()
    """Extras of its tokens; positions count from its first token."""
    points: tuple[int, ...] = ()
    """Pages of its path behind which requests can resume, of a cache with groups of layers."""

    @classmethod
    def of(cls, node: Node, depth: int, state: str, marks: Marks | None) -> PrefixRun:
        """Describe ``node``, ranked as ``state`` says; ``marks`` is None for keys."""
        symbols = bytes(node.run)
        tokens: TokenArray | None = None
        extras: Extras = ()
        if marks is not None:
            tokens, extras = marks.plain(np.frombuffer(symbols, TOKEN_DTYPE))
        return cls(
            depth=depth,
            start=node.depth,
            pages=node.pages.copy(),
            symbols=symbols,
            tokens=tokens,
            children=len(node.children),
            holders=node.holders,
            pins=node.pins,
            state=state,
            extras=extras,
            points=node.points,
        )


def draw(
    title: str,
    runs: Iterable[PrefixRun],
    *,
    depth: int = 8,
    branches: int = 12,
    lines: int = 5000,
    decode: Callable[[TokenArray], str] | None = None,
) -> Tree:
    """Return the runs of `PagedCache.runs` as a tree that `rich` prints.

    One line a run: tokens, pages, references, checkpoints at which requests resume, the eviction
    policy's rank, and the start of its text, as ``decode`` gives it. Runs deeper than ``depth``,
    beyond ``branches`` of one parent or beyond ``lines`` in all are counted only. Control
    characters are escaped, so no text can control the terminal.
    """
    for name, value in {"depth": depth, "branches": branches, "lines": lines}.items():
        whole(name, value, 1)
    require("rich", "cli")
    from rich.text import Text  # noqa: PLC0415 - rich comes with an extra
    from rich.tree import Tree  # noqa: PLC0415

    top = Tree(Text(title, style="bold"), guide_style="dim")
    path = [(top, False)]  # where the runs of each depth go, and whether they are left out
    more: dict[Tree, tuple[int, int]] = {}  # runs and pages left out, by where they would be
    for run in runs:
        del path[run.depth + 1 :]
        below, out = path[run.depth]
        if out or run.depth >= depth or len(below.children) >= branches or not lines:
            count, pages = more.get(below, (0, 0))
            more[below] = count + 1, pages + len(run.pages)
            path.append((below, True))
        else:
            lines -= 1
            line = _line(Text(no_wrap=True, overflow="ellipsis"), run, decode)
            path.append((below.add(line), False))
    for below, (count, pages) in more.items():
        text = f"… {count} more run{'s' * (count > 1)}, {pages} pages"
        below.add(Text(text, style="dim italic"))
    return top


def _line(line: Text, run: PrefixRun, decode: Callable[[TokenArray], str] | None) -> Text:
    pages = len(run.pages)
    ids = ",".join(map(str, run.pages[:_SHOWN_PAGES])) + ("…" if pages > _SHOWN_PAGES else "")
    count = f"{pages} page{'s' * (pages > 1)}"
    if run.tokens is not None:
        line.append(f"{len(run.tokens)} tokens", style="bold").append(f" · {count} [{ids}]")
    else:
        line.append(count, style="bold").append(f" [{ids}]")
    line.append(
        f" · {run.holders} ref{'s' * (run.holders != 1)}", "green" if run.holders else "dim"
    )
    if run.pins:
        line.append(" · pinned", style="magenta")
    if run.points:
        line.append(f" · {_resumes(run)}", style="blue")
    line.append(f" · {run.state}", style="dim")
    if run.tokens is None:
        label = f"key {run.symbols[:4].hex()}…"
    elif decode is not None:
        label = decode(run.tokens[: 4 * _WIDTH])
    else:
        label = " ".join(map(str, run.tokens[: _WIDTH // 4]))
    line.append("  " + _visible(label), style="cyan")
    return line


def _resumes(run: PrefixRun) -> str:
    """Return the last positions at which requests resume, in tokens if those are known."""
    size = 1 if run.tokens is None else len(run.tokens) // len(run.pages)
    shown = ", ".join(f"{page * size:,}" for page in run.points[-_SHOWN_POINTS:])
    more = "…, " if len(run.points) > _SHOWN_POINTS else ""
    return f"resumes at {'page ' * (run.tokens is None)}{more}{shown}"


def _visible(text: str) -> str:
    """Return one line of printable text: line breaks as ⏎, other control characters as \\x…"""
    shown = "".join(
        c if c.isprintable() else "⏎" if c == "\n" else c.encode("unicode_escape").decode()
        for c in text[: _WIDTH + 1]
    )
    return shown if len(shown) <= _WIDTH else shown[: _WIDTH - 1] + "…"
