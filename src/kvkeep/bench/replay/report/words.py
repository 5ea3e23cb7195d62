"""Figures and names as people read them."""

from __future__ import annotations

__all__ = ["count", "duration", "money", "number", "share", "shown", "tokens"]

_SPACE = "\u00a0"  # between a number and its unit no line breaks
_LONGEST = 80


def shown(text: object, longest: int = _LONGEST) -> str:
    """A name as it can be printed: what is invisible or turns the line around is spelt out.

    Control characters, marks of direction, lone surrogates and line breaks become ``\\u202e`` and
    the like. What is longer than ``longest`` characters is cut; what was shown once is not changed
    again. Not escaped for HTML.
    """
    whole = str(text)
    cut = whole if len(whole) <= longest else whole[: longest - 1] + "…"
    return "".join(one if one.isprintable() or one == _SPACE else _spelt(ord(one)) for one in cut)


def _spelt(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def share(part: float) -> str:
    """``0.136`` → 13.6 %."""
    return f"{100 * part:.1f}{_SPACE}%"


def count(amount: float) -> str:
    """A whole number, with its thousands apart."""
    return f"{amount:,.0f}"


def number(amount: float) -> str:
    """To three figures that matter, with no zeros behind them."""
    if amount >= 100:
        return f"{amount:,.0f}"
    return f"{amount:.3g}"


def tokens(amount: float) -> str:
    """``3_500_000`` → 3.5 M; ``16_384`` → 16.4 k; below a thousand as it is."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if amount >= size * 0.9995:
            return f"{number(amount / size)}{_SPACE}{unit}"
    return f"{amount:.0f}"


def duration(seconds: float) -> str:
    """``90`` → 1.5 min, in the largest unit of which it is more than one and a half."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{number(seconds / size)}{_SPACE}{unit}"
    if seconds and seconds < 1:
        return f"{number(1000 * seconds)}{_SPACE}ms"
    return f"{number(seconds)}{_SPACE}s"


def money(amount: float, currency: str) -> str:
    """In whole units of the currency where it is a hundred or more."""
    return (
        f"{shown(currency, 8)}{amount:,.0f}"
        if amount >= 100
        else f"{shown(currency, 8)}{amount:,.2f}"
    )
