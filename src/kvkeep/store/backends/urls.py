"""`TierURL`: the URL of a tier. Options are taken out as they are read; the rest are mistakes."""

from __future__ import annotations

import os.path
import re
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from kvkeep.core.errors import InvalidValue, did_you_mean, whole
from kvkeep.core.geometry.units import parse_bytes, parse_count, parse_seconds
from kvkeep.store.backends.budget import WriteBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["TierURL"]

T = TypeVar("T")

_HOME = "~/"
# ``$NAME``, ``${NAME}``, or a ``~`` that begins the name of a folder.
_UNEXPANDED = re.compile(r"\$\{?[A-Za-z_]\w*\}?|(?<![^/])~[^/]*")


class TierURL:
    """``scheme://user:password@host:port/path?option=value``, parsed.

    `text`, `size`, `seconds`, `number` and `choice` take one option each and raise `InvalidValue`
    for a bad value; `finish` refuses the options that remain. In ``file://~/path`` and in an option
    that begins with ``~/``, ``~`` is the home directory of the user who runs the process.

    Attributes:
        place: the text between ``//`` and the path, without credentials (``4GiB`` in
            ``memory://4GiB``).
        safe: the URL without password and options, for messages.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise InvalidValue(f"a tier is a URL such as 'memory://4GiB', got {text!r}")
        scheme, separator, _ = text.partition("://")
        if not separator or not scheme:
            shown = "…" * ("@" in text) + text.rpartition("@")[2]
            raise InvalidValue(
                f"{shown!r} is no tier's URL; write for example memory://4GiB, "
                "file:///path?size=100GiB, valkey://host:6379 or s3://bucket/prefix"
            )
        try:
            parts = urlsplit(text)
            self.port = parts.port
        except ValueError:  # its text may contain a part of a password
            raise InvalidValue(
                f"the tier's URL cannot be parsed: it is {scheme}://host:port/… with a numeric "
                "port; in names and passwords write / as %2F, ? as %3F, # as %23 and @ as %40"
            ) from None
        if parts.fragment:
            # A fragment with an @ may be the end of a password.
            shown = "…" if "@" in parts.fragment else parts.fragment
            raise InvalidValue(f"a tier's URL has no '#{shown}'; write # as %23")
        self.scheme = parts.scheme
        self.place = parts.netloc.rpartition("@")[2]
        self.username = unquote(parts.username) if parts.username else None
        self.password = unquote(parts.password) if parts.password else None
        self.host = parts.hostname
        path = parts.path
        if self.scheme == "file":
            self.place, path = _expanded(self.place, path)
        self.path = unquote(path)
        if "\0" in unquote(text):
            raise InvalidValue("a tier's URL has %00; no path and no name has that character")
        user = f"{parts.username or ''}:***@" if self.password else ""
        if not user and parts.username:
            user = f"{parts.username}@"
        self._options: dict[str, str] = {}
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name in self._options:
                raise InvalidValue(f"the tier's URL gives {name} twice")
            self._options[name] = os.path.expanduser(value) if value.startswith(_HOME) else value
        self._taken: list[str] = []
        self.safe = f"{self.scheme}://{user}{self.place}{path}"

    def text(self, name: str, default: str | None = None) -> str | None:
        """Take an option as text."""
        self._taken.append(name)
        return self._options.pop(name, default)

    def choice(self, name: str, choices: Collection[str], default: str) -> str:
        """Take an option with one of the values ``choices``."""
        value = self.text(name, default)
        assert value is not None
        if value not in choices:
            raise InvalidValue(
                f"{name}={value} in {self.safe}; use one of {', '.join(choices)}"
                f"{did_you_mean(value, choices)}"
            )
        return value

    def size(self, name: str, default: int | None = None) -> int | None:
        """Take a number of bytes: ``200GiB``."""
        return self._parsed(name, parse_bytes, default)

    def seconds(self, name: str, default: float | None = None) -> float | None:
        """Take a positive time in seconds: ``30s``, ``500ms``, ``10m``, ``2h``, ``7d``."""
        return self._parsed(name, parse_seconds, default)

    def write_budget(self, name: str) -> WriteBudget | None:
        """Take bytes per day or hour: ``2TB/day``."""
        return self._parsed(name, WriteBudget.parse, None)

    def number(self, name: str, default: int, low: int, high: int) -> int:
        """Take an integer in ``low`` … ``high``: ``64`` or ``1k``."""
        given = self._parsed(name, parse_count, None)
        return default if given is None else whole(f"{name} in {self.safe}", given, low, high)

    def take_rest(self) -> None:
        """Take all options that remain, unread."""
        self._taken += self._options
        self._options.clear()

    def finish(self) -> None:
        """Raise `InvalidValue` if options remain that were not taken."""
        if self._options:
            unknown = ", ".join(sorted(self._options))
            known = ", ".join(sorted(set(self._taken))) or "none"
            raise InvalidValue(
                f"{self.safe} has no option {unknown}; the options are: {known}"
                f"{did_you_mean(sorted(self._options), set(self._taken))}"
            )

    def _parsed(self, name: str, parse: Callable[[str], T], default: T | None) -> T | None:
        value = self.text(name)
        if value is None:
            return default
        try:
            return parse(value)
        except InvalidValue as error:
            raise InvalidValue(f"{name}={value} in {self.safe}: {error}") from error

    def __repr__(self) -> str:
        return f"<TierURL {self.safe}>"


def _expanded(place: str, path: str) -> tuple[str, str]:
    """Return the place and the path, both quoted, of a directory's URL, with ``~`` expanded.

    Nobody expands more in a configuration file, and a directory called ``$HOME`` is no user's
    wish: raises `InvalidValue` for variables, and for ``~`` elsewhere.
    """
    text = place + path
    if place == "~":
        place, text, path = "", path, quote(os.path.expanduser("~")) + path
    if match := _UNEXPANDED.search(text):
        home = match[0] in {"$HOME", "${HOME}", "~"}
        rest = text[match.end() :]
        right = f"file://~{rest}" if home else "the whole path, as in file:///var/lib/kvkeep"
        raise InvalidValue(
            f"{match[0]} in file://{text} is not expanded: write {right} (in a directory's own "
            "name, $ is written %24 and ~ is %7E)"
        )
    return place, path
