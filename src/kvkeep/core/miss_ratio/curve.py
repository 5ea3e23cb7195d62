"""`MissRatioCurve`: the share of blocks that an LRU cache of any size would have held."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.errors import InvalidValue, number, whole
from kvkeep.core.keys import KEY_BYTES, as_namespace

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kvkeep.core.keys import Namespace, NamespaceLike

    Ints = npt.NDArray[np.int64]
    Words = npt.NDArray[np.uint64]
    Floats = npt.NDArray[np.float64]
    Flags = npt.NDArray[np.bool_]

__all__ = ["COLD", "NAMESPACES", "MissRatioCurve", "Stack"]

NAMESPACES = 64
"""The first so many namespaces have a separate curve; all others share one."""

_MOST_WATCHED = 65_536
_BATCH_BLOCKS = 16_384
_BATCH_SAMPLED = 2048
_BATCH_PROMPTS = 1024
_MOMENT_BITS = 12
"""A block is repeated if it is among the (at most) 4,096 blocks before it."""

_WORD = np.dtype("<u8")
COLD = -1
"""The distance of a block that is not in the stack."""

_PIECE = 32
_EARLIER = np.tri(_PIECE, k=-1, dtype=bool).T


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


class Stack:
    """The last ``depth`` distinct blocks, in the order of their last use.

    A prompt is touched from its last block to its first, so a block always lies above what follows
    it, and distances only grow along a prompt. Therefore an LRU memory of ``c`` blocks holds
    exactly the leading blocks with a distance below ``c``. A block below ``depth`` is a miss in
    every memory up to that size, and is forgotten.

    Prompts come in batches, for speed; the distances are those of one prompt after the other.
    Memory: 16 bytes a block, twice that during a batch. Cost per batch: 10 ns for each block in the
    stack, 0.2 µs for each block touched, and as much for each stretch of blocks that lay together.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._keys = np.empty(0, np.uint64)  # sorted
        self._places = np.empty(0, np.int64)  # of each key; 0 is the least recently used

    def __len__(self) -> int:
        return len(self._keys)

    def touch(self, keys: Words, counts: Ints) -> Ints:
        """Touch prompts one after the other; return the distance of each key before its own prompt.

        ``keys`` are those of all prompts, the first block of each prompt first; ``counts`` is how
        many each has. Equal keys are equal prefixes; no key occurs twice in a prompt.
        """
        total, below = len(keys), len(self._keys)
        if not total:
            return np.empty(0, np.int64)
        ends = np.cumsum(counts)
        starts = ends - counts
        # The order of touching: each prompt's blocks in reverse.
        mirror = np.repeat(starts + ends - 1, counts) - np.arange(total)
        before = self._touch(keys[mirror])
        begun = below + np.repeat(starts, counts)
        # All places in between, except those whose blocks were touched again in this batch.
        distances = begun - before - 1 - _moved(before, begun)
        # Keys that do not stand for prefixes could give a negative distance.
        np.maximum(distances, 0, out=distances)
        distances[before == COLD] = COLD
        return distances[mirror]

    def _touch(self, keys: Words) -> Ints:
        """Return the place of each key when it was touched, and move them all to the top.

        Places from the length of the stack on are those of the batch itself.
        """
        total, below = len(keys), len(self._keys)
        times = _by_key(keys)
        ordered = keys[times]
        new = np.ones(total, bool)
        np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
        first = np.flatnonzero(new)
        unique = ordered[first]
        last = times[np.append(first[1:], total) - 1]  # when each was touched last

        before = np.empty(total, np.int64)
        before[times[1:]] = times[:-1] + below
        at = np.searchsorted(self._keys, unique)
        known = np.zeros(len(unique), bool)
        inside = at < below
        known[inside] = self._keys[at[inside]] == unique[inside]
        before[times[first]] = COLD
        before[times[first[known]]] = self._places[at[known]]

        stays = np.ones(below, np.int64)  # not bool: its cumsum takes ten times as long
        stays[self._places[at[known]]] = 0
        rank = np.cumsum(stays)
        remain = below - int(known.sum())
        top = np.empty(len(unique), np.int64)
        top[np.argsort(last)] = np.arange(remain, remain + len(unique))
        self._places = rank[self._places] - 1
        self._places[at[known]] = top[known]
        self._insert(at[~known], unique[~known], top[~known])
        return before

    def _insert(self, at: Ints, keys: Words, places: Ints) -> None:
        """Add new keys, each before the one ``at`` which it sorts; drop those below the depth."""
        total = len(self._keys) + len(keys)
        where = at + np.arange(len(at))
        old = np.ones(total, bool)
        old[where] = False
        all_keys, all_places = np.empty(total, np.uint64), np.empty(total, np.int64)
        all_keys[old], all_keys[where] = self._keys, keys
        all_places[old], all_places[where] = self._places, places
        if total > self.depth:
            all_places -= total - self.depth
            deep = all_places >= 0
            all_keys, all_places = all_keys[deep], all_places[deep]
        self._keys, self._places = all_keys, all_places

    def check(self) -> None:
        """Assert that keys and places agree."""
        assert len(self._keys) == len(self._places) <= self.depth
        assert (self._keys[1:] > self._keys[:-1]).all(), "keys are not sorted"
        assert sorted(self._places.tolist()) == list(range(len(self._keys)))


