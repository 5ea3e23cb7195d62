"""`Parser`: argparse's, with every mistake in one line and the nearest name for a wrong one."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kvkeep.core.errors import InvalidValue, did_you_mean, told

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Parser"]

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
        return super().parse_known_args(words, namespace)

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
