"""`TailRead`: a prompt's stored KV, read from its end while its front is computed."""

from __future__ import annotations

import threading
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.core.errors import IllegalStep, InvalidValue, whole
from kvkeep.store.blocks.stats import closed_is_illegal, runs_of, seconds_of
from kvkeep.store.kv.loaded import LoadedKV
from kvkeep.store.tiers import TailLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.store.kv.forms import KV, Form
    from kvkeep.store.kv.lookup import StoredBlocks
    from kvkeep.store.kv.names import PromptBlocks
    from kvkeep.store.tiers import TieredStore

__all__ = ["TailRead"]


class _TailBlock(NamedTuple):
    """One stored block: tokens ``begin`` … ``stop - 1``, at a level of the store."""

    id: bytes
    level: int
    begin: int
    stop: int


class TailRead:
    """The stored KV of a prompt's tokens `start` … `stop - 1`, found and not read yet.

    `read` delivers it from the end, block by block, in one thread, while another computes from the
    front and calls `stop_before` as it goes on. Where both meet, the KV of the prompt is complete.
    `KVStore.load_tail` returns it. (Cake, arXiv 2410.03065)

    Thread safety: all methods; `read` is called once.

    Attributes:
        start, stop: the tokens whose KV is stored; equal if none is.
        runs: ``(tier, tokens)`` of these, in order.
        unit: tokens of a block. Delivered ranges begin at a multiple of it, or at `start`.
        source: while ``sink`` of `read` is called, where its KV is from, as `KVStore.get` names it.
    """

    def __init__(
        self,
        tiered: TieredStore,
        form: Form,
        prompt: PromptBlocks,
        found: StoredBlocks,
        begin: Callable[[], Callable[[LoadedKV], object]],
    ) -> None:
        """``found`` begins at the block of the prompt's start.

        ``begin`` is called when `read` begins; what it returns, with what came, when it ends.
        """
        self.unit = prompt.names.block_tokens
        self.start = self.stop = prompt.start
        self._blocks: Sequence[_TailBlock] = _blocks_of(found, prompt.start, self.unit)
        if self._blocks:
            self.stop = self._blocks[-1].stop
        names = tiered.names
        self.runs = runs_of((names[one.level], self._tokens(one)) for one in self._blocks)
        self._tiered, self._form, self._begin = tiered, form, begin
        self._prompt = prompt
        self._full: list[bytes] = []
        self._limit = TailLimit()
        self._lock = threading.Lock()
        self._arrived: dict[int, str] = {}  # position of a block → the tier that it came from
        self.source = ""
        self._begun = False
        self._over = threading.Event()

    # --- the thread that loads -------------------------------------------------------------------

    def read(
        self, sink: Callable[[int, int, KV], object], *, deadline: float | None = None
    ) -> tuple[tuple[int, int], ...]:
        """Deliver the KV, the last block first; return `delivered`.

        ``sink(start, stop, kv)`` is called in this thread, once for each block that arrives, with
        the KV of tokens ``start`` … ``stop - 1``, as `KVStore.get` returns it. It must copy ``kv``,
        which is the store's memory. An exception of ``sink`` ends the read and is passed on.

        Returns when all blocks from `stop_before` on were delivered or proved missing, or after
        ``deadline`` seconds, whatever tiers do. A missing, damaged or late block is passed over.

        Raises:
            IllegalStep: this was called before, or the store was closed.
        """
        deadline = None if deadline is None else seconds_of("deadline", deadline)
        with self._lock:
            if self._begun:
                raise IllegalStep("read was called before; KVStore.load_tail begins another one")
            self._begun = True
        blocks, sources = self._blocks, list[str]()
        lengths = [one.stop - one.begin for one in blocks]

        def take(at: int, raw: memoryview) -> None:
            begin, stop = blocks[at].begin, blocks[at].stop
            skip = max(0, self.start - begin)
            self.source = sources[-1]
            if blocks[at].id in self._tiered.inexact:
                self._tiered.inexact.add([self._head(begin // self.unit)])
            sink(begin + skip, stop, self._form.view(raw, lengths[at], skip=skip))
            with self._lock:
                self._arrived[at] = self.source

        ended = self._begin()
        try:
            with closed_is_illegal():
                self._tiered.read_back(
                    [one.id for one in blocks], self._form.sizes(lengths), take,
                    levels=[one.level for one in blocks], limit=self._limit, deadline=deadline,
                    sources=sources,
                )  # fmt: skip
        finally:
            self._over.set()
            ended(LoadedKV(None, sum(b - a for a, b in self.delivered), self.sources))
        return self.delivered

    def room(self) -> KV:
        """Return new memory for all of the KV: a pair of tensors for each layer."""
        return self._form.empty(self.stop - self.start, tuples=True)

    def relearn(self) -> None:
        """Measure the tier again, in the background; call it where its KV is not worth reading.

        A few blocks are read if the tier was not read for ten seconds, so that a tier that is fast
        again is used again.
        """
        blocks = self._blocks[-4:]
        if blocks:
            sizes = self._form.sizes(one.stop - one.begin for one in blocks)
            self._tiered.relearn([one.id for one in blocks], sizes, blocks[0].level)

    # --- the thread that computes ----------------------------------------------------------------

    def stop_before(self, token: int) -> None:
        """Read no block that ends at or before ``token``: these tokens are computed.

        Blocks not begun stay unread, and those on their way are dropped when they arrive. A block
        with tokens on both sides is delivered whole.

        Raises:
            InvalidValue: ``token`` is no number of tokens.
        """
        token = whole("token", token, 0)
        self._limit.move(bisect_right(self._blocks, token, key=lambda one: one.stop))

    def cancel(self) -> None:
        """Read no more."""
        self._limit.move(len(self._blocks))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until `read` has returned, at most ``timeout`` seconds; return whether it has."""
        return self._over.wait(None if timeout is None else seconds_of("timeout", timeout))

    # --- what has come ---------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether `read` has returned, or failed."""
        return self._over.is_set()

    @property
    def front(self) -> int:
        """The first token from which all up to `stop` were delivered; `stop` if none were."""
        ranges = self.delivered
        return ranges[-1][0] if ranges and ranges[-1][1] == self.stop else self.stop

    @property
    def delivered(self) -> tuple[tuple[int, int], ...]:
        """The ranges ``(start, stop)`` of tokens whose KV ``sink`` has taken, in order."""
        with self._lock:
            arrived = sorted(self._arrived)
        ranges: list[tuple[int, int]] = []
        for one in map(self._blocks.__getitem__, arrived):
            if ranges and ranges[-1][1] == one.begin:
                ranges[-1] = ranges[-1][0], one.stop
            else:
                ranges.append((max(self.start, one.begin), one.stop))
        return tuple(ranges)

    @property
    def sources(self) -> tuple[tuple[str, int], ...]:
        """``(tier, tokens)`` of what was delivered, in order, as `KVStore.get` names them."""
        with self._lock:
            arrived = [(self._blocks[at], self._arrived[at]) for at in sorted(self._arrived)]
        return runs_of((tier, self._tokens(one)) for one, tier in arrived if tier)

    def tier_bytes(self, start: int, stop: int) -> dict[str, int]:
        """Return the bytes of tokens ``start`` … ``stop - 1`` by tier, for `CostModel.load_s`.

        Raises:
            InvalidValue: these are not within `start` … `stop`.
        """
        if not self.start <= start <= stop <= self.stop:
            raise InvalidValue(
                f"tokens {start} … {stop} are not within {self.start} … {self.stop}, whose KV is "
                "stored"
            )
        found: dict[str, int] = {}
        at = self.start
        for tier, tokens in self.runs:
            count = min(stop, at + tokens) - max(start, at)
            at += tokens
            if count > 0:
                found[tier] = found.get(tier, 0) + self._form.raw_bytes(count)
        return found

    def _head(self, at: int) -> bytes:
        """Return the id of the first token of block ``at`` of the prompt."""
        row, _, names = self._prompt
        self._full = self._full or names.full(row)
        return names.head(row, at, self._full)

    def _tokens(self, block: _TailBlock) -> int:
        return block.stop - max(self.start, block.begin)

    def __repr__(self) -> str:
        return f"<TailRead of tokens {self.start} … {self.stop}, delivered: {self.delivered}>"


def _blocks_of(found: StoredBlocks, start: int, unit: int) -> list[_TailBlock]:
    """Return the found blocks with their tokens; none if they end at ``start`` or before."""
    blocks: list[_TailBlock] = []
    begin = start - start % unit
    for block, level, tokens in zip(*found, strict=True):
        blocks.append(_TailBlock(block, level, begin, begin + tokens))
        begin += tokens
    return blocks if begin > start else []
