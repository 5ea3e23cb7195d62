"""Arguments that several commands share, and the types of their values."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, told
from kvkeep.core.geometry import KVGeometry
from kvkeep.core.geometry.units import parse_bytes, parse_count, parse_seconds, parse_wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.cli.settings import ConfigParser

    Commands = argparse._SubParsersAction[ConfigParser]

__all__ = [
    "BUNDLED_MODEL", "add_count", "add_json", "add_model_path", "add_option",
    "add_page_size", "add_path", "add_seconds", "add_switch", "byte_size", "count", "duration",
    "model_geometry", "model_name", "number", "seconds",
]  # fmt: skip

BUNDLED_MODEL = "kvkeep-tiny"
"""The name of the model that comes with kvkeep."""


# --- types -----------------------------------------------------------------------------------


def byte_size(text: str) -> int:
    """An amount of memory, for argparse's ``type=``: ``256MiB``, ``1.5GB``, plain bytes."""
    try:
        return parse_bytes(text)
    except InvalidValue as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def count(text: str) -> int:
    """A count, for argparse's ``type=``: ``4096``, ``500k``, ``3M``.

    Accepts negative counts: the range of an option is checked where its value is used.
    """
    try:
        return -parse_count(text[1:]) if text.startswith("-") else parse_count(text)
    except InvalidValue as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def number(text: str) -> float:
    """A number, for argparse's ``type=``: ``0.5``, ``-2``, ``20k``."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return float(parse_count(text))
    except InvalidValue:
        raise argparse.ArgumentTypeError(
            f"{told(text)} is no number; write for example 0.5, 12000 or 12k"
        ) from None


def seconds(text: str) -> float:
    """A time in seconds, for argparse's ``type=``: ``2.5``, or with a unit ``500ms``, ``5m``.

    Accepts 0 and less: the range of an option is checked where its value is used.
    """
    try:
        return parse_wait(text)
    except InvalidValue as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def duration(text: str) -> float:
    """A time with its unit, for argparse's ``type=``: ``12h``, ``7d``; above zero.

    For options whose plain numbers would be taken for another unit than seconds.
    """
    try:
        return parse_seconds(text)
    except InvalidValue as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# --- kinds of options --------------------------------------------------------------------------


def add_option(
    parser: argparse._ActionsContainer,
    option: str,
    help: str,
    *,
    type: Callable[[str], object] = str,
    default: object = None,
) -> None:
    """Add an option with a value: ``--users N``; the help text ends with its default, if any."""
    name, metavar = option.split(" ")
    if isinstance(default, int):
        help += f" (default: {default:,})"
    elif isinstance(default, float):
        help += f" (default: {default:g})"
    elif default not in {None, ""}:
        help += f" (default: {default})"
    parser.add_argument(name, metavar=metavar, type=type, default=default, help=help)


def add_count(
    parser: argparse._ActionsContainer, option: str, default: int, help: str, *, metavar: str = "N"
) -> None:
    """Add an option that takes a count."""
    add_option(parser, f"{option} {metavar}", help, type=count, default=default)


def add_seconds(parser: argparse._ActionsContainer, option: str, default: float, help: str) -> None:
    """Add an option that takes seconds, or a time with its unit."""
    text = f"{help} (in seconds, or as 5m; default: {default:g})"
    parser.add_argument(option, metavar="S", type=seconds, default=default, help=text)


def add_switch(parser: argparse._ActionsContainer, option: str, help: str) -> None:
    """Add an option without a value, False unless given."""
    parser.add_argument(option, action="store_true", help=help)


def add_path(
    parser: argparse._ActionsContainer, option: str, help: str, *, metavar: str = "FILE"
) -> None:
    """Add an option that takes a path, None unless given."""
    add_option(parser, f"{option} {metavar}", help, type=Path)


# --- shared options ----------------------------------------------------------------------------


def add_json(
    parser: argparse._ActionsContainer, help: str = "print one JSON object instead of text"
) -> None:
    """Add ``--json``."""
    add_switch(parser, "--json", help)


def add_model_path(parser: argparse._ActionsContainer, help: str) -> None:
    """Add ``--model`` with the help text ``help``; the default is the bundled model."""
    add_path(parser, "--model", f"{help} (default: the tiny model that kvkeep ships)",
             metavar="PATH")  # fmt: skip


def add_page_size(parser: argparse._ActionsContainer) -> None:
    """Add ``--page-size``, in tokens."""
    add_count(parser, "--page-size", 16, "tokens per page", metavar="TOKENS")


def model_geometry(path: Path) -> KVGeometry:
    """Read the geometry of the model in ``path``; say on stderr what had to be assumed."""
    geometry = KVGeometry.from_config(path)
    for note in geometry.notes:
        print(f"kvkeep: {note}", file=sys.stderr)
    return geometry


def model_name(path: Path | None) -> str:
    """Return the name of the model in ``path``; None is the bundled model."""
    return BUNDLED_MODEL if path is None else path.resolve().name
