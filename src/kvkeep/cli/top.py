"""``kvkeep top``: the state of a running server, redrawn every second."""

from __future__ import annotations

import json
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvkeep.cli.arguments import add_count, add_json, add_seconds, add_switch
from kvkeep.cli.server import add_server_arguments, add_server_url, connect
from kvkeep.cli.tables import console, print_lines
from kvkeep.cli.watch import Watcher
from kvkeep.core.errors import InvalidValue, require, whole

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from rich.console import Console

    from kvkeep.cli.arguments import Commands
    from kvkeep.cli.client import Client
    from kvkeep.cli.watch import Picture

__all__ = ["add_parser", "run"]

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
    whole("--last", args.last, 1, 1000)
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
