"""`visible`: texts of clients, files and servers, made safe to show."""

from __future__ import annotations

__all__ = ["visible"]

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
