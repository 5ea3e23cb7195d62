"""Values of options from the command line, the environment and a file, and where each is from.

The parsers of `kvkeep serve` and `kvkeep route` are the only list of options: a file has their
names without the dashes, and its values pass through the same conversions and checks.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kvkeep.cli.arguments import add_path
from kvkeep.cli.config_file import ConfigFile, masked
from kvkeep.core.errors import InvalidValue, did_you_mean, told

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvkeep.cli.config_file import FileValue

__all__ = ["CONFIG_VARIABLE", "ConfigParser", "Parser", "Setting", "chosen_file", "file_values"]

_NUMBER: Final = re.compile(r"-\.?\d")
_ALSO_CALLED: Final = {"--policy": "--eviction", "--eviction": "--policy"}  # in other commands


class Parser(argparse.ArgumentParser):
    """Parses the words of a command; raises `InvalidValue` for a mistake, and never exits for one.

    Parsers of commands below it are of this class as well.
    """

    def parse_known_args(  # type: ignore[override]  # argparse has overloads for namespaces
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse; a word that is no option of this command is refused before any is read."""
        words = sys.argv[1:] if args is None else list(args)
        self._refuse_unknown(words)
        parsed, extra = super().parse_known_args(words, namespace)
        if extra:  # here and not in argparse, which would name the help of all commands
            self.error(f"unrecognized arguments: {' '.join(extra)}")
        return parsed, extra

    def error(self, message: str) -> NoReturn:
        """Raise `InvalidValue`; where the message names no argument, with how to list them."""
        more = "" if message.startswith("argument ") else f"; {self.prog} --help lists all"
        raise InvalidValue(message + more)

    @property
    def options(self) -> Iterator[str]:
        """Every option as it is written: ``--port``."""
        return (option for action in self._actions for option in action.option_strings)

    def repeats(self, action: argparse.Action) -> bool:
        """Whether an option may be given several times, for a list of values."""
        kind: type[argparse.Action] = self._registry_get("action", "append")
        return isinstance(action, kind)

    def check_choice(self, action: argparse.Action, value: object) -> None:
        """Raise `argparse.ArgumentError` for a value that is none of the action's choices."""
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        raise argparse.ArgumentError(
            action, f"{told(value)} is none of {', '.join(names)}{did_you_mean(str(value), names)}"
        )

    _check_value = check_choice  # argparse calls it for each value

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Raise `InvalidValue` for an option that there is not.

        Otherwise argparse names it only if all that is required is there, and may take the word
        behind it for a positional argument.
        """
        commands = any(isinstance(one, argparse._SubParsersAction) for one in self._actions)
        options = list(self.options)
        before = ""
        for word in words:
            if word == "--" or (commands and not word.startswith("-")):
                return  # from here on there are values, or the words of a command
            name = word.partition("=")[0]
            if word.startswith("-") and word != "-" and not (" " in word or _NUMBER.match(word)):
                known = name in options or (
                    name.startswith("--") and any(one.startswith(name) for one in options)
                )
                if not known:
                    self.error(self._unknown(name, before, options))
            before = name

    def _unknown(self, name: str, before: str, options: Sequence[str]) -> str:
        asked = "--" + name.lstrip("-")
        near = did_you_mean(asked, options)
        if not near:
            also = {word: ours for word, ours in _ALSO_CALLED.items() if ours in options}
            near = next((f"; did you mean {also[word]!r}?" for word in also
                         if did_you_mean(asked, [word])), "")  # fmt: skip
        takes = [one for one in self._actions if before in one.option_strings and one.nargs != 0]
        hint = f"; a value that begins with - is given as {before}={name}" if takes else ""
        return f"there is no option {name}{near or hint}"


CONFIG_VARIABLE: Final = "KVKEEP_CONFIG"
_VARIABLES: Final = {"api_key": "KVKEEP_API_KEY"}
"""Options whose value an environment variable can have."""

# Options that exclude each other: a value drops that of its rival from a place of lower rank, so
# that --no-store turns off the tiers of a file.
_RIVALS: Final = (
    ("api_key", "api_key_file"), ("no_store", "tier"), ("no_reuse", "tier"),
)  # fmt: skip
_DEFAULT, _FILE, _ENVIRONMENT, _COMMAND_LINE = range(4)


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of an option; ``rank`` orders the places that may have one."""

    action: argparse.Action
    value: Any
    rank: int = _DEFAULT


