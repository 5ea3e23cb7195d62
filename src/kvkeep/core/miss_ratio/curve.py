"""`MissRatioCurve`: the share of blocks that an LRU cache of any size would have held."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.errors import InvalidValue, number, whole
from kvkeep.core.keys import KEY_BYTES, as_namespace
from kvkeep.core.miss_ratio.stack import COLD, DistanceHistogram, Stack

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kvkeep.core.keys import Namespace, NamespaceLike

    Ints = npt.NDArray[np.int64]
    Words = npt.NDArray[np.uint64]

__all__ = ["NAMESPACES", "MissRatioCurve"]

NAMESPACES = 64
"""The first so many namespaces have a separate curve; all others share one."""
_MOST_WATCHED = 65_536
_BATCH_BLOCKS = 16_384
_BATCH_SAMPLED = 2048
_BATCH_PROMPTS = 1024
_MOMENT_BITS = 12
"""A block is repeated if it is among the (at most) 4,096 blocks before it."""
_WORD = np.dtype("<u8")


class MissRatioCurve:
    """Estimates the hit rate of caches of any size from the blocks of all prompts.

    The model is an LRU cache of blocks of ``block_tokens`` tokens that holds prefixes: a block is a
    hit only if all blocks before it are (see `Stack`). A share ``sample`` of all blocks is watched,
    chosen by key, and stands for the others (SHARDS: Waldspurger et al., FAST '15;
    `DistanceHistogram` adjusts the counts). A tenth is enough for caches of some thousand blocks;
    smaller ones need more.

    The curve reaches up to ``most_blocks``. 65,536 blocks are watched at most; the sample is made
    smaller where needed.

    The first 64 namespaces have a curve each, the others one together; all share the modelled
    memory.

    Thread safety: none. Memory: 200 bytes a watched block, 30 KB a namespace. Cost: 0.05 µs a block
    and 0.4 µs more if it is in the sample, in batches of about a millisecond.
    """

    def __init__(
        self,
        sample: float = 0.1,
        block_tokens: int = 512,
        *,
        most_blocks: int | None = None,
    ) -> None:
        sample = number("sample", sample, "a share above 0, 1 at most,", above=0)
        if sample > 1:
            raise InvalidValue(f"sample is a share above 0, 1 at most; got {sample:g}")
        if most_blocks is None:
            most_blocks = int(_MOST_WATCHED / sample)
        self.block_tokens = whole("block_tokens", block_tokens, 1)
        self.most_blocks = whole("most_blocks", most_blocks, 1, 1 << 62)
        self.sample = min(float(sample), _MOST_WATCHED / self.most_blocks)
        self._total = 0
        self._most = np.uint64(min(int(self.sample * 2.0**64), 2**64 - 1))
        self._stack = Stack(math.ceil(self.most_blocks * self.sample))
        self._histogram = DistanceHistogram(NAMESPACES + 1, float(self.most_blocks))
        self._rows: dict[Namespace, int] = {}
        # Bounds the sampled blocks of a batch, and so the tables of `Stack`.
        self._batch = min(_BATCH_BLOCKS, int(_BATCH_SAMPLED / self.sample))
        self._begin_batch()

    # --- requests ----------------------------------------------------------------------------

    def requested(self, keys: Sequence[bytes], namespace: NamespaceLike = "") -> None:
        """Count a prompt of these blocks; `kvkeep.core.keys.chain_keys` makes ``keys``."""
        joined = b"".join(keys)
        if len(joined) != len(keys) * KEY_BYTES:
            raise InvalidValue(f"keys have {KEY_BYTES} bytes each; use kvkeep.core.keys.chain_keys")
        words = np.frombuffer(joined, _WORD)[:: KEY_BYTES // _WORD.itemsize]
        self.prompts(words, [len(words)], [self.row(namespace)], [True])

    def prompts(self, words: Words, blocks: list[int], rows: list[int], counts: list[bool]) -> None:
        """Count prompts one after the other, given 64-bit keys of the caller's own making.

        Each prompt has a number of ``blocks`` and a `row`. Keys are chained and evenly spread. A
        prompt that does not count was not requested: tokens stored with an answer enter the
        modelled memory, and are neither hits nor misses.
        """
        self._words.append(words)
        self._blocks += blocks
        self._prompt_rows += rows
        self._counts += counts
        self._waiting += len(words)
        if self._waiting >= self._batch or len(self._blocks) >= _BATCH_PROMPTS:
            self.settle()

    def row(self, namespace: NamespaceLike) -> int:
        """Return the row in which a namespace is counted; the last row is shared."""
        space = as_namespace(namespace)
        row = self._rows.get(space)
        if row is None:
            row = min(len(self._rows), NAMESPACES)
            if row < NAMESPACES:
                self._rows[space] = row
        return row

    def settle(self) -> None:
        """Count the prompts of the current batch. Reading the curve does so too."""
        if not self._blocks:
            return
        words = np.concatenate(self._words)
        blocks, rows = np.array(self._blocks, np.int64), np.array(self._prompt_rows, np.int64)
        counts = np.array(self._counts, bool)
        self._begin_batch()
        owners = np.repeat(np.arange(len(blocks)), blocks)
        again = _repeated(words) & counts[owners]
        sampled = np.flatnonzero(words <= self._most)
        per_prompt = np.bincount(owners[sampled], minlength=len(blocks))
        distances = self._stack.touch(words[sampled], per_prompt)

        requested = np.zeros(NAMESPACES + 1, np.int64)
        np.add.at(requested, rows, blocks * counts)
        repeated = np.bincount(rows[owners[again]], minlength=NAMESPACES + 1)
        self._total += int(requested.sum())
        self._histogram.requested(requested, repeated)
        far = np.where(distances == COLD, np.inf, distances / self.sample)
        mine = counts[owners[sampled]]
        sampled = sampled[mine]
        self._histogram.add(rows[owners[sampled]], again[sampled].astype(np.int64), far[mine])

    def _begin_batch(self) -> None:
        self._words: list[Words] = []
        self._blocks: list[int] = []  # of each prompt
        self._prompt_rows: list[int] = []
        self._counts: list[bool] = []
        self._waiting = 0  # blocks in all of them

    # --- the curve ---------------------------------------------------------------------------

    def hit_rate(self, capacity: float, namespace: NamespaceLike | None = None) -> float:
        """Return the hit rate, 0 … 1, of a memory of ``capacity`` blocks.

        For one namespace's prompts, or for all. 0 if nothing was requested.
        """
        return self.curve((capacity,), namespace)[0]

    def curve(
        self, capacities: Sequence[float], namespace: NamespaceLike | None = None
    ) -> list[float]:
        """Return `hit_rate` at each capacity. Cost: about 0.2 ms, whatever their number."""
        row: int | None = None
        if namespace is not None:
            row = self._rows.get(as_namespace(namespace), -1)
        return self._rates(capacities, row)

    def _rates(self, capacities: Sequence[float], row: int | None) -> list[float]:
        wanted = np.asarray(capacities, np.float64)
        if wanted.ndim != 1 or not ((wanted >= 0) & (wanted <= self.most_blocks)).all():
            raise InvalidValue(
                f"capacities are blocks in 0 … {self.most_blocks} (most_blocks), got {capacities!r}"
            )
        self.settle()
        if row == -1:
            return [0.0] * len(wanted)
        found: list[float] = self._histogram.hit_rates(wanted, self.sample, row).tolist()
        return found

    @property
    def blocks(self) -> int:
        """Blocks requested so far."""
        self.settle()
        return self._total

    @property
    def namespaces(self) -> list[Namespace]:
        """The namespaces that have a separate curve."""
        return list(self._rows)

    def check(self) -> None:
        """Assert the invariants of the stack."""
        self.settle()
        self._stack.check()

    def __repr__(self) -> str:
        return (
            f"<MissRatioCurve of {self.blocks:,} blocks of {self.block_tokens} tokens, "
            f"{self.sample:.3g} of them sampled>"
        )


def _repeated(words: Words) -> npt.NDArray[np.bool_]:
    """Return which keys occur earlier in the same stretch of 4,096. Cost: 10 ns a key."""
    width = 1 << _MOMENT_BITS
    low = np.uint64(width - 1)
    again = np.zeros(len(words), bool)
    places = np.arange(min(width, len(words)), dtype=np.uint64)
    for start in range(0, len(words), width):
        piece = words[start : start + width]
        # Positions in the lowest bits; the other 52 tell a few thousand keys apart.
        mixed = (piece & ~low) | places[: len(piece)]
        mixed.sort()
        same = np.flatnonzero((mixed[1:] ^ mixed[:-1]) <= low) + 1
        again[start + (mixed[same] & low).astype(np.int64)] = True
    return again
