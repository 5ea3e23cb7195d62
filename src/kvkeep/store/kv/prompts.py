"""Prompts beside their records: which blocks follow which, pieces to load, and prefetches."""

from __future__ import annotations

import threading
from collections import OrderedDict
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from kvkeep.store.blocks.base import runs_of, seconds_of
from kvkeep.store.kv.forms import BASE
from kvkeep.store.kv.paying import LoadPiece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvkeep.store.kv.positions import Position, PositionPiece, PromptIds
    from kvkeep.store.tiers import BlockPrefetch, Removed

__all__ = ["Followers", "Prefetch", "load_pieces", "tokens_by_tier"]

_MOST_LINKS: Final = 1 << 15


def load_pieces(
    position: Position | None, prompt: PromptIds, tiers: Sequence[str]
) -> list[LoadPiece]:
    """Return a position as pieces that are loaded whole or not; ``tiers`` name all levels.

    Of blocks of all layers these are the runs of blocks in one tier; else the position as a whole.
    """
    if position is None or not position.pieces:
        return []
    start, runs = prompt.start, list[LoadPiece]()
    tier_bytes: dict[str, int] = {}
    for piece, level in zip(position.pieces, position.levels, strict=True):
        size, tier = piece.raw_bytes, tiers[level]
        if piece.group == BASE and piece.start < start:
            size = size * (piece.stop - start) // (piece.stop - piece.start)
        if prompt.forms.whole and tier not in tier_bytes:
            tier_bytes = {tier: 0}
            runs.append(LoadPiece(0, tier, tier_bytes))
        tier_bytes[tier] = tier_bytes.get(tier, 0) + size
        if runs:
            runs[-1] = runs[-1]._replace(stop=piece.stop)
    most = max(tier_bytes, key=tier_bytes.__getitem__)
    return runs or [LoadPiece(position.tokens, most, tier_bytes)]


def tokens_by_tier(
    found: Iterable[tuple[PositionPiece, str]], tokens: int, start: int
) -> Iterator[tuple[str, int]]:
    """Yield ``(tier, tokens)`` for tokens ``start`` … ``tokens - 1`` of a position.

    Counted are the records of layers that keep every token. If there are none, the last record
    stands for all.
    """
    last = ""
    for piece, name in found:
        last = name
        if piece.group == BASE and piece.stop > start:
            yield name, piece.stop - max(piece.start, start)
            start = piece.stop
    if last and start < tokens:
        yield last, tokens - start


class Followers:
    """Remembers which blocks follow which, so that a removal can delete them too.

    Block ids are hashes, from which the order cannot be read. The latest `_MOST_LINKS` links of
    prompts that this store put or read are kept.

    Thread safety: all methods. Cost: about 0.1 µs a block, and up to 500 bytes a link.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: OrderedDict[bytes, set[bytes]] = OrderedDict()
        self._links = 0

    def note(self, blocks: Sequence[bytes]) -> None:
        """Record that a prompt consists of ``blocks``, in this order."""
        known = self._next
        new = [
            (before, block)
            for before, block in pairwise(blocks)
            if block not in known.get(before, ())
        ]
        if not new:
            return
        with self._lock:
            for before, block in new:
                behind = known.setdefault(before, set())
                self._links += block not in behind
                behind.add(block)
            while self._links > _MOST_LINKS:
                self._links -= len(known.popitem(last=False)[1])

    def delete(self, blocks: Iterable[bytes], delete: Callable[[list[bytes]], Removed]) -> Removed:
        """Call ``delete`` for blocks and those known to follow them."""
        ids = list(blocks)
        return delete([*ids, *self._take(ids)])

    def _take(self, blocks: Iterable[bytes]) -> list[bytes]:
        """Return all blocks known to follow ``blocks``, directly or not, and forget these links."""
        found: dict[bytes, None] = {}
        ahead = list(blocks)
        with self._lock:
            while ahead:
                behind = self._next.pop(ahead.pop(), None)
                if behind is None:
                    continue
                self._links -= len(behind)
                ahead += behind
                found.update(dict.fromkeys(behind))
        return list(found)


class Prefetch:
    """Handle of a background read of a prompt's KV from slower tiers into memory.

    After the store is closed, `done` and `cancel` still work; everything else raises
    `IllegalStep`.

    Thread safety: all methods.
    """

    __slots__ = ("_blocks", "_lengths", "_whole", "start")

    def __init__(
        self, blocks: BlockPrefetch, start: int, lengths: Sequence[int], *, whole: bool = False
    ) -> None:
        self._blocks = blocks
        self._lengths = lengths  # filled by the background thread, once it looked the blocks up
        self._whole = whole  # only all records together are of use
        self.start = start
        """The first token of the first requested block."""

    @property
    def done(self) -> bool:
        """Whether no more blocks will arrive: all are in memory, or the rest cannot be read."""
        return self._blocks.done

    @property
    def tokens(self) -> int:
        """Length of the prompt's prefix that is in memory now, in tokens.

        Of snapshots, 0 until all records of the position are there.
        """
        return self._count(self._blocks.ready)

    @property
    def sources(self) -> tuple[tuple[str, int], ...]:
        """``(tier, tokens)`` of the blocks in memory now, in order from `start`."""
        names = self._blocks.sources
        parts = zip(names, self._lengths, strict=False)
        return runs_of((name, tokens) for name, tokens in parts if tokens)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until `done`, at most ``timeout`` seconds, and return `tokens`."""
        timeout = None if timeout is None else seconds_of("timeout", timeout)
        return self._count(self._blocks.wait(timeout))

    def cancel(self) -> None:
        """Start no more reads. Reads that have begun still complete."""
        self._blocks.cancel()

    def _count(self, ready: int) -> int:
        if self._whole and ready < len(self._lengths):
            return 0
        return self.start + sum(self._lengths[:ready]) if ready else 0
