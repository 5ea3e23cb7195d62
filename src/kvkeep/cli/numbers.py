"""Numbers of the command line, read in one way."""

from __future__ import annotations

import argparse

from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry.units import parse_bytes, parse_count

__all__ = ["amount", "count"]


def amount(text: str) -> int:
    """An amount of memory for argparse's ``type=``: ``256MiB``, ``1.5GB``, plain bytes."""
    try:
        return parse_bytes(text)
    except InvalidValue as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def count(text: str) -> int:
    """A count for argparse's ``type=``: ``4096``, ``500k``, ``3M``.

    A negative one passes: what an option may be is said by whoever uses it.
    """
    try:
        return -parse_count(text[1:]) if text.startswith("-") else parse_count(text)
    except InvalidValue as error:
        raise argparse.ArgumentTypeError(str(error)) from error
