"""Names that clients chose, as labels and log fields: short, one line, and distinct."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from kvkeep.observe.telemetry.visible import visible

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["DEFAULT", "OTHER", "label"]

OTHER: Final = "other"
"""The label of all names without their own label."""
DEFAULT: Final = "default"
"""The label of the empty name."""

_LONGEST = 64
_DIGEST = 8


def label(name: str, *, reserved: Iterable[str] = (OTHER, DEFAULT)) -> str:
    """Return ``name`` as the value of a label: at most 64 characters, all of them visible.

    A name that was changed, or is ``reserved``, gets a digest at its end, so that two names never
    share a label. The empty name is "default".
    """
    if not name:
        return DEFAULT
    shown = visible(name)
    if shown == name and len(name) <= _LONGEST and name not in reserved:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]
    return f"{shown[: _LONGEST - _DIGEST - 1]}~{digest}"
