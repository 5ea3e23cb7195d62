"""``kvkeep config check``: find the mistakes in a file of settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvkeep.cli.arguments import add_json
from kvkeep.cli.config_file import ConfigFile
from kvkeep.cli.drawing import visible
from kvkeep.cli.settings import ConfigParser, file_values
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from kvkeep.cli.arguments import Commands
    from kvkeep.cli.config_file import FileValue

__all__ = ["add_parser", "run"]

_WRONG: Final = 2


def add_parser(commands: Commands) -> None:
    """Add the command, its actions and their options."""
    config = commands.add_parser(
        "config",
        help="check a file of settings",
        description="One TOML file has the settings of kvkeep serve and kvkeep route. See "
        "docs/config.md.",
    )
    actions = config.add_subparsers(title="actions", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="check a file; exit code 2 if a setting is wrong",
        description="Check the names and values in a file as the commands themselves do, and print "
        "one line for each mistake. Exit code 2 if there is one. No server is needed, and nothing "
        "is opened but files of keys.",
    )
    check.add_argument("file", metavar="FILE", type=Path, help="TOML file")
    add_json(check)
    check.set_defaults(run=run)


def _parsers() -> dict[str, ConfigParser]:
    from kvkeep.cli import section_parsers  # noqa: PLC0415 - it imports this module

    return section_parsers()


def run(args: argparse.Namespace) -> int:
    """Check the file, and print its mistakes; return 2 if there is one."""
    file = ConfigFile.read(args.file)
    checked: dict[str, int] = {}
    mistakes: list[str] = []
    parsers = _parsers()
    for name in file.sections:
        values = file.section(name)
        checked[name] = len(values)
        right: dict[str, FileValue] = {}
        for key, one in values.items():
            try:
                file_values(parsers[name], {key: one})
            except InvalidValue as error:
                mistakes.append(visible(" ".join(str(error).split())))
            else:
                right[key] = one
        found = _refused(parsers[name], right)
        mistakes += (visible(" ".join(line.split())) for line in found)
    warning = file.warning()
    if args.json:
        print(json.dumps({"file": str(args.file), "options": checked, "mistakes": mistakes,
                          "warning": warning}))  # fmt: skip
    else:
        for mistake in mistakes:
            print(f"kvkeep: error: {mistake}", file=sys.stderr)
        if warning is not None:
            print(f"kvkeep: warning: {visible(warning)}", file=sys.stderr)
        if not mistakes:
            print(f"{visible(str(args.file))}: {_counted(checked)}; all are right")
    return _WRONG if mistakes else 0


def _refused(parser: ConfigParser, values: dict[str, FileValue]) -> Iterator[str]:
    """Yield a line for each value that the command itself refuses, beside the others of the file.

    A refusal that no value of the file brings about is none of the file's: what is missing there
    may be on the command line.
    """
    while (refusal := _refusal(parser, values)) is not None:
        for key, one in values.items():
            rest = {name: other for name, other in values.items() if name != key}
            if _refusal(parser, rest) != refusal:
                yield f"{one.where}: {one.key}: {refusal}"
                values = rest
                break
        else:
            return


def _refusal(parser: ConfigParser, values: Mapping[str, FileValue]) -> str | None:
    """Return why the command would not start with these values; None if it would."""
    try:
        parser.checked(values)
    except InvalidValue as error:
        return str(error)
    return None


def _counted(checked: Mapping[str, int]) -> str:
    parts = [f"{count} option{'s' * (count != 1)} in [{name}]" for name, count in checked.items()]
    return ", ".join(parts) or "no options"
