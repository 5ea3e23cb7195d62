"""What the commands that look at a running server share: its address and key, what it says.

Nothing that a server says is believed: a number that is missing or none counts as 0, a text that is
missing is empty, and every text is made harmless before it is drawn.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from kvkeep.cli.client import Address, Client, Gone, ServerRefusal
from kvkeep.cli.drawing import visible
from kvkeep.core.errors import InvalidValue, require

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console

__all__ = [
    "KEY_VARIABLE", "Picture", "Watcher", "add_server_arguments", "api_key", "asking", "below",
    "cause_words", "console", "entries", "number", "path", "short_id", "text", "tokens_by", "whole",
]  # fmt: skip

KEY_VARIABLE: Final = "KVKEEP_API_KEY"
_KEY_BYTES: Final = 4096
_LARGEST: Final = 1 << 62  # more than anything is counted up to
_SHARE: Final = re.compile(r"(?:less than )?\d+ % of all (?:re)?computed tokens: ")
_SUMMARY_S: Final = 5.0  # a summary goes through a thousand requests: not at every poll


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Name the arguments that say how to reach a server, but for its address."""
    server = parser.add_argument_group("the server")
    server.add_argument(
        "--api-key-file",
        metavar="FILE",
        type=Path,
        help=f"a file that holds the server's API key (default: ${KEY_VARIABLE}, if it is set)",
    )
    server.add_argument(
        "--ca-file",
        metavar="FILE",
        type=Path,
        help="certificates in PEM to trust, for https (default: the system's)",
    )
    server.add_argument(
        "--timeout",
        metavar="S",
        type=float,
        default=10.0,
        help="seconds without a word after which the server counts as gone (default: 10)",
    )


@contextmanager
def asking(url: str, args: argparse.Namespace) -> Iterator[Client]:
    """A client of the server at ``url``, for `add_server_arguments`; a server that is gone, or not
    well, is `InvalidValue` too: for commands that ask once.
    """
    if not 0 < args.timeout <= 3600:
        raise InvalidValue(f"--timeout is {args.timeout:g}; seconds above 0 are needed, to 3600")
    client = Client(
        Address.parse(url),
        key=api_key(args.api_key_file),
        ca_file=args.ca_file,
        timeout_s=args.timeout,
    )
    with client:
        try:
            yield client
        except Gone as error:
            raise InvalidValue(str(error)) from error


def api_key(file: Path | None) -> str | None:
    """The key in ``file``, or in the environment; None where there is none. `InvalidValue`."""
    if file is None:
        key, where = os.environ.get(KEY_VARIABLE, ""), f"${KEY_VARIABLE}"
        if not key:
            return None
    else:
        where = str(file)
        try:
            with file.open("rb") as opened:
                key = opened.read(_KEY_BYTES + 1).decode("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidValue(f"cannot read an API key from {file}: {error}") from error
    if not key or len(key) > _KEY_BYTES or not (key.isascii() and key.isprintable()):
        raise InvalidValue(f"{where} holds no API key: it is one line of printable ASCII")
    return key


def path(*parts: str, **query: str | int | None) -> str:
    """A path with its query; those that are None are left out."""
    asked = urlencode({name: value for name, value in query.items() if value is not None})
    return "/".join(parts) + (f"?{asked}" if asked else "")


def console(*, live: bool = False) -> Console:
    """Where to draw: nothing of what is printed there is read as markup."""
    stream = sys.stdout
    if (stream.encoding or "").lower().replace("-", "") not in {"utf8", "utf8sig"}:
        # A terminal that has no blocks gets question marks, no traceback.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    made: Console = require("rich.console", "cli").Console(
        highlight=False, markup=False, emoji=False, soft_wrap=not live
    )
    return made


# --- reading what a server says -------------------------------------------------------------------


def below(of: Any, name: str) -> Mapping[str, Any]:
    """The object at ``name``, or an empty one."""
    found = of.get(name) if isinstance(of, dict) else None
    return found if isinstance(found, dict) else {}


