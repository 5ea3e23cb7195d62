"""`ConfigFile`: settings of servers and routers in one TOML file, with their lines.

[serve]        # options of kvkeep serve, without their dashes
[route]        # options of kvkeep route
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvkeep.core.errors import InvalidValue, did_you_mean, reason, told

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["HIDDEN", "SECTIONS", "ConfigFile", "FileValue", "is_secret", "masked"]

SECTIONS: Final = ("serve", "route")
"""The tables that a file may have."""

_MOST_BYTES: Final = 1 << 20
_PROBE: Final = "kvkeep-probe"
_MOST_VALUES: Final = 1000  # in a section: the line of each is sought
# Up to the last @: a password may have an @, and too much is hidden rather than too little.
_PASSWORD: Final = re.compile(r"(?<=://)([^/@:]*):.*(?=@)", re.DOTALL)
HIDDEN: Final = "***"
"""What is shown in place of a secret."""


def is_secret(name: str) -> bool:
    """Whether the value of an option is a secret, by its name: ``api-key``."""
    return name.replace("-", "_").rpartition("_")[2] == "key"


def masked(name: str, value: object) -> object:
    """Return a value to show: ``***`` for a secret, and in place of passwords in URLs."""
    if isinstance(value, list | tuple):
        return [masked(name, one) for one in value]
    if isinstance(value, dict):
        return {key: masked(name, one) for key, one in value.items()}
    if is_secret(name) and value not in (None, ""):
        return HIDDEN
    return _PASSWORD.sub(rf"\1:{HIDDEN}", value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class FileValue:
    """A value in a file: the ``key`` as it is written there, and ``where``, ``path:line``."""

    key: str
    value: Any
    where: str


class ConfigFile:
    """A parsed file. Not changed after `read`; safe to share between threads.

    Attributes:
        path: the file, as it was named.
    """

    def __init__(self, path: Path, text: str, tables: Mapping[str, Mapping[str, Any]]) -> None:
        self.path = path
        self._lines = text.splitlines()
        self._tables = tables

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ConfigFile:
        """Read and parse a file of up to 1 MiB.

        Raises:
            InvalidValue: it cannot be read, is no TOML, or has another table than `SECTIONS`.
        """
        file = Path(path)
        try:
            with file.open("rb") as opened:
                raw = opened.read(_MOST_BYTES + 1)
            if len(raw) > _MOST_BYTES:
                raise InvalidValue(f"{file} is larger than 1 MiB: it is no file of settings")
            text = raw.decode("utf-8-sig").replace("\r\n", "\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidValue(f"cannot read settings from {file}: {reason(error)}") from error
        try:
            tables = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # also of a number of 5,000 digits
            raise InvalidValue(f"{file} is no TOML: {reason(error)}") from error
        found = cls(file, text, tables)
        for name, table in tables.items():
            if name not in SECTIONS:
                what = f"[{name}]" if isinstance(table, dict) else name
                raise InvalidValue(
                    f"{found.where(name)}: there is no {what}; options are in the sections "
                    f"{', '.join(f'[{one}]' for one in SECTIONS)}{did_you_mean(name, SECTIONS)}"
                )
            if not isinstance(table, dict):
                raise InvalidValue(
                    f"{found.where(name)}: {name} is {told(masked(name, table))}; write [{name}] "
                    "on a line of its own, and the options below it"
                )
            if len(table) > _MOST_VALUES:
                raise InvalidValue(
                    f"{file} has {len(table)} options in [{name}]: it is no file of settings"
                )
        return found

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections that the file has."""
        return tuple(name for name in SECTIONS if name in self._tables)

    def section(self, name: str) -> dict[str, FileValue]:
        """Return the values of a section by their names, in which - is _; empty if it has none.

        Raises:
            InvalidValue: a name is given twice, once with - and once with _.
        """
        found: dict[str, FileValue] = {}
        for key, value in self._tables.get(name, {}).items():
            plain = key.replace("-", "_")
            where = self.where(name, key)
            if plain in found:
                raise InvalidValue(f"{where}: {key} is given twice, as {found[plain].key} too")
            found[plain] = FileValue(key, value, where)
        return found

    def where(self, section: str, key: str | None = None) -> str:
        """Return ``path:line`` of a section, or of a key in it."""
        return f"{self.path}:{self._line(section, key)}"

    def warning(self) -> str | None:
        """Return what is wrong with the file's access rights; None if nothing is.

        A file with an API key, or with a password in a URL, should be its owner's alone.
        """
        secret = next((value for value in self._values() if masked(*value) != value[1]), None)
        if secret is None or os.name != "posix":
            return None
        try:
            mode = stat.S_IMODE(self.path.stat().st_mode)
        except OSError:  # it was there to be read, and is gone
            return None
        if not mode & stat.S_IROTH:
            return None
        return (
            f"{self.path} has a secret ({secret[0]}) and every user of this machine can read it; "
            f"chmod 600 {self.path}, or keep the secret in a file of its own"
        )

    def _values(self) -> Iterator[tuple[str, object]]:
        for table in self._tables.values():
            for key, value in table.items():
                yield key, list(value) if isinstance(value, list) else value

    def _line(self, section: str, key: str | None) -> int:
        """Return the number of the line that defines a key, or begins a section."""
        name = rf"\s*[\"']?{re.escape(section)}[\"']?\s*"
        if key is not None:
            own = rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]"
            for number, line in enumerate(self._lines, 1):
                if re.match(own, line) and self._reaches(number - 1, section):
                    return number
                if re.match(rf"{name}\.{own}", line) and self._reaches(number - 1, None):
                    return number
        for number, line in enumerate(self._lines, 1):
            if re.match(rf"\s*\[{name}\]", line) and self._reaches(number, section):
                return number
            if re.match(rf"{name}[=.]", line) and self._reaches(number - 1, None):
                return number
        return 1

    def _reaches(self, lines: int, section: str | None) -> bool:
        """Whether a key behind the first ``lines`` is in ``section``; None: in no table.

        tomllib tells no lines, so it is tried. Within a longer text nothing is a key.
        """
        text = "\n".join([*self._lines[:lines], f"{_PROBE} = 1"])
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError:
            return False
        place = tables if section is None else tables.get(section)
        return isinstance(place, dict) and _PROBE in place
