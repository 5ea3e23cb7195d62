"""`Lanes`: threads for what takes long, apart by what it is and how large it is."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LARGE", "Lanes"]

Result = TypeVar("Result")

LARGE = 64 << 10
"""Characters or bytes: a tokenizer takes about a tenth of a second for so many."""
# Two, so that one long prompt does not keep all others waiting.
_TOKENIZER_THREADS = 2


class Lanes:
    """Three kinds of work in threads: tokenizing for answers, for those who look, and parsing.

    What is larger than `LARGE` goes to a thread of its own for such: large ones wait for each
    other, and nothing small is ever behind them. Work whose request has ended before its turn is
    left out.

    Thread safety: for the event loop.
    """

    def __init__(self) -> None:
        self._tokenizing = ThreadPoolExecutor(_TOKENIZER_THREADS, "kvkeep tokenizer")
        self._large = ThreadPoolExecutor(1, "kvkeep tokenizer of large texts")
        self._counting = ThreadPoolExecutor(1, "kvkeep counter")
        self._large_counting = ThreadPoolExecutor(1, "kvkeep counter of large texts")
        self._parsing = ThreadPoolExecutor(1, "kvkeep parser")

    async def tokenizing(self, function: Callable[[], Result], size: int) -> Result:
        """``function()``, which tokenizes ``size`` characters for an answer."""
        return await _run(self._large if size > LARGE else self._tokenizing, function)

    async def counting(self, function: Callable[[], Result], size: int) -> Result:
        """``function()``, which tokenizes for those who only look."""
        return await _run(self._large_counting if size > LARGE else self._counting, function)

    async def parsing(self, function: Callable[[], Result], size: int) -> Result:
        """``function()``, which parses ``size`` bytes; few of them here and now."""
        return await _run(self._parsing, function) if size > LARGE else function()

    def close(self) -> None:
        """Wait for what is at work; the rest is left out."""
        for pool in (
            self._tokenizing,
            self._large,
            self._counting,
            self._large_counting,
            self._parsing,
        ):
            pool.shutdown(cancel_futures=True)


async def _run(pool: ThreadPoolExecutor, function: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(pool, function)
