"""Sampled miss-ratio curves: online estimates of the hit rates of caches of other sizes."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.errors import InvalidValue, number, whole
from kvkeep.core.keys import KEY_BYTES, as_namespace, root_key
from kvkeep.core.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kvkeep.core.keys import Namespace, NamespaceLike
    from kvkeep.core.tokens import TokenArray

    Ints = npt.NDArray[np.int64]
    Words = npt.NDArray[np.uint64]
    Floats = npt.NDArray[np.float64]

__all__ = ["TIMES", "MissRatioCurve", "MissRatioPoint", "PromptWatch"]

TIMES = (0.25, 0.5, 1, 2, 4, 8)
"""Default memory sizes of `PromptWatch.points`, as multiples of the present size."""
_MOST_TIMES = 16
_FEWEST_BLOCKS = 64
_LONG_ENOUGH = 0.5
"""The share of tokens in whole blocks from which on prompts are long enough for estimates."""

_NAMESPACES = 64
_MOST_SAMPLED = 65_536
_BATCH_BLOCKS = 16_384  # a batch ends with whichever comes first
_BATCH_SAMPLED = 2048
_BATCH_PROMPTS = 1024

_EXACT = 512
"""Distances below this are counted one by one, larger ones in bins."""
_STEPS = 128
"""Bins per octave: each less than 0.8 % wide."""

_NEW = -1
"""The place of a block that is not in the stack."""
_WORD = np.dtype("<u8")
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SCRAMBLE = np.uint64(0xD6E8FEB86659FD93)


class MissRatioCurve:
    """Estimates the hit rate of caches of any size from the blocks of all prompts.

    The model is an LRU cache of blocks of ``block_tokens`` tokens that holds prefixes: a block is a
    hit only if all blocks before it are. A share ``sample`` of all blocks is watched, chosen by
    key, and stands for the others (SHARDS: Waldspurger et al., FAST '15). A tenth is enough for
    caches of some thousand blocks; smaller ones need more.

    The curve reaches up to ``most_blocks``. 65,536 blocks are watched at most; the sample is made
    smaller where needed.

    The first 64 namespaces have a curve each, the others one together; all share the modelled
    memory.

    Thread safety: none. Memory: 8 bytes a watched block, ten times that for moments, and 30 KB a
    namespace. Cost: 0.05 µs a block and 0.4 µs more if it is in the sample, in batches of about a
    millisecond.
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
            most_blocks = int(_MOST_SAMPLED / sample)
        self.block_tokens = whole("block_tokens", block_tokens, 1)
        self.most_blocks = whole("most_blocks", most_blocks, 1, 1 << 62)
        self.sample = min(float(sample), _MOST_SAMPLED / self.most_blocks)
        self._largest = np.uint64(min(int(self.sample * 2.0**64), 2**64 - 1))
        # Bounds the sampled blocks of a batch, and so the cost of `_touch`.
        self._batch_blocks = min(_BATCH_BLOCKS, int(_BATCH_SAMPLED / self.sample))
        self._batch: list[tuple[Words, int, int, int, int]] = []
        self._waiting = 0  # blocks in the batch
        # The last distinct blocks of the sample, the least recently used first. A block below that
        # depth is a miss in every memory up to `most_blocks`.
        self._stack = np.empty(0, np.uint64)
        self._depth = math.ceil(self.most_blocks * self.sample)
        # Counts have a row per namespace; the last row is shared. Blocks that were repeated a
        # moment ago are counted apart (index 1): they are few and hot.
        self._places: dict[Namespace, tuple[int, int]] = {}  # with the keys before first blocks
        octaves = max(0, math.ceil(math.log2(self.most_blocks / _EXACT)))
        beyond = np.outer(_EXACT * 2.0 ** np.arange(octaves), 1 + np.arange(_STEPS) / _STEPS)
        self._edges = np.concatenate((np.arange(_EXACT), beyond.ravel(), [_EXACT * 2.0**octaves]))
        self._sampled = np.zeros((2, _NAMESPACES + 1, len(self._edges)))  # by distance
        # Tokens of prompts, those reused, blocks requested, those repeated.
        self._counts = np.zeros((_NAMESPACES + 1, 4), np.int64)

    def requested(self, keys: Sequence[bytes], namespace: NamespaceLike = "") -> None:
        """Count a prompt of these blocks; `kvkeep.core.keys.chain_keys` makes ``keys``."""
        joined = b"".join(keys)
        if len(joined) != len(keys) * KEY_BYTES:
            raise InvalidValue(f"keys have {KEY_BYTES} bytes each; use kvkeep.core.keys.chain_keys")
        words = np.frombuffer(joined, _WORD)[:: KEY_BYTES // _WORD.itemsize]
        self.add(words, as_namespace(namespace), len(keys) * self.block_tokens)

    def add(self, hashes: Words, namespace: Namespace, tokens: int, reused: int = 0) -> None:
        """Count a prompt of ``tokens`` tokens, of which a cache ``reused`` some.

        ``hashes`` has 64 evenly spread bits for each whole block, of this block alone. A prompt of
        0 tokens was not requested, but stored with an answer: its blocks enter the modelled memory,
        and are neither hits nor misses.
        """
        place = self._places.get(namespace)
        if place is None:
            root = int.from_bytes(root_key(namespace)[: _WORD.itemsize], "little")
            place = (len(self._places), root)
            if place[0] < _NAMESPACES:
                self._places[namespace] = place
        self._batch.append((hashes, *place, tokens, reused))
        self._waiting += len(hashes)
        if self._waiting >= self._batch_blocks or len(self._batch) >= _BATCH_PROMPTS:
            self.settle()

    def settle(self) -> None:
        """Count the prompts of the current batch. Reading the curve does so too."""
        if not self._batch:
            return
        hashes, places, roots, tokens, reused = zip(*self._batch, strict=True)
        self._batch, self._waiting = [], 0
        rows = np.array(places)
        blocks = np.array([len(each) for each in hashes])
        keys = _chained(np.concatenate(hashes), blocks, np.array(roots, np.uint64))

        owner = np.repeat(np.arange(len(blocks)), blocks)  # the prompt of each block
        asked = np.array(tokens) > 0
        order, same = _by_key(keys)
        again = order[1:][same]
        repeated = np.zeros(len(keys), np.int64)
        repeated[again] = 1
        repeats = np.bincount(owner[again], minlength=len(blocks))
        amounts = np.array((tokens, reused, blocks * asked, repeats * asked))
        np.add.at(self._counts, rows, amounts.T)

        sample = np.flatnonzero(keys <= self._largest)
        owner = owner[sample]
        distances = self._touch(keys[sample], np.bincount(owner, minlength=len(blocks)))
        bins = np.searchsorted(self._edges, distances / self.sample, side="right") - 1
        cells = (repeated[sample], rows[owner], bins)
        np.add.at(self._sampled, cells, asked[owner].astype(np.float64))

    def _touch(self, keys: Words, counts: Ints) -> Floats:
        """Touch prompts one after the other; return how deep each block lay before its prompt.

        ``keys`` are those of all prompts, the first block of each prompt first; ``counts`` is how
        many each has. A prompt is touched from its last block to its first, so a block always lies
        above what follows it, and distances only grow along a prompt: an LRU memory of ``c`` blocks
        holds exactly the leading blocks with a distance below ``c``.
        """
        below = len(self._stack)
        ends = np.cumsum(counts)
        starts = ends - counts
        mirror = np.repeat(starts + ends - 1, counts) - np.arange(len(keys))
        line = np.concatenate((self._stack, keys[mirror]))
        order, same = _by_key(line)
        before = np.full(len(line), _NEW)  # where each block lay when it was touched
        before[order[1:][same]] = order[:-1][same]
        stays = np.ones(len(line), bool)
        stays[order[:-1][same]] = False
        self._stack = line[stays][-self._depth :]

        before, begun = before[below:], below + np.repeat(starts, counts)
        # All places in between, except those whose blocks were touched again in this batch.
        distances = begun - before - 1 - _moved(before, begun)
        return np.where(before == _NEW, np.inf, distances)[mirror]

    def curve(
        self, capacities: Sequence[float], namespace: NamespaceLike | None = None
    ) -> list[float]:
        """Return the hit rates, 0 … 1, of memories of ``capacities`` blocks.

        For one namespace's prompts, or for all. 0 if nothing was requested. Cost: about 0.2 ms,
        whatever their number.
        """
        wanted = np.asarray(capacities, np.float64)
        if wanted.ndim != 1 or not ((wanted >= 0) & (wanted <= self.most_blocks)).all():
            raise InvalidValue(
                f"capacities are blocks in 0 … {self.most_blocks} (most_blocks), got {capacities!r}"
            )
        self.settle()
        which = self._rows_of(namespace)
        _, _, requested, repeated = self._counts[which].sum(axis=0)
        if not requested:
            return [0.0] * len(wanted)
        sampled = self._sampled[:, which].sum(axis=1)
        hits, repeats = (np.interp(wanted, self._edges, np.cumsum(each) - each) for each in sampled)
        # Of blocks that were not repeated, the sample gives the share of hits. It is chance whether
        # repeated ones are sampled, so only their misses come from the sample; all others are hits
        # (SHARDS' adjustment of counts).
        first, again = sampled.sum(axis=1)
        missed = np.minimum((again - repeats) / self.sample, repeated)
        total = (requested - repeated) * hits / max(first, 1) + repeated - missed
        rates = np.clip(total / requested, 0, 1)
        return [float(rate) for rate in np.where(wanted >= 1, rates, 0)]

    def totals(self, namespace: NamespaceLike | None = None) -> tuple[int, int, int]:
        """Return the tokens of prompts, those of them in whole blocks, and those reused."""
        self.settle()
        tokens, reused, blocks, _ = self._counts[self._rows_of(namespace)].sum(axis=0).tolist()
        return tokens, blocks * self.block_tokens, reused

    def _rows_of(self, namespace: NamespaceLike | None) -> slice:
        if namespace is None:
            return slice(None)
        row, _ = self._places.get(as_namespace(namespace), (None, 0))
        return slice(0) if row is None else slice(row, row + 1)

    @property
    def blocks(self) -> int:
        """Blocks requested so far."""
        self.settle()
        return int(self._counts[:, 2].sum())

    def check(self) -> None:
        """Assert the invariants of the stack."""
        self.settle()
        assert len(np.unique(self._stack)) == len(self._stack) <= self._depth


def _chained(hashes: Words, blocks: Ints, roots: Words) -> Words:
    """Return the keys of all blocks; of each prompt, the number of ``blocks`` and its root's.

    The key of a prefix is the sum of its blocks' hashes, each scrambled together with its position.
    Such keys cost a fraction of SHA-256: they only have to tell prompts apart in statistics.
    """
    starts = np.cumsum(blocks) - blocks
    words = np.arange(len(hashes), dtype=np.uint64)
    words -= np.repeat(starts.astype(np.uint64), blocks)
    words *= _GOLDEN
    words += hashes
    words ^= words >> np.uint64(32)
    words *= _SCRAMBLE
    sums = np.zeros(len(words) + 1, np.uint64)
    np.cumsum(words, out=sums[1:])
    sums[1:] += np.repeat(roots - sums[starts], blocks)
    return sums[1:]


def _by_key(keys: Words) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return the order of the keys, by key and then by position, and which equal the next one."""
    # Positions in the lowest bits make one sort of integers do, a tenth of the time of argsort. The
    # other bits nearly always tell keys apart; if not, argsort.
    low = np.uint64((1 << len(keys).bit_length()) - 1)
    mixed = (keys & ~low) | np.arange(len(keys), dtype=np.uint64)
    mixed.sort()
    order = (mixed & low).view(np.int64)
    ordered = keys[order]
    if (ordered[1:] < ordered[:-1]).any():
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
    return order, ordered[1:] == ordered[:-1]


def _moved(before: Ints, begun: Ints) -> Ints:
    """Return for each touch how many earlier ones moved a block from above its own.

    Touches of one prompt whose blocks lay together form a stretch: no other stretch lies between
    its blocks, so it is counted as a whole. Cost: 0.5 µs a stretch.
    """
    moved = np.zeros(len(before), np.int64)
    warm = np.flatnonzero(before != _NEW)
    cuts = (np.diff(before[warm], prepend=_NEW - 1) != 1) | (np.diff(begun[warm], prepend=0) != 0)
    heads = np.flatnonzero(cuts)
    sizes = np.diff(heads, append=len(warm))
    places: list[int] = []  # from which earlier stretches were moved, in order
    above = []
    for first, size in zip(before[warm[heads]].tolist(), sizes.tolist(), strict=True):
        at = bisect(places, first)
        above.append(len(places) - at)
        places[at:at] = range(first, first + size)
    moved[warm] = np.repeat(above, sizes)
    return moved


@dataclass(frozen=True, slots=True)
class MissRatioPoint:
    """The estimate for a cache of ``times`` the present size: ``pages`` pages, ``tokens`` tokens.

    ``hit_rate`` is the share of prompt tokens that it would have reused. At the present size that
    is the measured rate. Other sizes move it as they move the hits and misses of an LRU cache.

    In a cache with groups of layers it is ``kv_only``: the share of tokens whose KV would have been
    there in an LRU cache, if every page held KV and a request could resume at every page. Windows
    and states take pages, and allow fewer positions, so this is what more memory could bring at
    most. A cache that reuses nothing (``reuse=False``) has the plain estimate of LRU, too.
    """

    times: float
    pages: int
    tokens: int
    hit_rate: float
    kv_only: bool = False


class PromptWatch:
    """Reports the prompts of a paged cache to a `MissRatioCurve`: ``what_if``, or a new one.

    A new curve samples the share ``what_if`` of pages and reaches to 16 times the memory.
    ``measured``: the cache reuses what it finds, and points start from what it reused.

    Thread safety: none; called under the cache's lock. Memory: the hashes of a batch of the curve.
    Cost: a few µs a prompt and 0.3 ns a byte of its tokens, and the cost of the curve.
    """

    def __init__(
        self,
        what_if: float | MissRatioCurve,
        page_size: int,
        num_pages: int,
        *,
        kv_only: bool = False,
        measured: bool = True,
    ) -> None:
        if not isinstance(what_if, MissRatioCurve):
            most = max(_FEWEST_BLOCKS, num_pages * _MOST_TIMES)
            what_if = MissRatioCurve(what_if, page_size, most_blocks=most)
        if what_if.block_tokens % page_size:
            raise InvalidValue(
                f"a curve's blocks are whole pages of {page_size} tokens here, "
                f"got block_tokens={what_if.block_tokens}"
            )
        self.curve = what_if
        self.kv_only = kv_only
        self._measured = measured and not kv_only
        self._num_pages = num_pages
        self._page_size = page_size
        self._block_pages = what_if.block_tokens // page_size
        # A block's hash is the dot product of its tokens with random weights, two tokens at once.
        size = what_if.block_tokens * TOKEN_BYTES
        self._dtype = np.dtype("<u4") if size % _WORD.itemsize else _WORD
        weights = hashlib.shake_256(b"kvkeep what-if 1").digest(size // self._dtype.itemsize * 8)
        self._weights = np.frombuffer(weights, _WORD) | np.uint64(1)

    def opened(self, tokens: TokenArray, space: Namespace, reused: int) -> int:
        """Report a prompt of these ``tokens`` and one more, of which ``reused`` were reused.

        The last token is left out, as it is computed even if it is cached. Return up to how many
        stored pages the sequence completes no further block.
        """
        hashes = self._hashes(tokens)
        self.curve.add(hashes, space, len(tokens) + 1, reused)
        return (len(hashes) + 1) * self._block_pages - 1

    def stored(self, tokens: TokenArray, space: Namespace) -> None:
        """Report the tokens that a closed sequence leaves, of which its prompt is the beginning."""
        self.curve.add(self._hashes(tokens), space, tokens=0)

    def _hashes(self, tokens: TokenArray) -> Words:
        """Return a hash of each full block of ``tokens``."""
        size = self.curve.block_tokens
        blocks = tokens[: len(tokens) // size * size].view(self._dtype)
        hashes: Words = blocks.reshape(-1, len(self._weights)) @ self._weights
        return hashes

    def points(
        self, pages: Sequence[int] | None = None, namespace: NamespaceLike | None = None
    ) -> tuple[MissRatioPoint, ...]:
        """Return estimates for memories of ``pages`` pages; by default `TIMES` the present size.

        For the prompts of one namespace or of all, in memory that all share. Sizes of which the
        prompts tell nothing are left out: all but the present one if most tokens are in prompts
        shorter than a block, and smaller ones if LRU would have reused nothing at the present one.
        """
        here = self._num_pages
        most = self.curve.most_blocks * self._block_pages
        if pages is None:
            sizes = [(times, max(1, int(times * here))) for times in TIMES if times * here <= most]
        else:
            sizes = [(whole("pages", size, 1, most) / here, size) for size in pages]
        tokens, in_blocks, reused = self.curve.totals(namespace)
        share = in_blocks / tokens if tokens else 0.0
        capacities = [
            size / self._block_pages for size in (min(here, most), *(size for _, size in sizes))
        ]
        now, *rates = (share * rate for rate in self.curve.curve(capacities, namespace))
        points = []
        for (times, size), estimate in zip(sizes, rates, strict=True):
            rate: float | None = estimate
            if self._measured and tokens:
                measured = reused / tokens
                rate = measured if size == here else None
                if size != here and share >= _LONG_ENOUGH:
                    rate = _scaled(estimate, now, measured)
            if rate is not None:
                point = MissRatioPoint(times, size, size * self._page_size, rate, self.kv_only)
                points.append(point)
        return tuple(points)

    def check(self) -> None:
        """Assert the invariants of the curve."""
        self.curve.check()


def _scaled(rate: float, now: float, measured: float) -> float | None:
    """Return the hit rate at a size where LRU's is ``rate``: ``measured`` where that is ``now``.

    Below that, hits shrink as LRU's do; above, misses do. None where LRU has no hits to compare.
    """
    if rate > now:
        return min(1.0, measured + (1 - measured) * ((rate - now) / (1 - now)))
    if now:
        return measured * (rate / now)
    return None if measured else 0.0
