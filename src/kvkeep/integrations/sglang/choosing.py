"""`PageChoices`: how many of the stored pages of a prompt SGLang is told about."""

from __future__ import annotations

import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvkeep.core.errors import KVKeepError
from kvkeep.integrations.load_choice import LoadChooser, StoredRun
from kvkeep.integrations.load_costs import LoadPace, ProbeEnd, TimedLoads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.store import BlockStore

__all__ = ["PageChoices"]

_LOG = logging.getLogger("kvkeep.sglang")
_PROBED = 16  # records that a probe may read


class PageChoices:
    """Compares loading pages of ``page_tokens`` tokens with computing them.

    SGLang tells a storage backend nothing of what it computes: that cost is the store's, from a
    file. Without one, all that is stored is loaded.

    Thread safety: all methods.

    Attributes:
        slower_pages: pages that were found, and not reported, as computing them is faster.
    """

    def __init__(self, store: BlockStore, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._costs = TimedLoads(store)
        self._chooser = LoadChooser(store.cost.prefill)
        self._lock = threading.Lock()
        self._prober = ThreadPoolExecutor(1, "kvkeep probe")
        self.slower_pages = 0

    def worth(
        self, keys: Sequence[bytes], size: int, records: int, *, first: int, divisible: bool
    ) -> int:
        """Return how many leading pages are worth loading, whose records have ``keys``.

        A page has ``records`` of ``size`` bytes. ``first`` pages of the prompt are there before.
        Not ``divisible``: all are, or none.
        """
        pages, tokens = len(keys) // records, self._page_tokens
        runs = self._runs(keys, size, records, first)
        if not runs:
            return pages
        with self._lock:
            length = (first + pages) * tokens + 1
            choice = self._chooser.choose(first * tokens, length, runs, divisible=divisible)
            count = max(0, choice.tokens // tokens - first)
            probes = count < pages and self._chooser.take_probe(choice.refused)
            self.slower_pages += pages - count
        if count < pages:
            _LOG.debug(
                "%d stored pages are computed: loading all that is stored would take %.1f ms, "
                "computing %.1f ms",
                pages - count, choice.load_s * 1e3, choice.compute_s * 1e3,
            )  # fmt: skip
        if probes:
            some = keys[count * records : count * records + _PROBED]
            self._prober.submit(self._probe, choice.refused, some, size)
        return count

    def _runs(self, keys: Sequence[bytes], size: int, records: int, first: int) -> list[StoredRun]:
        """Return the pieces of these pages, by tier; none if computing is not known."""
        if not keys or not self._costs.cost.prefill.known:
            return []
        found: dict[int, StoredRun] = {}
        for run in self._costs.runs(keys, [size] * len(keys)):
            end = (first - -run.end // records) * self._page_tokens
            seconds = run.seconds
            if end in found and seconds is not None:  # the tier changes within a page
                seconds += found[end].seconds or 0.0
            found[end] = StoredRun(end, run.tier, seconds, run.error)
        return list(found.values())

    def _probe(self, tier: str, keys: Sequence[bytes], size: int) -> None:
        """In a thread: read a few records, for no prompt."""
        end = ProbeEnd(tier, 0.0, 0.0, came=False)
        try:
            end = self._costs.probe(tier, keys, [size] * len(keys))
        except KVKeepError as error:
            _LOG.warning("a probe of %s failed: %s", tier, error)
        finally:
            with self._lock:
                self._chooser.probed(tier, end.seconds, in_time=end.came, expected=end.expected)

    def patience(self, keys: Sequence[bytes], size: int, records: int) -> float:
        """Return the seconds after which computing these pages is faster than loading them."""
        runs = self._runs(keys, size, records, 0)
        if not runs:
            return math.inf
        with self._lock:
            return self._chooser.choose(0, runs[-1].end + 1, runs).patience

    def read(
        self, keys: Sequence[bytes], size: int, sink: Callable[[int, memoryview], None],
        until: float,
    ) -> int:  # fmt: skip
        """Read records until ``until`` (monotonic seconds); return how many leading ones came."""
        read = self._costs.read(keys, [size] * len(keys), sink, LoadPace(until), lambda: False)
        if read.failed:
            with self._lock:
                self._chooser.came_late(read.failed)
        return read.blocks

    def close(self) -> None:
        """Begin no more probes."""
        self._prober.shutdown(wait=False, cancel_futures=True)
