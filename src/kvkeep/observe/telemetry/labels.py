"""Names that clients chose, as labels and log fields: short, one line, and distinct."""

from __future__ import annotations

import hashlib
import unicodedata
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["DEFAULT", "OTHER", "label", "visible"]

OTHER: Final = "other"
"""The label of all names without their own label."""
DEFAULT: Final = "default"
"""The label of the empty name."""

_LONGEST = 64
_DIGEST = 8


def visible(text: str) -> str:
    """Return ``text`` as one line with all characters visible.

    Control characters are replaced by pictures; characters that change the direction of text, join
    it, break lines or are half of a pair, by escapes. Cost: one pass.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_shown, text))


def _shown(char: str) -> str:
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if unicodedata.category(char) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}:
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return char


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
