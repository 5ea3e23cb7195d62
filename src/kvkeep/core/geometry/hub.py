"""`download_hint`: what to do about a name on the Hugging Face hub in place of a directory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import os

__all__ = ["download_hint"]

_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,95}", re.ASCII)


def download_hint(path: str | os.PathLike[str]) -> str:
    """Return the end of a message about ``path``, where no model is.

    It says how to get the files if ``path`` may be a name on the hub: two parts, and nothing is
    there. Otherwise it is empty. Uses no network.
    """
    name = str(path)
    if not _NAME.fullmatch(name) or Path(path).exists():
        return ""
    folder = name.partition("/")[2]
    return (
        f"; a local directory is needed. If {name} is a name on the Hugging Face hub, get its "
        f"files with: hf download {name} --local-dir {folder}"
    )