def entries(of: Any, name: str) -> list[Mapping[str, Any]]:
    """The objects of the list at ``name``; what is no object is left out."""
    found = of.get(name) if isinstance(of, dict) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def number(of: Any, name: str) -> float | None:
    """The number at ``name``, 0 or more; None where there is none that makes sense."""
    found = of.get(name) if isinstance(of, dict) else None
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    return found if 0 <= found <= _LARGEST and math.isfinite(found) else None


def whole(of: Any, name: str) -> int:
    """The number at ``name`` as a count: 0 where there is none."""
    return int(number(of, name) or 0)


def text(of: Any, name: str, default: str = "") -> str:
    """The text at ``name``, harmless (see `visible`); ``default`` where there is none."""
    found = of.get(name) if isinstance(of, dict) else None
    return visible(found) if isinstance(found, str) else default


def tokens_by(of: Any, name: str) -> dict[str, int]:
    """The counts at ``name`` by what they count, largest first; names are harmless."""
    found = below(of, name)
    counts = {visible(key): whole(found, key) for key in found}
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def short_id(name: str) -> str:
    """Enough of a request's id to find it by, without the word that they all begin with."""
    bare = name.removeprefix("chat").removeprefix("cmpl-")
    return bare[:8] if bare != name else name


def cause_words(cause: Any) -> str:
    """What a cause of a summary is, without the share that its sentence begins with."""
    sentence = text(cause, "sentence") or text(cause, "reason", "?").replace("_", " ")
    return _SHARE.sub("", sentence)


# --- polling --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Picture:
    """What is known of a server at one time.

    ``live`` is what /kv/live said last, ``before`` what it said the time before that (None:
    nothing, or it was another start of the server), ``requests`` and ``summary`` are None with the
    explainer off. ``trouble`` is why the server could not be asked just now; the rest is then as it
    was ``seen_at``, in seconds of `time.time`.
    """

    live: Mapping[str, Any]
    before: Mapping[str, Any] | None
    requests: Sequence[Mapping[str, Any]] | None
    summary: Mapping[str, Any] | None
    seen_at: float
    trouble: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For programs: what the server said, or the error in place of it."""
        if self.trouble is not None:
            return {"at": time.time(), "error": self.trouble}
        live, requests, summary = self.live, self.requests, self.summary
        return {"at": self.seen_at, "live": live, "requests": requests, "summary": summary}


class Watcher:
    """Asks one server for a `Picture` again and again. Not thread-safe."""

    def __init__(self, client: Client, *, last: int = 50) -> None:
        self._client = client
        self._last = last
        self._picture: Picture | None = None
        self._summary: Mapping[str, Any] | None = None
        self._summary_at = -math.inf

    def poll(self) -> Picture:
        """Ask; a server that does not answer leaves the picture as it was, with its trouble.

        Raises `Gone` if there is no picture yet, and `ServerRefusal` where asking again would
        not help: a wrong key, or no kvkeep server.
        """
        try:
            self._picture = self._ask()
        except Gone as error:
            old = self._picture
            if old is None:
                raise
            self._picture = Picture(
                old.live, None, old.requests, old.summary, old.seen_at, str(error)
            )
            self._summary_at = -math.inf  # it may come back as another
        return self._picture

    def _ask(self) -> Picture:
        live = self._client.get("/kv/live")
        requests = self._explained(path("/kv/requests", last=self._last))
        if time.monotonic() - self._summary_at >= _SUMMARY_S:
            self._summary = self._explained("/kv/summary")
            self._summary_at = time.monotonic()
        before = None if self._picture is None else self._picture.live
        if before is not None and whole(live, "uptime_s") < whole(before, "uptime_s"):
            before = None
        return Picture(
            live=live,
            before=before,
            requests=None if requests is None else entries(requests, "requests"),
            summary=self._summary,
            seen_at=time.time(),
        )

    def _explained(self, asked: str) -> Mapping[str, Any] | None:
        """What there is only with an explainer."""
        try:
            return self._client.get(asked)
        except ServerRefusal as error:
            if error.status == 404:
                return None
            raise
