"""Makes client text safe to display in JSON answers: see `kvkeep.observe.telemetry.labels`.

Spaces of all widths and joiners stay: scripts and emoji are written with them.
"""

from __future__ import annotations

from kvkeep.observe.telemetry.labels import visible

__all__ = ["showable", "showable_at"]

_LEAVE = "\u200c\u200d\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
_LEAVE += "\u202f\u205f\u3000"


def showable(text: str) -> str:
    """Return ``text`` with a visible sign for each character that would act instead of showing."""
    return visible(text, leave=_LEAVE)


def showable_at(text: str, at: int) -> tuple[str, int]:
    """Return `showable`, and the offset in it of the character ``at`` of ``text``."""
    before = showable(text[:at])
    return before + showable(text[at:]), len(before)
