"""`PromptWatch`: feeds a `MissRatioCurve` with keys that cost a fraction of SHA-256.

The keys of `kvkeep.core.keys` withstand deliberate collisions; these only have to tell prompts
apart in statistics. A block is hashed to the dot product of its tokens with random weights; the key
of a prefix is the sum of its blocks' hashes, each scrambled together with its position.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.keys import as_namespace, root_key
from kvkeep.core.miss_ratio.curve import NAMESPACES, MissRatioCurve
from kvkeep.core.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    import numpy.typing as npt

    from kvkeep.core.keys import Namespace, NamespaceLike

    Ints = npt.NDArray[np.int64]
    Words = npt.NDArray[np.uint64]
    Pages = npt.NDArray[np.int32]

__all__ = ["TIMES", "MissRatioPoint", "PromptWatch"]

TIMES = (0.25, 0.5, 1, 2, 4, 8)
"""Default memory sizes of `PromptWatch.points`, as multiples of the present size."""
_MOST_TIMES = 16
_FEWEST_BLOCKS = 64

_TOLD = 0.5
"""The share of tokens in whole blocks from which on prompts are long enough for estimates."""

_AT_ONCE_BYTES = 1024
_BATCH_PROMPTS = 512
_WORTH_BYTES = 32_768
"""Below this many cached bytes, hashing again is faster than looking up the keys."""
_MOST_KEPT = 1 << 20
"""Bound on the blocks of all paths together: 8 MiB."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SCRAMBLE = np.uint64(0xD6E8FEB86659FD93)


class _Path:
    """The keys of the first ``blocks`` blocks of a prompt; ``words`` is None until computed."""

    __slots__ = ("blocks", "words")

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.words: Words | None = None


