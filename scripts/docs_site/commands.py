"""The command line as Markdown: every command, argument and option that the parsers know."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from kvkeep.cli import _parser

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["command_line", "commands"]

_WIDTH = "100"


def command_line() -> str:
    """Return a section for each command."""
    return "\n\n".join(_section(name, parser) for name, parser in commands())


def commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every command by its full name, such as ``kvkeep store ls``, with its parser."""
    yield from _below("kvkeep", _parser())


def _below(
    name: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                yield f"{name} {word}", command
                yield from _below(f"{name} {word}", command)


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    deep = name.count(" ") > 1
    parts = [f"{'###' if deep else '##'} {name}", _sentence(parser.description or "")]
    parts.append(f"```text\n{_usage(name, parser)}\n```")
    rows = [row for group in parser._action_groups for row in _rows(parser, group)]
    if rows:
        parts.append("\n".join(["| | |", "|---|---|", *rows]))
    return "\n\n".join(part for part in parts if part)


def _usage(name: str, parser: argparse.ArgumentParser) -> str:
    """Return the usage line with required arguments; options are in a table."""
    words = [name]
    optional = False
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words.append("COMMAND")
        elif action.option_strings and not action.required:
            optional = True
        else:
            words.append(_shown(action))
    return " ".join([*words, "[OPTIONS]"] if optional else words)


def _rows(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> Iterator[str]:
    usual = group in (parser._positionals, parser._optionals)
    actions = [
        action
        for action in group._group_actions
        if not isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
        and action.help is not argparse.SUPPRESS
    ]
    if actions and not usual:
        yield f"| **{_cell(group.title or '')}** | {_cell(group.description or '')} |"
    for action in actions:
        help_text = parser._get_formatter()._expand_help(action) if action.help else ""
        yield f"| `{_shown(action).replace('|', '&#124;')}` | {_cell(_sentence(help_text))} |"


def _shown(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else _value(action)
    if not action.option_strings:
        return value
    return f"{', '.join(action.option_strings)} {value}".strip()


def _value(action: argparse.Action) -> str:
    name = action.metavar
    if name is None and action.choices is not None:
        name = "{" + ",".join(map(str, action.choices)) + "}"
    if name is None:
        name = action.dest if not action.option_strings else action.dest.upper()
    text = name if isinstance(name, str) else " ".join(name)
    return f"{text}…" if action.nargs in {"+", "*"} else text


def _sentence(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _cell(text: str) -> str:
    """Escape text for a table cell."""
    return re.sub(r"([\\`*_<>|\[\]{}#])", lambda found: f"&#{ord(found[1])};", text)
