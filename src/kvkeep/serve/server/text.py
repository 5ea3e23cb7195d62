"""Text of others, made showable: what would act on a terminal or a reader is shown as a sign.

Prompts, salts and names of sessions are whatever a client sends. JSON carries all of it, and a page
puts it into text nodes; what is left is what a person sees: a right-to-left override that turns a
line around, an escape sequence in a terminal, letters without width.
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
    r"""``text`` with a sign in place of each character that would act instead of being seen.

    Control characters become their pictures (␀ … ␡), all others escapes as ``\u202e``, so that
    the result can be encoded, too, where ``text`` has lone surrogates. ``lines`` lets line feeds
    and tabs be. Not to be turned back: a text may have a picture or an escape in it as it stands.
    """
    return _ACTS.sub(_sign_in_lines if lines else _sign, text)


def showable_at(text: str, at: int) -> tuple[str, int]:
    """`showable`, and where the character ``at`` of ``text`` begins in the result."""
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
