"""Files of costs: JSON of at most a mebibyte, written as a whole."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_json", "write_json"]

_MAX_FILE: Final = 1 << 20


def read_json(path: Path) -> object:
    """Return what a JSON file holds. Raises `InvalidValue` with its name."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise InvalidValue(f"cannot read {path}: {error.strerror}") from error
    if len(text) > _MAX_FILE:
        raise InvalidValue(f"{path} has more than {_MAX_FILE:,} bytes: it is no cost file")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"{path} is not JSON") from error


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Write a JSON file whole, or leave an old one as it is. Raises `InvalidValue` with its name.

    A path that is no regular file, such as ``/dev/stdout``, is written to.
    """
    text = json.dumps(found, indent=2, allow_nan=False) + "\n"
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InvalidValue(f"cannot write {path}: {error.strerror}") from error
