"""``kvkeep config``: show, check and begin a file of settings."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvkeep.cli.arguments import add_json, add_path, byte_size
from kvkeep.cli.config_connector import connector_options, connector_rows
from kvkeep.cli.config_example import example
from kvkeep.cli.drawing import visible
from kvkeep.cli.parsing import Parser
from kvkeep.cli.settings import CONFIG_VARIABLE, ConfigParser, chosen_file, file_values
from kvkeep.core.config_file import SECTIONS, ConfigFile
from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvkeep.cli.arguments import Commands
    from kvkeep.cli.settings import Setting
    from kvkeep.core.config_file import FileValue

__all__ = ["add_parser", "run"]

_WRONG: Final = 2
_WIDEST: Final = 60  # columns of values


class _ShowParser(Parser):
    """Parses the words behind a section: its own options, and leaves the others in ``words``."""

    def parse_known_args(  # type: ignore[override]  # argparse has overloads for namespaces
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        found, rest = argparse.ArgumentParser.parse_known_args(self, args, namespace)
        found.words = rest
        return found, []


def add_parser(commands: Commands) -> None:
    """Add the command, its actions and their options."""
    config = commands.add_parser(
        "config",
        help="show where settings come from, and check a file of settings",
        description="One TOML file has the settings of kvkeep serve, kvkeep route and engines with "
        "kvkeep inside. See docs/config.md.",
    )
    actions = config.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = actions.add_parser(
        "show",
        help="show each option, its value, and where it is from",
        description="Show each option of a section, its value, and where the value is from: the "
        "command line, the environment, a line of the file, or the default. Secrets are not shown.",
    )
    add_path(show, "--config", f"TOML file (default: ${CONFIG_VARIABLE})")
    _add_shape(show, default=False)
    show.set_defaults(run=run, action=_show, section=None, words=[])
    sections = show.add_subparsers(
        title="sections", metavar="SECTION", dest="section", parser_class=_ShowParser
    )
    for name in SECTIONS:
        what = f"kvkeep {name}" if name != "connector" else "vLLM's and SGLang's connectors"
        section = sections.add_parser(
            name,
            help=f"options of {what} (default: the sections of the file)",
            description=f"Show the options of {what}"
            + (f"; takes all options of {what} as well." if name != "connector" else "."),
            allow_abbrev=False,
        )
        _add_shape(section, default=argparse.SUPPRESS)
    check = actions.add_parser(
        "check",
        help="check a file; exit code 2 if a setting is wrong",
        description="Check the names and values in a file as the commands themselves do, and print "
        "one line for each mistake. Exit code 2 if there is one. No server is needed, and nothing "
        "is opened but files of keys.",
    )
    check.add_argument("file", metavar="FILE", type=Path, help="TOML file")
    add_json(check)
    check.set_defaults(run=run, action=_check)
    begin = actions.add_parser(
        "example",
        help="print a file with all options as comments",
        description="Print a file of settings with every option, its help and its default, as "
        "comments.",
    )
    begin.add_argument("only", metavar="SECTION", nargs="?", choices=SECTIONS,
                       help=f"one of {', '.join(SECTIONS)} (default: all)")  # fmt: skip
    begin.set_defaults(run=run, action=_example)


def _add_shape(parser: argparse.ArgumentParser, *, default: object) -> None:
    """Add ``--json`` and ``--changed``; both parsers of a word may have them, so with a default."""
    for option, text in (
        ("--json", "print one JSON object instead of text"),
        ("--changed", "leave out options that have their default"),
    ):
        parser.add_argument(option, action="store_true", default=default, help=text)


def run(args: argparse.Namespace) -> int:
    """Run the action."""
    code: int = args.action(args)
    return code


@dataclass(frozen=True, slots=True)
class Row:
    """An option to show; ``value`` has no secrets."""

    name: str
    value: object
    source: str
    text: str = ""  # of the value, if it differs


def _parsers() -> dict[str, ConfigParser]:
    from kvkeep.cli import section_parsers  # noqa: PLC0415 - it imports this module

    return section_parsers()


# --- show --------------------------------------------------------------------------------------


def _show(args: argparse.Namespace) -> int:
    words: list[str] = list(args.words)
    if args.config is not None:
        words = ["--config", str(args.config), *words]
    names: Sequence[str] = (args.section,)
    if args.section is None:
        file = chosen_file(args.config)
        if file is None:
            raise InvalidValue(
                f"name a section, one of {', '.join(SECTIONS)}, or a file: --config FILE"
            )
        names = file.sections
    shown: dict[str, dict[str, Any]] = {}
    for name in names:
        rows, file = _rows(name, words)
        if args.changed:
            rows = [row for row in rows if row.source != "default"]
        shown[name] = {
            "file": None if file is None else str(file.path),
            "options": [
                {"option": row.name, "value": row.value, "source": row.source} for row in rows
            ],
        }
        if not args.json:
            _print(name, rows, file)
    if args.json:
        print(json.dumps(shown, default=str))
    return 0


def _rows(section: str, words: Sequence[str]) -> tuple[list[Row], ConfigFile | None]:
    """Return the options of a section. Raises `InvalidValue` for a mistake in the words or file."""
    if section == "connector":
        parser = ConfigParser(prog="kvkeep config show connector")
        add_path(parser, "--config", "TOML file")
        given = parser.parse_args(list(words))
        file = chosen_file(given.config)
        values = {} if file is None else file.section(section)
        return [Row(name, value, source) for name, value, source in connector_rows(values)], file
    parser = _parsers()[section]
    found, rest, file = parser.settings(words)
    if rest:
        raise InvalidValue(f"{' '.join(rest)} is no option; kvkeep {section} --help lists all")
    return [Row(one.name, one.shown, one.source, _size(one)) for one in found], file


def _size(one: Setting) -> str:
    """Return an amount of memory with its unit; empty for another value."""
    if one.action.type is not byte_size or not isinstance(one.value, int):
        return ""
    text = format_bytes(one.value).replace(" ", "")
    return text if parse_bytes(text) == one.value else ""


def _print(section: str, rows: Sequence[Row], file: ConfigFile | None) -> None:
    print(f"[{section}]" if file is None else f"[{section}] of {visible(str(file.path))}")
    cells = [(row.name, row.text or _text(row.value), visible(row.source)) for row in rows]
    first = max((len(name) for name, _, _ in cells), default=0)
    second = min(max((len(value) for _, value, _ in cells), default=0), _WIDEST)
    for name, value, source in cells:
        print(f"  {name:{first}}  {value:{second}}  {source}")


def _text(value: object) -> str:
    if value is None or value == []:
        return "–"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return visible(f"{value:g}" if isinstance(value, float) else str(value))


# --- check -------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> int:
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
                if name == "connector":
                    connector_options({key: one})
                else:
                    file_values(parsers[name], {key: one})
            except InvalidValue as error:
                mistakes.append(visible(" ".join(str(error).split())))
            else:
                right[key] = one
        if name != "connector":
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


# --- example -----------------------------------------------------------------------------------


def _example(args: argparse.Namespace) -> int:
    names = SECTIONS if args.only is None else (args.only,)
    print("\n".join(example(names, _parsers())))
    return 0
