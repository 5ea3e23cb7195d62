"""`ThreadPools`: threads for work that would block the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LARGE", "ThreadPools"]

Result = TypeVar("Result")

LARGE = 64 << 10
"""Characters or bytes. A tokenizer takes about a tenth of a second for so many."""
# Two, so that one long prompt does not delay all others.
_TOKENIZER_THREADS = 2


class ThreadPools:
    """Threads for work that would block the event loop: to generate, to inspect, and large work.

    Work larger than `LARGE` runs in a thread of its own, so that it never delays small work. Work
    whose request ends before its turn is dropped.

    Thread safety: for the event loop.
    """

    def __init__(self) -> None:
        self._tokenizing = ThreadPoolExecutor(_TOKENIZER_THREADS, "kvkeep tokenizer")
        self._inspecting = ThreadPoolExecutor(1, "kvkeep counter")
        self._large = ThreadPoolExecutor(1, "kvkeep large texts")

    async def for_generation(self, function: Callable[[], Result], size: int) -> Result:
        """Run ``function``, which tokenizes ``size`` characters of a generation request."""
        return await _run(self._large if size > LARGE else self._tokenizing, function)

    async def for_inspection(self, function: Callable[[], Result], size: int = 0) -> Result:
        """Run ``function``, which tokenizes ``size`` characters of another request, or queries."""
        return await _run(self._large if size > LARGE else self._inspecting, function)

    async def for_parsing(self, function: Callable[[], Result], size: int) -> Result:
        """Run ``function``, which parses ``size`` bytes: in a thread only if they are many."""
        return await _run(self._large, function) if size > LARGE else function()

    def close(self) -> None:
        """Wait for running work and drop the rest."""
        for pool in (self._tokenizing, self._inspecting, self._large):
            pool.shutdown(cancel_futures=True)


async def _run(pool: ThreadPoolExecutor, function: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(pool, function)
