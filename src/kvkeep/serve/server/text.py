"""Makes client text safe to display: characters with an effect are shown as visible signs.

Clients choose prompts, salts and session names. JSON and the dashboard's text nodes carry any text
safely, but a person may be misled by right-to-left overrides that turn a line around, escape
sequences in a terminal, and characters without width.
"""

from __future__ import annotations

import re

__all__ = ["showable", "showable_at"]

# C0, delete and C1; soft hyphen; marks and overrides of direction; spaces without width; line and
# paragraph separators; invisible operators; the byte order mark; annotations; halves of surrogate
# pairs; tags. Joiners (U+200C, U+200D) stay: scripts and emoji are written with them.
_ACTS = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
_PICTURES = 0x2400  # the block of control pictures: that of NUL, and the others of C0 in order
_DELETE, _PICTURE_OF_DELETE = 0x7F, "\u2421"
_C0 = 0x20
_BMP = 0x10000


def showable(text: str, *, lines: bool = False) -> str:
    r"""Return ``text`` with a visible sign for each character that would act instead of showing.

    Control characters become their pictures (␀ … ␡), others escapes such as ``\u202e``; the result
    can be encoded even where ``text`` has lone surrogates. With ``lines``, line feeds and tabs
    stay. Not reversible: a text may contain pictures and escapes itself.
    """
    return _ACTS.sub(_sign_in_lines if lines else _sign, text)


def showable_at(text: str, at: int) -> tuple[str, int]:
    """Return `showable`, and the offset in it of the character ``at`` of ``text``."""
    before = showable(text[:at])
    return before + showable(text[at:]), len(before)


def _sign(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < _C0:
        return chr(_PICTURES + code)
    if code == _DELETE:
        return _PICTURE_OF_DELETE
    return f"\\u{code:04x}" if code < _BMP else f"\\U{code:08x}"


def _sign_in_lines(found: re.Match[str]) -> str:
    return found[0] if found[0] in "\n\t" else _sign(found)
