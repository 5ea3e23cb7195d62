"""`TieredReads`: finds blocks over memory and the tiers below it, and reads them."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import BackendFailed, IllegalStep
from kvkeep.store.tiers.inexact import InexactBlocks
from kvkeep.store.tiers.reading import ReadRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvkeep.store.tiers.block_prefetch import BlockPrefetch
    from kvkeep.store.tiers.levels import Levels
    from kvkeep.store.tiers.loss_log import Loss
    from kvkeep.store.tiers.reading import Reader

__all__ = ["TieredReads"]

_RELEARN_S: Final = 10.0
_RELEARN_BLOCKS: Final = 4


class TieredReads:
    """The lookups and reads of a `TieredStore`.

    Thread safety: all methods.

    Attributes:
        inexact: the blocks that callers were given and that are not exact: what is stored under
            their names, or behind them, may be made of them.
    """

    def __init__(self, levels: Levels, reader: Reader) -> None:
        self._levels = levels
        self._reader = reader
        self.inexact = InexactBlocks()
        self._closed = False
        self._process = os.getpid()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def inherited(self) -> bool:
        """Whether this process was forked from the one that opened the store."""
        return os.getpid() != self._process

    def check_open(self) -> None:
        """Raise `IllegalStep` if the store is closed, or was opened by the parent process."""
        if self._closed:
            raise IllegalStep("the store is closed")
        if self.inherited:
            raise IllegalStep(
                f"the store was opened by process {self._process}, and this one was forked from "
                "it; open another store here"
            )

    @contextmanager
    def _closed_is_illegal(self) -> Iterator[None]:
        """Raise `IllegalStep` where memory fails because the store was closed meanwhile."""
        try:
            yield
        except BackendFailed:
            self.check_open()
            raise

    # --- lookups ---------------------------------------------------------------------------------

    def locate(self, blocks: Sequence[bytes], until: float | None = None) -> list[int]:
        """Return the level that each leading block would come from, up to the first missing one.

        Level 0 is memory. Tiers that may hold unknown blocks are queried, each for its timeout at
        most, and until ``until`` (monotonic seconds) at most.
        """
        self.check_open()
        levels = self._levels.locate(blocks, until)
        if len(levels) < len(blocks):
            self.check_open()  # if closed meanwhile, the rest may not be missing
        return levels

    def locate_each(self, blocks: Sequence[bytes], until: float | None = None) -> list[int | None]:
        """Return the level that each of ``blocks`` would come from, None for a missing one.

        As `locate`, in one query a tier; a missing block does not hide those behind it.
        """
        self.check_open()
        levels = self._levels.locate_each(blocks, until)
        if None in levels:
            self.check_open()  # see `locate`
        return levels

    def knows(self, block: bytes) -> bool:
        """Whether ``block`` is known to be readable from some level; no I/O."""
        self.check_open()
        return self._levels.level_of(block) is not None

    def holders(self, blocks: Sequence[bytes]) -> list[list[int]]:
        """Return the levels known to hold each of ``blocks``, fastest first; no I/O."""
        self.check_open()
        return [self._levels.holders(block) for block in blocks]

    def losses_of(self, blocks: Sequence[bytes], since: float | None = None) -> list[Loss | None]:
        """Return why each of ``blocks`` is missing, None where it can be read; no I/O.

        A tier whose circuit breaker is open, or that failed at or after ``since`` (Unix seconds),
        counts as unavailable for the blocks that it may hold.
        """
        self.check_open()
        return self._levels.losses_of(blocks, since)

    # --- reads -----------------------------------------------------------------------------------

    def read(
        self,
        blocks: Sequence[bytes],
        raw_bytes: Sequence[int],
        sink: Callable[[int, memoryview], None],
        *,
        levels: Sequence[int] | None = None,
        deadline: float | None = None,
        cancelled: Callable[[], bool] | None = None,
        sources: list[str] | None = None,
    ) -> int:
        """Pass the KV of ``blocks`` to ``sink``, in order, up to the first that is missing.

        ``raw_bytes`` are their lengths; a record of another length is a miss. ``sink(i, raw)`` runs
        in this thread while other threads read later blocks; it must copy ``raw``, and raises only
        for bugs. ``levels`` is the result of `locate`, if that was called before. After
        ``deadline`` seconds the read ends with the blocks that have arrived. The name of the tier
        that each block was read from is appended to ``sources``; of KV that is not exact with its
        codec behind it: "s3, int8".

        Returns how many blocks were passed to ``sink``.
        """
        self.check_open()
        until = None if deadline is None else time.monotonic() + deadline
        if levels is None:
            levels = self.locate(blocks, until)
        with self._closed_is_illegal():
            request = ReadRequest(
                self._reader, raw_bytes, sink,
                until=until, cancelled=cancelled, sources=sources, inexact=self.inexact,
            )  # fmt: skip
            count = request.read(blocks, levels)
        if count < len(blocks):
            self.check_open()  # if closed meanwhile, the rest may not be missing
        return count

    def relearn(self, blocks: Sequence[bytes], raw_bytes: Sequence[int], level: int) -> None:
        """Read a few of ``blocks``, which are not worth reading, if that may have changed.

        They are read in the background if nothing was read from their level for ten seconds. It is
        how a tier that was slow for a while becomes worth reading again.
        """
        self.check_open()
        if level and blocks and self._levels.tier(level).reads.age_s > _RELEARN_S:
            self.prefetch(lambda: (blocks[:_RELEARN_BLOCKS], raw_bytes[:_RELEARN_BLOCKS]))

    def prepare_reads(self, raw_bytes: int) -> None:
        """Touch the memory for reads of blocks that do not stay in memory, before the first."""
        self.check_open()
        self._reader.prepare(raw_bytes)

    def prefetch(self, plan: Callable[[], tuple[Sequence[bytes], Sequence[int]]]) -> BlockPrefetch:
        """Read blocks into memory in the background, up to half of memory; return at once.

        ``plan`` returns their ids and raw bytes. It is called in a thread of the store, so it may
        call `locate`, which waits.
        """
        self.check_open()
        return self._reader.prefetch(plan, self.check_open, lambda: self._closed)
