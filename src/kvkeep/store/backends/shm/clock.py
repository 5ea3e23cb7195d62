"""The clock of a shared arena: nanoseconds since the machine was started.

All processes of a machine read the same one, and it never jumps. Unix time does, when it is set:
then uses, times to live and pins would be years old or years ahead, as long as the arena exists.
"""

from __future__ import annotations

import time
from typing import Final

__all__ = ["from_unix", "now", "to_unix"]

_NS: Final = 1_000_000_000


def now() -> int:
    """Return the time, in nanoseconds since the machine was started."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def from_unix(seconds: float) -> int:
    """Return the time of this clock at a Unix time; times outside of its range are cut off."""
    ahead = int(min(max(seconds - time.time(), -4e9), 4e9) * _NS)
    return now() + ahead


def to_unix(when: int) -> float:
    """Return the Unix time, in seconds, at a time of this clock."""
    return time.time() + (when - now()) / _NS
