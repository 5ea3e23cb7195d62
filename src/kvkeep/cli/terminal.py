"""Raw keyboard input, suspending and termination, with the terminal restored afterwards."""

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

SUSPEND: Final = "\x1a"  # Ctrl-Z, which is read as a key
# Keys that send several characters: arrows, function keys, Alt with a key.
_SEVERAL: Final = re.compile(r"\x1b(?:\[[0-9;?]*[@-~]|O.|.)?", re.DOTALL)


@contextmanager
def keys() -> Iterator[Keys]:
    """Read keys without echo; yield a function that waits up to some seconds for keys.

    The function returns the keys pressed, "" if none; arrow and function keys are left out. Ctrl-C
    interrupts as usual; Ctrl-Z is returned as a key, so that the terminal can be restored before
    the process stops. Without a terminal, or without POSIX, no key is ever returned.
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
            if not pressed:  # end of input: the terminal is gone
                raise KeyboardInterrupt
            return _SEVERAL.sub("", pressed.decode("utf-8", "replace"))

        yield key
    finally:
        # Discards keys that were typed and not read: the shell would run them.
        termios.tcsetattr(stdin, termios.TCSAFLUSH, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def suspend() -> None:
    """Stop the process as Ctrl-Z does; return when it is continued."""
    os.kill(os.getpid(), signal.SIGTSTP)


@contextmanager
def terminated() -> Iterator[None]:
    """Raise SystemExit on SIGTERM inside the block, so that the terminal is restored."""
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