def _by_key(keys: Words) -> Ints:
    """Return the order of the keys, by key and then by time."""
    # Positions in the lowest bits make one sort of integers do, five times as fast as argsort. The
    # other bits nearly always tell keys apart; if not, argsort.
    low = np.uint64((1 << len(keys).bit_length()) - 1)
    mixed = (keys & ~low) | np.arange(len(keys), dtype=np.uint64)
    mixed.sort()
    times = (mixed & low).astype(np.int64)
    ordered = keys[times]
    if (ordered[1:] < ordered[:-1]).any():
        return np.argsort(keys, kind="stable")
    return times


def _moved(before: Ints, begun: Ints) -> Ints:
    """Return for each touch how many earlier ones moved a block from above its own.

    Touches of one prompt whose blocks lay together form a stretch: no other stretch lies between
    its blocks, so it is counted as a whole.
    """
    moved = np.zeros(len(before), np.int64)
    warm = np.flatnonzero(before != COLD)
    if not len(warm):
        return moved
    places, prompts = before[warm], begun[warm]
    cuts = np.ones(len(warm), bool)
    cuts[1:] = (places[1:] - places[:-1] != 1) | (prompts[1:] != prompts[:-1])
    heads = np.flatnonzero(cuts)
    sizes = np.diff(heads, append=len(warm))
    moved[warm] = np.repeat(_greater_before(places[heads], sizes), sizes)
    return moved


