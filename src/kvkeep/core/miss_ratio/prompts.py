"""`PromptWatch`: feeds a `MissRatioCurve` with keys that cost a fraction of SHA-256.

The keys of `kvkeep.core.keys` withstand deliberate collisions; these only have to tell prompts
apart in statistics. A block is hashed to the dot product of its tokens with random weights; the key
of a prefix is the sum of its blocks' hashes, each scrambled together with its position.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.keys import as_namespace, root_key
from kvkeep.core.miss_ratio.curve import NAMESPACES, MissRatioCurve
from kvkeep.core.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    import numpy.typing as npt

    from kvkeep.core.keys import Namespace, NamespaceLike
    from kvkeep.core.tokens import TokenArray

    Ints = npt.NDArray[np.int64]
    Words = npt.NDArray[np.uint64]

__all__ = ["TIMES", "MissRatioPoint", "PromptWatch"]

TIMES = (0.25, 0.5, 1, 2, 4, 8)
"""Default memory sizes of `PromptWatch.points`, as multiples of the present size."""
_MOST_TIMES = 16
_FEWEST_BLOCKS = 64

_TOLD = 0.5
"""The share of tokens in whole blocks from which on prompts are long enough for estimates."""

_BATCH_PROMPTS = 512
_BATCH_BLOCKS = 65_536
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SCRAMBLE = np.uint64(0xD6E8FEB86659FD93)


class _Prompt(NamedTuple):
    """A prompt of the current batch."""

    hashes: Words
    """Of each of its blocks alone."""
    tokens: int
    reused: int
    space: Namespace
    requested: bool


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
    """Reports the prompts of a paged cache to a `MissRatioCurve`.

    Thread safety: none; called under the cache's lock. Memory: the hashes of some prompts (512 KiB
    and one prompt's). Cost: a few µs a prompt and 0.3 ns a byte of its tokens, and the cost of the
    curve, in batches of about a millisecond.
    """

    def __init__(
        self,
        curve: MissRatioCurve,
        page_size: int,
        num_pages: int,
        *,
        kv_only: bool = False,
        measured: bool = True,
    ) -> None:
        if curve.block_tokens % page_size:
            raise InvalidValue(
                f"a curve's blocks are whole pages of {page_size} tokens here, "
                f"got block_tokens={curve.block_tokens}"
            )
        self.curve = curve
        self.kv_only = kv_only
        self._measured = measured and not kv_only
        self._num_pages = num_pages
        self._block_pages = curve.block_tokens // page_size
        self._block_bytes = curve.block_tokens * TOKEN_BYTES
        self._dtype = np.dtype("<u4" if self._block_bytes % 8 else "<u8")
        width = self._block_bytes // self._dtype.itemsize
        weights = hashlib.shake_256(b"kvkeep what-if 1").digest(8 * width)
        self._weights = np.frombuffer(weights, "<u8") | np.uint64(1)
        self._waiting: list[_Prompt] = []
        self._blocks = 0  # in all of them
        # Tokens of all prompts, those in whole blocks and those reused, per row of the curve.
        self._tokens = np.zeros((3, NAMESPACES + 1))

    @classmethod
    def of(
        cls,
        what_if: float | MissRatioCurve,
        page_size: int,
        num_pages: int,
        *,
        kv_only: bool = False,
        measured: bool = True,
    ) -> PromptWatch:
        """Return a watch: of the given curve, or of a new one with this share as its sample.

        A new curve counts pages and reaches to 16 times the memory. ``measured``: the cache
        reuses what it finds, and points start from what it reused.
        """
        if not isinstance(what_if, MissRatioCurve):
            most = max(_FEWEST_BLOCKS, num_pages * _MOST_TIMES)
            what_if = MissRatioCurve(what_if, page_size, most_blocks=most)
        return cls(what_if, page_size, num_pages, kv_only=kv_only, measured=measured)

    # --- events of the cache -----------------------------------------------------------------

    def opened(self, tokens: TokenArray, space: Namespace, reused: int) -> int:
        """Report a prompt of these ``tokens`` and one more, of which ``reused`` were reused.

        The last token is left out, as it is computed even if it is cached. Return up to how many
        stored pages the sequence completes no further block.
        """
        blocks = self._add(tokens, space, reused, requested=True)
        return (blocks + 1) * self._block_pages - 1

    def stored(self, tokens: TokenArray, space: Namespace) -> None:
        """Report the tokens that a closed sequence leaves, of which its prompt is the beginning."""
        self._add(tokens, space, 0, requested=False)

    def _add(self, tokens: TokenArray, space: Namespace, reused: int, *, requested: bool) -> int:
        """Add tokens to the batch; return their full blocks."""
        hashes = self._hashes(tokens)
        self._waiting.append(_Prompt(hashes, len(tokens) + 1, reused, space, requested))
        self._blocks += len(hashes)
        if len(self._waiting) >= _BATCH_PROMPTS or self._blocks >= _BATCH_BLOCKS:
            self.flush()
        return len(hashes)

    # --- the curve ---------------------------------------------------------------------------

    def points(
        self, pages: SequenceOf[int] | None = None, namespace: NamespaceLike | None = None
    ) -> tuple[MissRatioPoint, ...]:
        """Return estimates for memories of ``pages`` pages; by default `TIMES` the present size.

        For the prompts of one namespace or of all, in memory that all share. Sizes of which the
        prompts tell nothing are left out: all but the present one if most tokens are in prompts
        shorter than a block, and smaller ones if LRU would have reused nothing at the present one.
        """
        there = self._num_pages
        most = self.curve.most_blocks * self._block_pages
        if pages is None:
            factors = [times for times in TIMES if times * there <= most]
            sizes = [max(1, int(times * there)) for times in factors]
        else:
            sizes = [whole("pages", size, 1, most) for size in pages]
            factors = [size / there for size in sizes]
        self.flush()
        capacities = [size / self._block_pages for size in (min(there, most), *sizes)]
        tokens, in_blocks, reused = self._totals(namespace)
        share = in_blocks / tokens if tokens else 0.0
        now, *rates = (share * rate for rate in self.curve.curve(capacities, namespace))
        found: list[float | None] = [*rates]
        if self._measured and tokens:
            measured = reused / tokens
            found = _scaled(rates, now, measured, told=share >= _TOLD)
            found = [
                measured if size == there else rate for size, rate in zip(sizes, found, strict=True)
            ]
        page_tokens = self.curve.block_tokens // self._block_pages
        return tuple(
            MissRatioPoint(factor, size, size * page_tokens, rate, self.kv_only)
            for factor, size, rate in zip(factors, sizes, found, strict=True)
            if rate is not None
        )

    def _totals(self, namespace: NamespaceLike | None) -> tuple[float, float, float]:
        """Return the tokens of prompts, those of them in whole blocks, and those reused."""
        rows = slice(None)
        if namespace is not None:
            if (space := as_namespace(namespace)) not in self.curve.namespaces:
                return 0.0, 0.0, 0.0
            row = self.curve.row(space)
            rows = slice(row, row + 1)
        tokens, in_blocks, reused = self._tokens[:, rows].sum(axis=1).tolist()
        return tokens, in_blocks, reused

    # --- keys --------------------------------------------------------------------------------

    def flush(self) -> None:
        """Pass the current batch to the curve."""
        if not self._waiting:
            return
        hashes, tokens, reused, spaces, requested = zip(*self._waiting, strict=True)
        self._waiting, self._blocks = [], 0
        rows, roots = self._places(spaces)
        lengths = list(map(len, hashes))
        blocks, counts = np.array(lengths, np.int64), np.array(requested)
        asked = blocks * counts
        for totals, more in zip(
            self._tokens,
            (np.array(tokens) * counts, asked * self.curve.block_tokens, reused),
            strict=True,
        ):
            np.add.at(totals, rows, more)
        words = _chained(np.concatenate(hashes), blocks, roots)
        self.curve.prompts(words, lengths, rows, list(requested))

    def _hashes(self, tokens: TokenArray) -> Words:
        """Return a hash of each full block of ``tokens``."""
        count = len(tokens) * TOKEN_BYTES // self._block_bytes
        values = tokens[: count * self.curve.block_tokens].view(self._dtype)
        width = len(self._weights)
        if width == 1:
            found: Words = values * self._weights[0]
        else:
            found = values.reshape(-1, width) @ self._weights
        return found

    def _places(self, spaces: tuple[Namespace, ...]) -> tuple[list[int], Words]:
        """Return the row of each prompt in the curve, and the keys before their first blocks."""
        # By identity first: few are distinct, and hashing a namespace costs more than the rest.
        found = {id(space): space for space in spaces}
        rows = {name: self.curve.row(space) for name, space in found.items()}
        roots = {
            name: int.from_bytes(root_key(space)[:8], "little") for name, space in found.items()
        }
        names = list(map(id, spaces))
        return [rows[name] for name in names], np.array([roots[name] for name in names], np.uint64)

    def check(self) -> None:
        """Assert the invariants of the curve."""
        self.flush()
        self.curve.check()


def _chained(hashes: Words, blocks: Ints, roots: Words) -> Words:
    """Return the keys of all blocks; of each prompt, the number of ``blocks`` and its root's."""
    stops = np.cumsum(blocks)
    starts = stops - blocks
    words = (
        hashes + (np.arange(len(hashes)) - np.repeat(starts, blocks)).astype(np.uint64) * _GOLDEN
    )
    words ^= words >> np.uint64(32)
    words *= _SCRAMBLE
    words ^= words >> np.uint64(29)
    sums = np.zeros(len(words) + 1, np.uint64)
    np.cumsum(words, out=sums[1:])
    sums[1:] += np.repeat(roots - sums[starts], blocks)
    return sums[1:]


def _scaled(rates: list[float], now: float, measured: float, *, told: bool) -> list[float | None]:
    """Return hit rates at sizes where LRU's are ``rates``: ``measured`` where its rate is ``now``.

    Below that, hits shrink as LRU's do; above, misses do. None where LRU has no hits to compare.
    """
    found: list[float | None] = []
    for rate in rates:
        if not told:
            found.append(None)
        elif rate > now:
            found.append(min(1.0, measured + (1 - measured) * ((rate - now) / (1 - now))))
        elif now:
            found.append(measured * (rate / now))
        else:
            found.append(None if measured else 0.0)
    return found