class ConfigParser(Parser):
    """A parser of a command; after `add_config` a file may give its options as well.

    `parse_known_args` then puts the values of the file below those of the command line.

    Attributes:
        section: the section of the file; empty: none.
    """

    section = ""

    def add_config(self, section: str) -> None:
        """Add ``--config``."""
        self.section = section
        add_path(
            self,
            "--config",
            f"TOML file whose section [{section}] has values for these options; the command line "
            f"goes first (default: ${CONFIG_VARIABLE})",
        )

    def parse_known_args(  # type: ignore[override]  # argparse has overloads for namespaces
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse, with the values of the file that ``--config`` or the environment names."""
        if not self.section:
            return super().parse_known_args(args, namespace)
        found, rest, file = self.settings(sys.argv[1:] if args is None else args)
        warning = None if file is None else file.warning()
        if warning is not None:
            print(f"kvkeep: warning: {warning}", file=sys.stderr)
        namespace = argparse.Namespace() if namespace is None else namespace
        for dest, value in self._defaults.items():
            setattr(namespace, dest, value)
        for setting in found:
            setattr(namespace, setting.action.dest, setting.value)
        missing = [
            one.action.option_strings[0]
            for one in found
            if one.action.required and one.rank == _DEFAULT
        ]
        if missing and not rest:
            self.error(f"the following arguments are required: {', '.join(missing)}")
        return namespace, rest

    def settings(self, words: Sequence[str]) -> tuple[list[Setting], list[str], ConfigFile | None]:
        """Return every option's value, the words that are no options, and the file.

        Raises `InvalidValue` for a mistake in the words or in the section of the file.
        """
        given, rest = self._given(words)
        file = chosen_file(vars(given).get("config"))
        values = {} if file is None else file_values(self, file.section(self.section))
        found: dict[str, Setting] = {}
        for action in self.described():
            dest = action.dest
            variable = _VARIABLES.get(dest, "")
            if dest in vars(given):
                found[dest] = Setting(action, getattr(given, dest), _COMMAND_LINE)
            elif variable in os.environ:
                # The command reads it where it needs it: no secret is copied here.
                found[dest] = Setting(action, action.default, _ENVIRONMENT)
            elif dest in values:
                found[dest] = Setting(action, values[dest], _FILE)
            else:
                found[dest] = Setting(action, _default(self, action))
        for pair in _RIVALS:
            _drop_rival(self, found, pair)
        return list(found.values()), rest, file

    def checked(self, values: Mapping[str, FileValue]) -> None:
        """Raise `InvalidValue` for what the command refuses with these values of a file alone."""
        found = file_values(self, values)
        args = {action.dest: _default(self, action) for action in self.described()}
        self.get_default("check")(argparse.Namespace(**args | found))

    def described(self) -> list[argparse.Action]:
        """Return the options that a file may have."""
        return [
            action
            for action in self._actions
            if action.option_strings and action.dest not in {"help", "config"}
        ]

    def _given(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Parse the words; the namespace has only what they give."""
        before = [(action, action.default, action.required) for action in self._actions]
        try:
            for action in self._actions:
                action.default, action.required = argparse.SUPPRESS, False
            return super().parse_known_args(words, argparse.Namespace())
        finally:
            for action, default, required in before:
                action.default, action.required = default, required


def chosen_file(named: Path | None) -> ConfigFile | None:
    """Read the file that is ``named``, or that the environment names; None if neither does."""
    path = named or os.environ.get(CONFIG_VARIABLE)
    return ConfigFile.read(path) if path else None


def file_values(parser: ConfigParser, given: Mapping[str, FileValue]) -> dict[str, Any]:
    """Return the values of a section by their ``dest``.

    Raises `InvalidValue` for an unknown name, or a value that the option cannot have.
    """
    actions = {
        option.lstrip("-").replace("-", "_"): (option, action)
        for action in parser.described()
        for option in action.option_strings
    }
    found: dict[str, Any] = {}
    for name, one in given.items():
        if name not in actions:
            known = [option.lstrip("-") for option, _ in actions.values()]
            raise InvalidValue(
                f"{one.where}: [{parser.section}] has no option {one.key}"
                f"{did_you_mean(one.key, known) or f'; kvkeep {parser.section} --help lists all'}"
            )
        option, action = actions[name]
        try:
            found[action.dest] = _value(parser, option, action, one.value)
        except InvalidValue as error:
            raise InvalidValue(f"{one.where}: {one.key}: {error}") from error
    return found


def _value(parser: Parser, option: str, action: argparse.Action, value: object) -> object:
    """Convert a value of a file. Raises `InvalidValue` without the option's name."""
    said = told(masked(option, value))
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise InvalidValue(f"{said} is given; true or false is needed")
        return value != option.startswith("--no-") if _is_pair(action) else value
    if parser.repeats(action):
        if not isinstance(value, list):
            raise InvalidValue(f'{said} is given; a list is needed, as ["{action.metavar}"]')
        return [_converted(parser, action, one) for one in value]
    if isinstance(value, list) and str(action.metavar).endswith(",…"):
        if not all(isinstance(one, str) and "," not in one for one in value):
            raise InvalidValue(f"{said} is given; a list of texts without commas is needed")
        value = ",".join(value)
    return _converted(parser, action, value)


def _is_pair(action: argparse.Action) -> bool:
    return isinstance(action, argparse.BooleanOptionalAction)


def _converted(parser: Parser, action: argparse.Action, value: object) -> object:
    """Convert one value as argparse converts a word."""
    said = told(masked(action.dest, value))
    textual = action.type in {None, str, Path}
    if isinstance(value, bool) or not isinstance(value, str if textual else str | int | float):
        needed = "text" if textual else "a number or text"
        raise InvalidValue(f"{said} is given; {needed} is needed")
    if "\0" in str(value):  # no word of a command line has it
        raise InvalidValue(f"{said} is given; text without NUL characters is needed")
    try:
        found: object = str(value) if action.type is None else _call(action.type, str(value))
        parser.check_choice(action, found)
    except argparse.ArgumentError as error:
        raise InvalidValue(error.message) from error
    except argparse.ArgumentTypeError as error:
        raise InvalidValue(str(error)) from error
    return found


def _call(convert: Any, text: str) -> object:
    return convert(text)


def _default(parser: Parser, action: argparse.Action) -> object:
    """Return the default, converted if it is text, as argparse does."""
    default = action.default
    return _converted(parser, action, default) if isinstance(default, str) else default


def _drop_rival(parser: Parser, found: dict[str, Setting], pair: tuple[str, str]) -> None:
    """Of two options that exclude each other, reset the one whose source has the lower rank."""
    if not all(dest in found for dest in pair):
        return
    low, high = sorted((found[dest] for dest in pair), key=lambda setting: setting.rank)
    if low.rank < high.rank and low.rank != _DEFAULT and high.value is not False:
        found[low.action.dest] = Setting(low.action, _default(parser, low.action))
