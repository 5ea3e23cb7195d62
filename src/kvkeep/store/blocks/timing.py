"""`Timing`: how long each put and get of a store took, for the log."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Timing"]

_LOG = logging.getLogger("kvkeep.store")


class Timing:
    """Logs the operations of one store at DEBUG; ``unit`` is "tokens" or "blocks".

    Thread safety: all methods. Cost: below a microsecond with the logger ``kvkeep.store`` above
    DEBUG.
    """

    def __init__(self, unit: str) -> None:
        self._unit = unit

    def begin(self) -> float:
        """Return the start time of an operation, or 0.0 if it is not to be logged."""
        return time.perf_counter() if _LOG.isEnabledFor(logging.DEBUG) else 0.0

    def end(
        self,
        began: float,
        what: Literal["put", "get"],
        *,
        asked: int,
        moved: int,
        size: int,
        tiers: Sequence[tuple[str, int]],
    ) -> None:
        """Log an operation for which `begin` returned ``began``, not 0.

        ``moved`` of the ``asked`` tokens or blocks, of ``size`` bytes, were stored or returned:
        ``tiers`` has ``(tier, moved)`` in order. A put names the first tier only; slower tiers are
        written later.
        """
        seconds = time.perf_counter() - began
        _LOG.debug(
            "%s %d of %d %s, %d bytes in %.6f s, %.2f GB/s, %s",
            what, moved, asked, self._unit, size, seconds,
            size / 1e9 / seconds if seconds > 0 else 0.0,
            ", ".join(f"{name} {count}" for name, count in tiers) or "nowhere",
        )  # fmt: skip
