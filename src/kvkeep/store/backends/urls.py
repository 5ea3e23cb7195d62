"""URLs of tiers, taken apart: who reads an option takes it out, what is left over is a mistake."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.geometry.units import parse_bytes, parse_count, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["TierURL"]


class TierURL:
    """``scheme://user:password@host:port/path?option=value`` in its parts.

    ``place`` is what stands between the slashes as it was written (``4GiB`` in ``memory://4GiB``).
    Options are taken by `text`, `size`, `seconds`, `number` and `choice`; `finish` refuses those
    that nobody took. ``safe`` is the URL without password and can be shown.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise InvalidValue(f"a tier is a URL such as 'memory://4GiB', got {text!r}")
        scheme, separator, _ = text.partition("://")
        if not separator or not scheme:
            shown = "…" * ("@" in text) + text.rpartition("@")[2]
            raise InvalidValue(
                f"{shown!r} is no tier's URL; such are memory://4GiB, file:///path?size=100GiB, "
                "valkey://host:6379 and s3://bucket/prefix"
            )
        try:
            parts = urlsplit(text)
            self.port = parts.port
        except ValueError:  # its words may be part of a password: neither they nor it are shown
            raise InvalidValue(
                f"the tier's URL cannot be read: {scheme}://host:port/… is needed, the port a "
                "number; in names and passwords write / as %2F, ? as %3F, # as %23 and @ as %40"
            ) from None
        if parts.fragment:
            shown = "…" if "@" in parts.fragment else parts.fragment  # the end of a password
            raise InvalidValue(f"a tier's URL has no '#{shown}'; write # as %23")
        self.scheme = parts.scheme
        self.place = parts.netloc.rpartition("@")[2]
        self.username = unquote(parts.username) if parts.username else None
        self.password = unquote(parts.password) if parts.password else None
        self.host = parts.hostname
        self.path = unquote(parts.path)
        who = f"{parts.username or ''}:***@" if self.password else ""
        if not who and parts.username:
            who = f"{parts.username}@"
        self._options: dict[str, str] = {}
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name in self._options:
                raise InvalidValue(f"the tier's URL gives {name} twice")
            self._options[name] = value
        self._asked: list[str] = []
        self.safe = f"{self.scheme}://{who}{self.place}{parts.path}"

    def text(self, name: str, default: str | None = None) -> str | None:
        """Take an option as it is."""
        self._asked.append(name)
        return self._options.pop(name, default)

    def choice(self, name: str, choices: Collection[str], default: str) -> str:
        """Take an option that is one of ``choices``."""
        value = self.text(name, default)
        assert value is not None
        if value not in choices:
            raise InvalidValue(f"{name}={value} in {self.safe}; it is one of {', '.join(choices)}")
        return value

    def size(self, name: str, default: int | None = None) -> int | None:
        """Take an amount of bytes: ``200GiB``."""
        value = self.text(name)
        if value is None:
            return default
        try:
            return parse_bytes(value)
        except InvalidValue as error:
            raise InvalidValue(f"{name}={value} in {self.safe}: {error}") from error

    def seconds(self, name: str, default: float | None = None) -> float | None:
        """Take a time above zero, in seconds, or as ``500ms``, ``30s``, ``10m``, ``2h``, ``7d``."""
        value = self.text(name)
        if value is None:
            return default
        try:
            return parse_seconds(value)
        except InvalidValue as error:
            raise InvalidValue(f"{name}={value} in {self.safe}: {error}") from error

    def number(self, name: str, default: int, low: int, high: int) -> int:
        """Take a whole number in ``low`` … ``high``, as ``64`` or ``1k``."""
        value = self.text(name)
        if value is None:
            return default
        try:
            given = parse_count(value)
        except InvalidValue as error:
            raise InvalidValue(f"{name}={value} in {self.safe}: {error}") from error
        return whole(f"{name} in {self.safe}", given, low, high)

    def finish(self) -> None:
        """Refuse the options that nobody took."""
        if self._options:
            unknown = ", ".join(sorted(self._options))
            known = ", ".join(sorted(set(self._asked))) or "none"
            raise InvalidValue(f"{self.safe} has no option {unknown}; there are: {known}")

    def __repr__(self) -> str:
        return f"<TierURL {self.safe}>"
