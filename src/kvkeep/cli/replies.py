"""Fields of a server's JSON replies, none of which is trusted.

A number that is missing or invalid counts as 0, a missing text is empty, and every text is made
safe for a terminal (see `visible`).
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

from kvkeep.cli.drawing import visible

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["below", "cause_words", "entries", "number", "short_id", "text", "tokens_by", "whole"]

_LARGEST: Final = 1 << 62  # larger than any real counter
_SHARE: Final = re.compile(r"(?:less than )?\d+ % of all (?:re)?computed tokens: ")


def below(of: Any, name: str) -> Mapping[str, Any]:
    """Return the object at ``name``; an empty one if there is none."""
    found = of.get(name) if isinstance(of, dict) else None
    return found if isinstance(found, dict) else {}


def entries(of: Any, name: str) -> list[Mapping[str, Any]]:
    """Return the objects in the list at ``name``; other values in it are left out."""
    found = of.get(name) if isinstance(of, dict) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def number(of: Any, name: str) -> float | None:
    """Return the number at ``name``; None if it is missing, negative, infinite or too large."""
    found = of.get(name) if isinstance(of, dict) else None
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    return found if 0 <= found <= _LARGEST and math.isfinite(found) else None


def whole(of: Any, name: str) -> int:
    """Return the number at ``name`` as a count; 0 if there is none."""
    return int(number(of, name) or 0)


def text(of: Any, name: str, default: str = "") -> str:
    """Return the text at ``name``, made safe for a terminal."""
    found = of.get(name) if isinstance(of, dict) else None
    return visible(found) if isinstance(found, str) else default


def tokens_by(of: Any, name: str) -> dict[str, int]:
    """Return the token counts at ``name`` by their keys, largest first; keys are made safe."""
    found = below(of, name)
    counts = {visible(key): whole(found, key) for key in found}
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def short_id(name: str) -> str:
    """Shorten a request id to a prefix that identifies it, without ``cmpl-`` or ``chatcmpl-``."""
    bare = name.removeprefix("chat").removeprefix("cmpl-")
    return bare[:8] if bare != name else name


def cause_words(cause: Any) -> str:
    """Return the sentence of a cause in a summary, without the share it begins with."""
    sentence = text(cause, "sentence") or text(cause, "reason", "?").replace("_", " ")
    return _SHARE.sub("", sentence)
