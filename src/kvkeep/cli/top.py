"""``kvkeep top``: the state of a running server, redrawn every second."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Final

from kvkeep.cli.arguments import add_count, add_json, add_seconds, add_switch
from kvkeep.cli.server import add_server_arguments, add_server_url, connect
from kvkeep.cli.tables import console, print_lines
from kvkeep.cli.terminal import SUSPEND, keys, suspend, terminated
from kvkeep.cli.watch import Watcher
from kvkeep.core.errors import InvalidValue, require, whole

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from kvkeep.cli.arguments import Commands
    from kvkeep.cli.client import Client
    from kvkeep.cli.watch import Picture

__all__ = ["add_parser", "run"]

_LOOK_S: Final = 0.1  # between two looks at the keyboard and the size of the terminal
_ONCE_ROWS: Final = 40  # rows of a picture that is printed once


def add_parser(commands: Commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "top",
        help="watch a running server: hit rate, tiers, tenants, requests, causes of misses",
        description="Show the state of a running kvkeep server, updated every second: hit rate, "
        "time to the first token, pages, tiers, tenants, and the latest requests with the reasons "
        "why tokens were computed. q or Ctrl-C ends it. If stdout is no terminal, the state is "
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


# --- live -----------------------------------------------------------------------------------------


class _Polling(threading.Thread):
    """Polls in a thread, so that a server that hangs does not block the keyboard."""

    def __init__(self, watcher: Watcher, first: Picture, interval: float) -> None:
        super().__init__(name="kvkeep top", daemon=True)
        self.picture = first
        self.error: Exception | None = None
        self._watcher = watcher
        self._interval = interval
        self._ended = threading.Event()

    def run(self) -> None:
        """Poll until `end` is called or an error occurs."""
        due = time.monotonic() + self._interval
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            try:
                self.picture = self._watcher.poll()
            except Exception as error:  # noqa: BLE001 - raised by the drawing thread
                self.error = error
                return
            due = max(due + self._interval, time.monotonic())

    def end(self) -> None:
        """Stop polling; wait a moment for the thread."""
        self._ended.set()
        self.join(_LOOK_S)


def _live(
    screen: Console, watcher: Watcher, first: Picture, client: Client, interval: float
) -> int:
    polling = _Polling(watcher, first, interval)
    polling.start()
    try:
        with terminated():
            while _shown(screen, polling, str(client.address)) == SUSPEND:
                suspend()  # redrawn when the process continues
    finally:
        polling.end()
    if polling.error is not None:
        raise polling.error
    return 0


def _shown(screen: Console, polling: _Polling, address: str) -> str:
    """Draw until an error (return "") or a key that ends the drawing; return the key."""
    from rich.live import Live  # noqa: PLC0415 - rich is optional
    from rich.text import Text  # noqa: PLC0415

    from kvkeep.cli.top_view import draw  # noqa: PLC0415

    drawn: tuple[object, ...] | None = None
    with keys() as pressed, Live(console=screen, screen=True, auto_refresh=False) as live:
        while polling.error is None:
            picture, size = polling.picture, screen.size
            # Redraw for a new picture or size; each second while the server is unreachable.
            now = picture, size, int(time.time()) if picture.trouble is not None else 0
            if now != drawn:
                lines = draw(picture, address, size.width, size.height, ends="q ends")
                live.update(Text("\n", no_wrap=True).join(lines), refresh=True)
                drawn = now
            for key in pressed(_LOOK_S):
                if key in {"q", "Q", SUSPEND}:
                    return key
    return ""
