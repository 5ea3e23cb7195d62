"""The file that ``kvkeep config example`` prints: every option as a comment."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING

from kvkeep.cli.config_connector import connector_defaults
from kvkeep.core.geometry.units import format_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from kvkeep.cli.settings import ConfigParser

__all__ = ["example"]

_WIDTH = 100
_UNGROUPED = "options"  # argparse's own group


def example(sections: Sequence[str], parsers: Mapping[str, ConfigParser]) -> Iterator[str]:
    """Yield the lines of a file with ``sections``; it is TOML as it is, and without its ``# ``."""
    yield "# Settings of kvkeep: docs/config.md. Check this file with: kvkeep config check FILE"
    for section in sections:
        yield ""
        yield f"[{section}]"
        if section == "connector":
            for name, (default, engines) in connector_defaults().items():
                only = f"  # {engines} only" if engines else ""
                yield f"# {name} = {_toml(default)}{only}"
            continue
        parser = parsers[section]
        groups: dict[str, list[argparse.Action]] = {_UNGROUPED: []}
        for action in parser.described():
            # argparse sets it; its stub does not have it.
            groups.setdefault(str(getattr(action, "container").title), []).append(action)  # noqa: B009
        for title, actions in groups.items():
            if title != _UNGROUPED:
                yield f"\n## --- {title}"
            for action in actions:
                yield from _option(parser, action)


def _option(parser: ConfigParser, action: argparse.Action) -> Iterator[str]:
    yield ""
    help_text = " ".join((action.help or "").replace("%%", "%").split())
    yield from textwrap.wrap(
        help_text, _WIDTH, initial_indent="## ", subsequent_indent="## ", break_on_hyphens=False
    )
    name = action.option_strings[0].lstrip("-")
    default = action.default
    if isinstance(default, int) and not isinstance(default, bool) and action.type is not None:
        size = getattr(action.type, "__name__", "") == "byte_size"
        default = format_bytes(default).replace(" ", "") if size else default
    if default is None or default in ([], ""):
        shown = str(action.metavar or name.upper())
        default = [shown] if parser.repeats(action) else shown
    yield f"# {name} = {_toml(default)}"


def _toml(value: object) -> str:
    """Write a value as TOML, which for these values is JSON but for None."""
    return '""' if value is None else json.dumps(value, ensure_ascii=False)
