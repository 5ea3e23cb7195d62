"""What our docstrings say in a way that is no Markdown is said to the site in one that is."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Plainly"]

_UNDERLINED = re.compile(r"^(?P<title>[A-Z]\w+)\n-{3,}\n", re.MULTILINE)
_CODE = re.compile(r"``([^`]+)``")


class Plainly(griffe.Extension):
    """Turn underlined titles into bold lines, to keep them out of the table of contents."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Handle one object of the package."""
        if obj.docstring is not None:
            text = _UNDERLINED.sub(r"", obj.docstring.value)
            obj.docstring.value = _CODE.sub(r"`\1`", text)
