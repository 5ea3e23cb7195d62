"""A terminal that a command has to itself for a while, and gives back as it was."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Keys = Callable[[float], str]

__all__ = ["SUSPEND", "keys", "suspend", "terminated"]

SUSPEND: Final = "\x1a"  # Ctrl-Z, which comes as a key here
# Keys that come as several characters: arrows, functions, those with Alt.
_SEVERAL: Final = re.compile(r"\x1b(?:\[[0-9;?]*[@-~]|O.|.)?", re.DOTALL)


@contextmanager
def keys() -> Iterator[Keys]:
    """Keys as they are pressed, and not shown: what it gives waits so many seconds for some.

    It gives "" where none was; arrows and their like are left out. Ctrl-C interrupts as ever;
    Ctrl-Z is a key, so that the terminal can be given back before one stops. Where the input is no
    terminal, or the system is not POSIX, no key ever comes.
    """
    if os.name != "posix" or not sys.stdin.isatty():
        yield _no_key
        return
    import termios  # noqa: PLC0415 - POSIX alone
    import tty  # noqa: PLC0415

    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    try:
        tty.setcbreak(stdin)
        ours = termios.tcgetattr(stdin)
        ours[6][termios.VSUSP] = b"\x00"
        termios.tcsetattr(stdin, termios.TCSANOW, ours)

        def key(seconds: float) -> str:
            if not select.select([stdin], [], [], seconds)[0]:
                return ""
            pressed = os.read(stdin, 1024)
            if not pressed:  # the end of the input: nobody is there any more
                raise KeyboardInterrupt
            return _SEVERAL.sub("", pressed.decode("utf-8", "replace"))

        yield key
    finally:
        # What was typed and not read does not go to the shell.
        termios.tcsetattr(stdin, termios.TCSAFLUSH, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def suspend() -> None:
    """Stop as Ctrl-Z does; it comes back when the shell lets it go on."""
    os.kill(os.getpid(), signal.SIGTSTP)


@contextmanager
def terminated() -> Iterator[None]:
    """SIGTERM ends what is inside as an exception, so that the terminal is given back first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
