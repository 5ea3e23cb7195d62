"""`PromptWatch`: makes keys of prompts' tokens for a curve, at a fraction of what hashing costs.

Keys of `kvkeep.core.keys` hold against somebody who looks for a second prompt with the same one;
these only have to tell prompts apart in a statistic. A block is a dot product of its tokens with
random weights, and a prefix the sum of its blocks, each scrambled together with its place.
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
"""The memories that are told of, against what there is."""
_MOST_TIMES = 16
_FEWEST_BLOCKS = 4096
"""A cache is told apart into so many blocks at least, where its pages are small enough."""

_AT_ONCE_BYTES = 1024
_BATCH_PROMPTS = 512
_WORTH_BYTES = 32_768
"""Fewer cached bytes are hashed again sooner than they are found."""
_MOST_KEPT = 1 << 20
"""Blocks of all paths together: 8 MiB."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SCRAMBLE = np.uint64(0xD6E8FEB86659FD93)


class _Path:
    """The keys of the first ``blocks`` blocks of some prompts, once they are computed."""

    __slots__ = ("blocks", "words")

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.words: Words | None = None


_Prompt = tuple["_Path | None", "bytes | Words", int, int, "Namespace", bool, "_Path | None"]
"""One that waits: how it begins, if that is known; the tokens of its other blocks, or what they
hash to; how many blocks and tokens it has, and its namespace; whether it was asked for; the path to
be made of it. Plain, for speed."""


@dataclass(frozen=True, slots=True)
class MissRatioPoint:
    """What a cache of ``times`` the size would do: ``pages`` pages, which hold ``tokens`` tokens.

    ``hit_rate`` is the share of prompt tokens that would have been reused, counted in whole blocks
    and so a little below what is measured, if what was used least recently went first.
    """

    times: float
    pages: int
    tokens: int
    hit_rate: float


