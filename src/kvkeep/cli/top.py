"""``kvkeep top``: the state of a running server, redrawn every second."""

from __future__ import annotations

import json
import math
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvkeep.cli.arguments import add_count, add_json, add_seconds, add_switch
from kvkeep.cli.client import (
    Gone,
    add_server_arguments,
    add_server_url,
    connect,
    entries,
    path,
    whole,
)
from kvkeep.cli.tables import console, print_lines
from kvkeep.core.errors import InvalidValue, require
from kvkeep.core.errors import whole as check_whole

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console

    from kvkeep.cli.arguments import Commands
    from kvkeep.cli.client import Client

__all__ = ["Picture", "Watcher", "add_parser", "run"]

_SUMMARY_S: Final = 5.0  # the server reads 1,000 requests for a summary: not at every poll


@dataclass(frozen=True, slots=True)
class Picture:
    """The state of a server at one time.

    ``live`` is the latest answer of /kv/live and ``before`` the one before it (None at first, and
    after a restart of the server). ``seen_at`` is the time of these answers, in Unix seconds.
    ``trouble`` is why a later poll failed; None if the latest succeeded.
    """

    live: Mapping[str, Any]
    before: Mapping[str, Any] | None
    requests: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    seen_at: float
    trouble: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the server's answers for JSON, or only the error if the poll failed."""
        if self.trouble is not None:
            return {"at": time.time(), "error": self.trouble}
        live, requests, summary = self.live, self.requests, self.summary
        return {"at": self.seen_at, "live": live, "requests": requests, "summary": summary}


class Watcher:
    """Polls one server for a `Picture`. Not thread-safe."""

    def __init__(self, client: Client, *, last: int = 50) -> None:
        self._client = client
        self._last = last
        self._picture: Picture | None = None
        self._summary: Mapping[str, Any] = {}
        self._summary_at = -math.inf

    def poll(self) -> Picture:
        """Poll once; if the server cannot be reached, return the last picture with its trouble.

        Raises `Gone` if there is no picture yet, and `ServerRefusal` where polling again would not
        help: the API key is wrong, or this is not a kvkeep server.
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
            self._summary_at = -math.inf  # after a restart it is another
        return self._picture

    def _ask(self) -> Picture:
        live = self._client.get("/kv/live")
        requests = self._client.get(path("/kv/requests", last=self._last))
        if time.monotonic() - self._summary_at >= _SUMMARY_S:
            self._summary = self._client.get("/kv/summary")
            self._summary_at = time.monotonic()
        before = None if self._picture is None else self._picture.live
        if before is not None and whole(live, "uptime_s") < whole(before, "uptime_s"):
            before = None
        return Picture(
            live=live,
            before=before,
            requests=entries(requests, "requests"),
            summary=self._summary,
            seen_at=time.time(),
        )


_LOOK_S: Final = 0.1  # between two looks at the size of the terminal
_ONCE_ROWS: Final = 40  # rows of a picture that is printed once


def add_parser(commands: Commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "top",
        help="watch a running server: hit rate, tiers, requests, causes of misses",
        description="Show the state of a running kvkeep server, updated every second: hit rate, "
        "time to the first token, pages, tiers, and the latest requests with the reasons "
        "why tokens were computed. Ctrl-C ends it. If stdout is no terminal, the state is "
        "printed once.",
    )
    add_server_url(parser)
    add_seconds(parser, "--interval", 1.0, "time between two updates")
    add_switch(parser, "--once", "print the state once, and end")
    add_json(parser, "print one JSON object per interval, each on a line (with --once: only one)")
    add_count(parser, "--last", 50, "requests to show at most")
    add_server_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Watch until the user ends it; return 0."""
    if not 0.1 <= args.interval <= 3600:
        raise InvalidValue(f"--interval is {args.interval:g}; 0.1 … 3600 seconds are needed")
    check_whole("--last", args.last, 1, 1000)
    with connect(args.url, args) as client:
        watcher = Watcher(client, last=args.last)
        if args.json:
            return _lines(watcher, args)
        require("rich", "cli")
        screen = console(live=True)
        # Poll before the screen is cleared: an error is then one line.
        first = watcher.poll()
        if args.once or not screen.is_terminal or screen.is_dumb_terminal:
            return _print(screen, first, client)
        return _live(screen, watcher, first, client, args.interval)


def _lines(watcher: Watcher, args: argparse.Namespace) -> int:
    due = time.monotonic()
    while True:
        print(json.dumps(watcher.poll().as_dict()), flush=True)
        if args.once:
            return 0
        due = max(due + args.interval, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def _print(screen: Console, picture: Picture, client: Client) -> int:
    from kvkeep.cli.top_view import draw  # noqa: PLC0415 - rich is optional

    print_lines(screen, draw(picture, str(client.address), max(screen.width, 80), _ONCE_ROWS))
    return 0


def _live(
    screen: Console, watcher: Watcher, first: Picture, client: Client, interval: float
) -> int:
    """Redraw for each picture until Ctrl-C or SIGTERM; the terminal is restored in any case."""
    from rich.live import Live  # noqa: PLC0415 - rich is optional
    from rich.text import Text  # noqa: PLC0415

    from kvkeep.cli.top_view import draw  # noqa: PLC0415

    picture = first
    with _terminated(), Live(console=screen, screen=True, auto_refresh=False) as live:
        while True:
            size, due = screen.size, time.monotonic() + interval
            lines = draw(picture, str(client.address), size.width, size.height, ends="Ctrl-C ends")
            live.update(Text("\n", no_wrap=True).join(lines), refresh=True)
            while screen.size == size and (left := due - time.monotonic()) > 0:
                time.sleep(min(left, _LOOK_S))
            if time.monotonic() >= due:
                picture = watcher.poll()


@contextmanager
def _terminated() -> Iterator[None]:
    """Raise SystemExit on SIGTERM inside the block, so that the terminal is restored."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
