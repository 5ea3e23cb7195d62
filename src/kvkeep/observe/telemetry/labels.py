"""Texts of clients made safe to show, and their names as labels: short, one line, distinct."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["DEFAULT", "OTHER", "label", "visible"]

_PICTURES = {**{code: 0x2400 + code for code in range(0x20)}, 0x7F: 0x2421}


def visible(text: str, *, leave: str = "") -> str:
    r"""Return ``text`` on one line, with a visible sign for each character that would act.

    Control characters become their pictures (␀ … ␡); others that are not printable, such as lone
    surrogates and changes of the writing direction, become escapes such as ``\u202e``. Characters
    in ``leave`` stay. Not reversible: a text may contain pictures and escapes itself.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in leave else _sign(ord(c)) for c in text)


def _sign(code: int) -> str:
    if code in _PICTURES:
        return chr(_PICTURES[code])
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


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
