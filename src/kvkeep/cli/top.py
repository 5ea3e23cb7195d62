"""``kvkeep top``: what a running server does, drawn again every second."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Final

from kvkeep.cli.numbers import count
from kvkeep.cli.terminal import SUSPEND, keys, suspend, terminated
from kvkeep.cli.watch import Watcher, add_server_arguments, asking, console
from kvkeep.core.errors import InvalidValue, require, whole

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from kvkeep.cli.client import Client
    from kvkeep.cli.model import Commands
    from kvkeep.cli.watch import Picture

__all__ = ["add_parser", "run"]

_LOOK_S: Final = 0.1  # at the keyboard, and whether the terminal has another size
_ONCE_ROWS: Final = 40  # of a picture that is printed: nothing has to fit


def add_parser(commands: Commands) -> None:
    """Name the arguments."""
    parser = commands.add_parser(
        "top",
        help="watch a running server: hit rate, tiers, tenants, requests, and what costs most",
        description="Draw what a running kvkeep server does, again every second: hit rate, time to "
        "the first token, pages, tiers, tenants, the last requests and why their tokens were "
        "computed. q or Ctrl-C ends it. Where the output is no terminal, one picture is printed.",
    )
    parser.add_argument("url", metavar="URL", help="of the server: http://host:port, or host:port")
    parser.add_argument(
        "--interval", metavar="S", type=float, default=1.0, help="seconds (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="print one picture, and end")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object a line at each interval instead (with --once: one)",
    )
    parser.add_argument(
        "--last", metavar="N", type=count, default=50, help="requests to show at most (default: 50)"
    )
    add_server_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Watch until somebody ends it; 0 then."""
    if not 0.1 <= args.interval <= 3600:
        raise InvalidValue(f"--interval is {args.interval:g}; seconds in 0.1 … 3600 are needed")
    whole("--last", args.last, 1, 1000)
    with asking(args.url, args) as client:
        watcher = Watcher(client, last=args.last)
        if args.json:
            return _lines(watcher, args)
        require("rich", "cli")
        screen = console(live=True)
        # The first picture comes before the screen is taken: an error is then one line.
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
    from kvkeep.cli.top_view import draw  # noqa: PLC0415 - rich comes with an extra

    for line in draw(picture, str(client.address), max(screen.width, 80), _ONCE_ROWS):
        line.rstrip()
        screen.print(line, soft_wrap=True)
    return 0


# --- live -----------------------------------------------------------------------------------------


class _Polling(threading.Thread):
    """Polls beside the drawing, so that a server that hangs holds up no key."""

    def __init__(self, watcher: Watcher, first: Picture, interval: float) -> None:
        super().__init__(name="kvkeep top", daemon=True)
        self.picture = first
        self.error: Exception | None = None
        self._watcher = watcher
        self._interval = interval
        self._ended = threading.Event()

    def run(self) -> None:
        """Poll until `end`, or until asking again would not help."""
        due = time.monotonic() + self._interval
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            try:
                self.picture = self._watcher.poll()
            except Exception as error:  # noqa: BLE001 - raised where it is drawn
                self.error = error
                return
            due = max(due + self._interval, time.monotonic())

    def end(self) -> None:
        """Have it end, and wait for it a moment."""
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
                suspend()  # and drawn anew when it goes on
    finally:
        polling.end()
    if polling.error is not None:
        raise polling.error
    return 0


def _shown(screen: Console, polling: _Polling, address: str) -> str:
    """Draw until there is an error, or one of the keys was pressed that end it: that key."""
    from rich.live import Live  # noqa: PLC0415 - rich comes with an extra
    from rich.text import Text  # noqa: PLC0415

    from kvkeep.cli.top_view import draw  # noqa: PLC0415

    drawn: tuple[object, ...] | None = None
    with keys() as pressed, Live(console=screen, screen=True, auto_refresh=False) as live:
        while polling.error is None:
            picture, size = polling.picture, screen.size
            # Drawn for a new picture or another size; where the server is gone, each second.
            now = picture, size, int(time.time()) if picture.trouble is not None else 0
            if now != drawn:
                lines = draw(picture, address, size.width, size.height, ends="q ends")
                live.update(Text("\n", no_wrap=True).join(lines), refresh=True)
                drawn = now
            for key in pressed(_LOOK_S):
                if key in {"q", "Q", SUSPEND}:
                    return key
    return ""
