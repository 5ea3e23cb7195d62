"""Files of costs: JSON of at most a mebibyte, written as a whole."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final

from kvkeep.core.errors import InvalidValue, told

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["VERSION", "OtherCostVersion", "check_version", "read_json", "write_json"]

VERSION: Final = 1
"""Version of the format: the field ``kvkeep_cost`` of every file."""
_MAX_FILE: Final = 1 << 20


class OtherCostVersion(InvalidValue):
    """A file of costs in a version of the format that this kvkeep does not read."""


def check_version(found: Mapping[str, object]) -> None:
    """Check the field ``kvkeep_cost`` of a file of costs.

    Raises:
        OtherCostVersion: it is a whole number, and not this version.
        InvalidValue: it is missing, or no version.
    """
    if "kvkeep_cost" not in found:
        raise InvalidValue(f"kvkeep_cost is missing; a file of costs has {VERSION} there")
    version = found["kvkeep_cost"]
    if type(version) is int and version == VERSION:
        return
    kind = OtherCostVersion if type(version) is int else InvalidValue
    raise kind(f"kvkeep_cost is {told(version)}; {VERSION} is needed, as `kvkeep serve` writes it")


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
