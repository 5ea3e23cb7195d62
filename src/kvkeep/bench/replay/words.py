"""Figures and names as people read them."""

from __future__ import annotations

__all__ = ["amount", "count", "duration", "number", "share", "shown", "tokens"]

_SPACE = "\u00a0"  # no line break between a number and its unit
_LONGEST = 80


def shown(text: object, longest: int = _LONGEST) -> str:
    """Return a name that can be printed: invisible characters are spelt out.

    Control characters, marks of direction, lone surrogates and line breaks become ``\\u202e`` and
    the like. Cuts text longer than ``longest`` characters. Applying it twice changes nothing. Does
    not escape HTML.
    """
    whole = str(text)
    cut = whole if len(whole) <= longest else whole[: longest - 1] + "…"
    return "".join(one if one.isprintable() or one == _SPACE else _spelt(ord(one)) for one in cut)


def _spelt(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def share(part: float) -> str:
    """Format a share: ``0.136`` → 13.6 %."""
    return f"{100 * part:.1f}{_SPACE}%"


def count(amount: float) -> str:
    """Format a whole number, with thousands separators."""
    return f"{amount:,.0f}"


def number(amount: float) -> str:
    """Format a number to three significant figures."""
    if amount >= 100:
        return f"{amount:,.0f}"
    return f"{amount:.3g}"


def tokens(amount: float) -> str:
    """Format tokens: ``3_500_000`` → 3.5 M; ``16_384`` → 16.4 k."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if amount >= size * 0.9995:
            return f"{number(amount / size)}{_SPACE}{unit}"
    return f"{amount:.0f}"


def duration(seconds: float) -> str:
    """Format seconds in the largest unit of which there are 1.5 or more: ``90`` → 1.5 min."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{number(seconds / size)}{_SPACE}{unit}"
    if seconds and seconds < 1:
        return f"{number(1000 * seconds)}{_SPACE}ms"
    return f"{number(seconds)}{_SPACE}s"


def amount(tokens: int) -> str:
    """Format a size in tokens: ``1_536_000`` → 1.54 M tokens."""
    for scale, letter in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if tokens >= scale:
            return f"{tokens / scale:.3g} {letter} tokens"
    return f"{tokens} tokens"