class PromptWatch:
    """Tells a `MissRatioCurve` of the prompts of a paged cache.

    What is cached of a prompt was seen before: the keys of its blocks are remembered at the page
    where they end, for as long as the index stores that page, so that only new tokens are hashed
    (each twice: when it is computed, and when it is found the first time).

    Thread safety: none; called under the cache's lock. Memory: the tokens of some prompts (1 MiB),
    8 MiB of keys at most, 9 bytes a page. Cost: 1 µs a prompt and 0.3 ns a byte of new tokens, in
    pieces of below a millisecond, and what the curve costs.
    """

    def __init__(self, curve: MissRatioCurve, page_size: int, num_pages: int) -> None:
        if curve.block_tokens % page_size:
            raise InvalidValue(
                f"a curve's blocks are whole pages of {page_size} tokens here, "
                f"got block_tokens={curve.block_tokens}"
            )
        self.curve = curve
        self._block_pages = curve.block_tokens // page_size
        self._block_bytes = curve.block_tokens * TOKEN_BYTES
        self._dtype = np.dtype("<u4" if self._block_bytes % 8 else "<u8")
        width = self._block_bytes // self._dtype.itemsize
        weights = hashlib.shake_256(b"kvkeep what-if 1").digest(8 * width)
        self._weights = np.frombuffer(weights, "<u8") | np.uint64(1)
        self._waiting: list[_Prompt] = []
        self._worth = max(self._block_pages, _WORTH_BYTES // (page_size * TOKEN_BYTES))
        """So many cached pages."""
        self._paths: list[_Path | None] = [None] * num_pages
        self._kept = 0  # blocks in all of them
        self._gone: list[Pages] = []
        self._stored = bytearray(num_pages)  # 1 where the path at a page is still true
        self._flags = np.frombuffer(self._stored, np.uint8)
        # By the curve's rows: what prompts had in tokens, and in blocks.
        self._tokens = np.zeros(NAMESPACES + 1, np.int64)
        self._blocks = np.zeros(NAMESPACES + 1, np.int64)

    @classmethod
    def of(
        cls, what_if: float | MissRatioCurve, page_size: int, num_pages: int, block_tokens: int
    ) -> PromptWatch:
        """A watch of a cache: with a curve, or for one of its own with this share as its sample.

        Its own has blocks of ``block_tokens``, or fewer where memory has few of those, and reaches
        to 16 times the memory. What was asked for when there were 64 memories fewer weighs half.
        """
        if isinstance(what_if, MissRatioCurve):
            return cls(what_if, page_size, num_pages)
        pages = max(1, min(block_tokens // page_size, num_pages // _FEWEST_BLOCKS))
        most = max(64, -(-num_pages * _MOST_TIMES // pages))
        curve = MissRatioCurve(what_if, pages * page_size, most_blocks=most, half_life=4 * most)
        return cls(curve, page_size, num_pages)

    # --- what happens ------------------------------------------------------------------------

    def opened(self, tokens: bytes, pages: Pages, space: Namespace) -> int:
        """A prompt came, of these tokens (int32) and one more, and ``pages`` of it are cached.

        The last token is left out: it is computed even if it is cached. Returns how many pages may
        be stored of the sequence without another full block among them.
        """
        size = len(tokens)
        blocks = size // self._block_bytes
        if size >= _AT_ONCE_BYTES:
            self._add(tokens, blocks, pages, space, True)
        else:  # the same, where there is nothing to think about
            part = tokens[: blocks * self._block_bytes]
            length = size // TOKEN_BYTES + 1
            self._waiting.append((None, part, blocks, length, space, True, None))
            if len(self._waiting) >= _BATCH_PROMPTS:
                self.flush()
        return (blocks + 1) * self._block_pages - 1

    def stored(self, tokens: bytes, pages: Pages, space: Namespace) -> None:
        """A sequence ended that leaves these tokens in these pages, more than were asked for."""
        self._add(tokens, len(tokens) // self._block_bytes, pages, space, False)

    def forget(self, pages: Pages) -> None:
        """The index does not store these pages any more."""
        if self._kept:
            self._gone.append(pages)
            if len(self._gone) >= _BATCH_PROMPTS:
                self._catch_up()

    def _catch_up(self) -> None:
        """Nothing is known any more of the pages that have gone."""
        if self._gone:
            self._flags[np.concatenate(self._gone)] = 0
            self._gone.clear()

    def _add(self, tokens: bytes, blocks: int, pages: Pages, space: Namespace, asked: bool) -> None:
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
            # While the processor has them: to keep them would cost more than to hash them.
            part = self._hash(tokens, new, start * size)
        else:
            part = tokens[start * size : blocks * size] if new else b""
        length = len(tokens) // TOKEN_BYTES + 1
        self._waiting.append((known, part, blocks, length, space, asked, path))
        if len(self._waiting) >= _BATCH_PROMPTS:
            self.flush()

    def _known(self, pages: Pages, cached: int) -> _Path | None:
        """What is remembered of the first ``cached`` blocks, or of as many as possible."""
        self._catch_up()
        step = self._block_pages
        last = int(pages[cached * step - 1])
        if not self._stored[last]:  # the likely one first; then backwards
            ends = pages[step - 1 : cached * step : step]
            found = np.flatnonzero(self._flags[ends])
            if not len(found):
                return None
            last = int(ends[found[-1]])
        path = self._paths[last]
        assert path is not None, "a page without a path is marked"
        return path

    def _wanted(self, page: int, blocks: int) -> _Path:
        """The path that the keys up to ``page`` are going to be."""
        if self._kept > _MOST_KEPT:
            self._paths = [None] * len(self._paths)
            self._flags[:] = 0
            self._kept = 0
        path = self._paths[page] = _Path(blocks)
        self._stored[page] = 1
        self._kept += blocks
        return path

    # --- what would be -----------------------------------------------------------------------

    def points(
        self, pages: SequenceOf[int] | None = None, namespace: NamespaceLike | None = None
    ) -> tuple[MissRatioPoint, ...]:
        """What memories of so many ``pages`` would do; by default `TIMES` as many as there are.

        For the prompts of one namespace, or for all, in memory that all share.
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
        rates = self.curve.curve([size / self._block_pages for size in sizes], namespace)
        share = self._in_blocks(namespace)
        page_tokens = self.curve.block_tokens // self._block_pages
        return tuple(
            MissRatioPoint(factor, size, size * page_tokens, share * rate)
            for factor, size, rate in zip(factors, sizes, rates, strict=True)
        )

    def _in_blocks(self, namespace: NamespaceLike | None) -> float:
        """The share of prompt tokens that whole blocks are made of."""
        rows = slice(None)
        if namespace is not None:
            if (space := as_namespace(namespace)) not in self.curve.namespaces:
                return 0.0
            row = self.curve.row(space)
            rows = slice(row, row + 1)
        tokens = int(self._tokens[rows].sum())
        whole_blocks = int(self._blocks[rows].sum())
        return whole_blocks * self.curve.block_tokens / tokens if tokens else 0.0

    # --- keys --------------------------------------------------------------------------------

    def flush(self) -> None:
        """Hand what waits to the curve."""
        if not self._waiting:
            return
        known, parts, lengths, tokens, spaces, asked, paths = zip(*self._waiting, strict=True)
        self._waiting = []
        rows, roots = self._places(spaces)
        blocks = np.array(lengths, np.int64)
        first = np.zeros(len(blocks), np.int64)
        warm = [number for number, path in enumerate(known) if path is not None]
        if warm:
            first[warm] = [path.blocks for path in known if path is not None]
            roots[warm] = 0  # what they follow comes in the next step
        new = blocks - first
        words = self._chain(self._hashes(parts), first, new, roots)
        if warm or any(paths):
            words = _joined(known, words, new.tolist(), paths)
        mine = np.array(asked)
        np.add.at(self._tokens, rows, np.array(tokens, np.int64) * mine)
        np.add.at(self._blocks, rows, blocks * mine)
        self.curve.prompts(words, list(lengths), rows, list(asked))

    def _hash(self, tokens: bytes, length: int, start: int = 0) -> Words:
        """A number for each block in ``length`` bytes of tokens."""
        values = np.frombuffer(tokens, self._dtype, length // self._dtype.itemsize, start)
        width = len(self._weights)
        found: Words = (
            values * self._weights[0] if width == 1 else values.reshape(-1, width) @ self._weights
        )
        return found

    def _hashes(self, parts: tuple[bytes | Words, ...]) -> Words:
        """The same of all parts, one after the other, of which some are hashed already."""
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
        """The keys of prompts' blocks from ``first`` on, from what the blocks hash to."""
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
        """The row of each prompt in the curve, and the keys before their first blocks."""
        # By identity first: most are the same, and hashing one costs more than all the rest.
        found = {id(space): space for space in spaces}
        rows = {name: self.curve.row(space) for name, space in found.items()}
        roots = {
            name: int.from_bytes(root_key(space)[:8], "little") for name, space in found.items()
        }
        names = list(map(id, spaces))
        return [rows[name] for name in names], np.array([roots[name] for name in names], np.uint64)

    def check(self, stored: Pages) -> None:
        """Assert that what is remembered of pages is about pages that are stored."""
        self._catch_up()
        marked = np.flatnonzero(self._flags)
        assert np.isin(marked, stored).all(), "keys are remembered of a page that has gone"
        assert all(self._paths[page] is not None for page in marked.tolist())
        self.flush()
        self.curve.check()


def _joined(
    known: tuple[_Path | None, ...], words: Words, new: list[int], paths: tuple[_Path | None, ...]
) -> Words:
    """The keys of all blocks, from those of new ones, which do not yet follow what was known."""
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