_Prompt = tuple["_Path | None", "bytes | Words", int, int, int, "Namespace", bool, "_Path | None"]
"""A prompt of the current batch, as a plain tuple for speed: the path with its first keys, if
known; the tokens of its other blocks, or their hashes; its number of blocks, of tokens, and of
reused tokens; its namespace; whether it was requested; the path to be filled from it.
"""


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

    The keys of cached blocks are remembered at the page where they end, for as long as the index
    stores that page. So only new tokens are hashed, and each twice: when it is computed, and when
    it is first reused.

    Thread safety: none; called under the cache's lock. Memory: the tokens of some prompts (1 MiB),
    keys (8 MiB at most), 9 bytes a page. Cost: 1 µs a prompt and 0.3 ns a byte of new tokens, in
    batches below a millisecond, and the cost of the curve.
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
        self._block_pages = curve.block_tokens // page_size
        self._block_bytes = curve.block_tokens * TOKEN_BYTES
        self._dtype = np.dtype("<u4" if self._block_bytes % 8 else "<u8")
        width = self._block_bytes // self._dtype.itemsize
        weights = hashlib.shake_256(b"kvkeep what-if 1").digest(8 * width)
        self._weights = np.frombuffer(weights, "<u8") | np.uint64(1)
        self._waiting: list[_Prompt] = []
        self._worth = max(self._block_pages, _WORTH_BYTES // (page_size * TOKEN_BYTES))
        """Cached pages from which on keys are looked up, not computed again."""
        self._paths: list[_Path | None] = [None] * num_pages
        self._kept = 0  # blocks in all of them
        self._gone: list[Pages] = []
        self._stored = bytearray(num_pages)  # 1 where the path at a page is valid
        self._flags = np.frombuffer(self._stored, np.uint8)
        # Tokens of all prompts, those in whole blocks and those reused, per row of the curve. They
        # weigh as the curve's counts do.
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

        A new curve counts pages, reaches to 16 times the memory, and forgets nothing. ``measured``:
        the cache reuses what it finds, and points start from what it reused.
        """
        if not isinstance(what_if, MissRatioCurve):
            most = max(_FEWEST_BLOCKS, num_pages * _MOST_TIMES)
            what_if = MissRatioCurve(what_if, page_size, most_blocks=most)
        return cls(what_if, page_size, num_pages, kv_only=kv_only, measured=measured)

    # --- events of the cache -----------------------------------------------------------------

    def opened(self, tokens: bytes, pages: Pages, space: Namespace, reused: int) -> int:
        """Report a prompt of these tokens (int32 bytes) and one more, with its cached ``pages``.

        ``reused`` are its reused tokens. The last token is left out, as it is computed even if it
        is cached. Return up to how many stored pages the sequence completes no further block.
        """
        size = len(tokens)
        blocks = size // self._block_bytes
        if size >= _AT_ONCE_BYTES:
            self._add(tokens, blocks, pages, space, reused)
        else:  # the same for a short prompt, without the look-up
            part = tokens[: blocks * self._block_bytes]
            length = size // TOKEN_BYTES + 1
            self._waiting.append((None, part, blocks, length, reused, space, True, None))
            if len(self._waiting) >= _BATCH_PROMPTS:
                self.flush()
        return (blocks + 1) * self._block_pages - 1

    def stored(self, tokens: bytes, pages: Pages, space: Namespace) -> None:
        """Report the tokens and pages that a closed sequence leaves beyond its prompt."""
        self._add(tokens, len(tokens) // self._block_bytes, pages, space, None)

    def forget(self, pages: Pages) -> None:
        """Report that the index no longer stores these pages."""
        if self._kept:
            self._gone.append(pages)
            if len(self._gone) >= _BATCH_PROMPTS:
                self._catch_up()

    def _catch_up(self) -> None:
        """Forget the keys at pages that were evicted."""
        if self._gone:
            self._flags[np.concatenate(self._gone)] = 0
            self._gone.clear()

    def _add(
        self, tokens: bytes, blocks: int, pages: Pages, space: Namespace, reused: int | None
    ) -> None:
        """Add tokens to the batch; ``reused`` is None for those that were not requested."""
        known, path, start = None, None, 0
        if len(pages) >= self._worth and blocks:
            cached = min(len(pages) // self._block_pages, blocks)
            known = self._known(pages, cached)
            if known is not None:
                start = known.blocks
            if start < cached:
                path = self._wanted(int(pages[cached * self._block_pages - 1]), cached)
        size = self._block_bytes
        new = (blocks - start) * size
        part: bytes | Words
        if new >= _AT_ONCE_BYTES:
            # Hashed at once, while they are in the CPU cache: keeping them would cost more.
            part = self._hash(tokens, new, start * size)
        else:
            part = tokens[start * size : blocks * size] if new else b""
        length = len(tokens) // TOKEN_BYTES + 1
        asked = reused is not None
        self._waiting.append((known, part, blocks, length, reused or 0, space, asked, path))
        if len(self._waiting) >= _BATCH_PROMPTS:
            self.flush()

    def _known(self, pages: Pages, cached: int) -> _Path | None:
        """Return the remembered path of the first ``cached`` blocks, or of as many as possible."""
        self._catch_up()
        step = self._block_pages
        last = int(pages[cached * step - 1])
        if not self._stored[last]:  # usually it is this one; else search backwards
            ends = pages[step - 1 : cached * step : step]
            found = np.flatnonzero(self._flags[ends])
            if not len(found):
                return None
            last = int(ends[found[-1]])
        path = self._paths[last]
        assert path is not None, "a page without a path is marked"
        return path

    def _wanted(self, page: int, blocks: int) -> _Path:
        """Return a new path, to be filled with the keys up to ``page``."""
        if self._kept > _MOST_KEPT:
            self._paths = [None] * len(self._paths)
            self._flags[:] = 0
            self._kept = 0
        path = self._paths[page] = _Path(blocks)
        self._stored[page] = 1
        self._kept += blocks
        return path

    # --- the curve ---------------------------------------------------------------------------

    def points(
        self, pages: SequenceOf[int] | None = None, namespace: NamespaceLike | None = None
    ) -> tuple[MissRatioPoint, ...]:
        """Return estimates for memories of ``pages`` pages; by default `TIMES` the present size.

        For the prompts of one namespace or of all, in memory that all share. Sizes of which the
        prompts tell nothing are left out: all but the present one if most tokens are in prompts
        shorter than a block, and smaller ones if LRU would have reused nothing at the present one.
        """
        there = len(self._paths)
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
        known, parts, lengths, tokens, reused, spaces, requested, paths = zip(
            *self._waiting, strict=True
        )
        self._waiting = []
        rows, roots = self._places(spaces)
        blocks = np.array(lengths, np.int64)
        first = np.zeros(len(blocks), np.int64)
        warm = [number for number, path in enumerate(known) if path is not None]
        if warm:
            first[warm] = [path.blocks for path in known if path is not None]
            roots[warm] = 0  # `_joined` adds the key that they follow
        new = blocks - first
        words = self._chain(self._hashes(parts), first, new, roots)
        if warm or any(paths):
            words = _joined(known, words, new.tolist(), paths)
        asked = blocks * np.array(requested)
        if self.curve.half_life is not None:
            self._tokens *= 2.0 ** -min(int(asked.sum()) / self.curve.half_life, 1000.0)
        for counts, more in zip(
            self._tokens,
            (np.array(tokens) * np.array(requested), asked * self.curve.block_tokens, reused),
            strict=True,
        ):
            np.add.at(counts, rows, more)
        self.curve.prompts(words, list(lengths), rows, list(requested))

    def _hash(self, tokens: bytes, length: int, start: int = 0) -> Words:
        """Return a hash for each block in ``length`` bytes of tokens."""
        values = np.frombuffer(tokens, self._dtype, length // self._dtype.itemsize, start)
        width = len(self._weights)
        found: Words = (
            values * self._weights[0] if width == 1 else values.reshape(-1, width) @ self._weights
        )
        return found

    def _hashes(self, parts: tuple[bytes | Words, ...]) -> Words:
        """Return the hashes of all parts, some of which are hashed already."""
        joined = b"".join([part for part in parts if type(part) is bytes])
        words = self._hash(joined, len(joined))
        done = [number for number, part in enumerate(parts) if type(part) is not bytes]
        if not done:
            return words
        pieces: list[Words] = []
        start = 0
        for part in parts:
            if isinstance(part, bytes):
                if part:
                    pieces.append(words[start : (start := start + len(part) // self._block_bytes)])
            else:
                pieces.append(part)
        return np.concatenate(pieces)

    def _chain(self, words: Words, first: Ints, new: Ints, parents: Words) -> Words:
        """Return the keys of blocks from ``first`` on, given the blocks' hashes."""
        stops = np.cumsum(new)
        starts = stops - new
        place = np.arange(len(words)) + np.repeat(first - starts, new)
        words += place.astype(np.uint64) * _GOLDEN
        words ^= words >> np.uint64(32)
        words *= _SCRAMBLE
        words ^= words >> np.uint64(29)
        sums = np.empty(len(words) + 1, np.uint64)
        sums[0] = 0
        np.cumsum(words, out=sums[1:])
        sums[1:] += np.repeat(parents - sums[starts], new)
        return sums[1:]

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

    def check(self, stored: Pages) -> None:
        """Assert that keys are remembered only at stored pages."""
        self._catch_up()
        marked = np.flatnonzero(self._flags)
        assert np.isin(marked, stored).all(), "keys are remembered at a page that was evicted"
        assert all(self._paths[page] is not None for page in marked.tolist())
        self.flush()
        self.curve.check()


def _joined(
    known: tuple[_Path | None, ...], words: Words, new: list[int], paths: tuple[_Path | None, ...]
) -> Words:
    """Return the keys of all blocks: known ones, and new ones advanced by the known ones before."""
    pieces: list[Words] = []
    start = 0
    for before, count, path in zip(known, new, paths, strict=True):
        mine = words[start : start + count]
        start += count
        if before is not None:
            assert before.words is not None, "paths are made in the order in which they are used"
            pieces.append(before.words)
            if count:
                mine += before.words[-1]
        pieces.append(mine)
        if path is not None:
            path.words = mine if before is None else np.concatenate((before.words, mine))  # type: ignore[arg-type]
            path.words = path.words[: path.blocks].copy()
    return np.concatenate(pieces)


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