def _greater_before(values: Ints, weights: Ints) -> Ints:
    """Return for each of distinct ``values`` the weight of the greater ones before it.

    In pieces of 32: a table of the weights in all earlier pieces, and all pairs within a piece.
    Cost: O(n²) of very small steps, 0.1 µs a value for 1,000 of them.
    """
    count = len(values)
    pieces = -(-count // _PIECE)
    ranks = np.empty(count, np.int64)
    ranks[np.argsort(values)] = np.arange(count)
    at = np.arange(count) // _PIECE
    table = np.zeros((pieces + 1, count), np.int32)
    table[at + 1, ranks] = weights
    np.cumsum(table, axis=0, out=table)
    np.cumsum(table[:, ::-1], axis=1, out=table[:, ::-1])
    earlier = table[at, ranks]
    padded = np.full(pieces * _PIECE, -1, np.int64)
    padded[:count] = ranks
    heavy = np.zeros(pieces * _PIECE, np.int64)
    heavy[:count] = weights
    rows = padded.reshape(pieces, _PIECE)
    above = rows[:, :, None] > rows[:, None, :]  # (piece, the earlier one, the later one)
    above &= _EARLIER
    within = np.where(above, heavy.reshape(pieces, _PIECE, 1), 0).sum(axis=1)
    total: Ints = earlier + within.reshape(-1)[:count]
    return total


_EXACT = 512
"""Distances below this have a bin each."""


_STEPS = 128
"""Bins per octave above that: each less than 0.8 % wide."""


class DistanceHistogram:
    """Counts of sampled distances in ``rows`` rows.

    Blocks that were *repeated* a moment ago are counted apart from all others. How many blocks
    there are of either kind is known exactly, not only from the sample:

    - Of blocks that were not repeated, the sample gives the share of hits.
    - Repeated blocks are few and hot, and it is chance whether they are sampled. Only their misses
      come from the sample; all others are hits (SHARDS' adjustment of counts).

    Cost: 20 ns a distance. Memory: 16 bytes for each row and bin, 512 bins and 128 per octave.
    """

    def __init__(self, rows: int, furthest: float) -> None:
        self._bins = int(_bin(np.array([furthest]))[0]) + 1
        # Row 0: not repeated; row 1: repeated.
        self._near = np.zeros((2, rows, self._bins))
        self._sampled = np.zeros((2, rows))  # all in the sample, misses too
        self._requested = np.zeros((2, rows))  # all that were requested

    def add(self, rows: Ints, repeated: Ints, distances: Floats) -> None:
        """Count distances of the sample; infinite ones are misses in any memory."""
        bins = _bin(distances)
        near = bins < self._bins
        cells = repeated * self._sampled.shape[1] + rows
        flat = cells[near] * self._bins + bins[near]
        np.add.at(self._near.reshape(-1), flat, 1.0)
        counts = np.bincount(cells, minlength=self._sampled.size)
        self._sampled += counts.reshape(self._sampled.shape)

    def requested(self, blocks: Ints, repeated: Ints) -> None:
        """Count the blocks requested in each row, and how many of them were repeated."""
        self._requested[0] += blocks - repeated
        self._requested[1] += repeated

    def hit_rates(self, capacities: Floats, sample: float, row: int | None = None) -> Floats:
        """Return the hit rate of each capacity, in blocks; without ``row``, of all rows."""
        which = slice(None) if row is None else slice(row, row + 1)
        requested = self._requested[:, which].sum(axis=1)
        sampled = self._sampled[:, which].sum(axis=1)
        total = float(requested.sum())
        if not total:
            return np.zeros(len(capacities))
        sums = np.cumsum(self._near[:, which].sum(axis=1), axis=1)
        edges = _edges(self._bins + 1)
        first, again = (np.interp(capacities, edges, np.append(0.0, one)) for one in sums)
        share = first / sampled[0] if sampled[0] else np.zeros(len(capacities))
        missed = np.minimum((sampled[1] - again) / sample, requested[1])
        hits = requested[0] * share + requested[1] - missed
        return np.where(capacities >= 1, np.clip(hits / total, 0.0, 1.0), 0.0)


def _bin(distances: Floats) -> Ints:
    """Return the bin of each distance; a very large number for infinite ones."""
    capped = np.minimum(distances, 2.0**60)
    fraction, octave = np.frexp(np.maximum(capped, _EXACT) / _EXACT)  # 0.5 ≤ fraction < 1
    beyond = (octave - 1) * _STEPS + ((fraction * 2 - 1) * _STEPS).astype(np.int64)
    exact = np.minimum(capped, _EXACT).astype(np.int64)
    return np.where(capped < _EXACT, exact, _EXACT + beyond)


def _edges(count: int) -> Floats:
    """Return where the first ``count`` bins begin."""
    beyond = np.maximum(np.arange(count) - _EXACT, 0)
    edges = _EXACT * 2.0 ** (beyond // _STEPS) * (1 + beyond % _STEPS / _STEPS)
    edges[:_EXACT] = np.arange(min(count, _EXACT))
    return edges
