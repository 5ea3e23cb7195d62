"""Finding tokens anywhere in a tree: within runs, and across the borders between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvkeep.core.tokens import TOKEN_BYTES, TOKEN_DTYPE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from kvkeep.core.prefix.marks import Marks
    from kvkeep.core.prefix.walk import TreeWalk
    from kvkeep.core.tokens import TokenArray

__all__ = ["Finding", "FoundAt"]

_BATCH_TOKENS = 1 << 20


class FoundAt(NamedTuple):
    """Where tokens were found."""

    row: int
    """Of the run in which they end."""
    at: int
    """Tokens before the first of them, from the beginning of the prompt."""


class Finding:
    """The runs that a `TreeWalk` saw, ready to be searched; their symbols are tokens.

    Thread safety: none, but it needs no lock: what it looks at does not change. Cost: a pass over
    all tokens, 1 or 2 ns each for each needle, and 1 µs a run; memory for a million tokens.
    """

    COLUMNS = ("parent", "end", "serial", "run", "depth")

    def __init__(self, walk: TreeWalk, page_size: int, marks: Marks | None = None) -> None:
        self._parents = walk.parents()
        self._page_size = page_size
        self._depths: list[int] = walk.columns["depth"]
        # What lost its tail is kept as a view of what it was.
        self._runs: list[bytes] = [
            run if type(run) is bytes else bytes(run) for run in walk.columns["run"]
        ]
        unknown = walk.unknown()
        if marks is not None and len(marks):
            for row, run in enumerate(self._runs):
                self._runs[row] = marks.plain_bytes(run)
                if len(self._runs[row]) < len(run):  # it was evicted meanwhile, with its marks
                    unknown.append(row)
        for row in unknown:
            self._runs[row] = b""
        self._lengths = np.array([len(run) for run in self._runs], np.int64) // TOKEN_BYTES

    def places(self, needles: Sequence[TokenArray], most: int) -> list[list[FoundAt]]:
        """For each needle the first place in each run in which it ends, shallow runs first.

        At most ``most`` for each.
        """
        assert all(len(needle) for needle in needles)
        found = [dict(self._across(needle)) for needle in needles]
        for batch in self._batches():
            short = [i for i, places in enumerate(found) if self._wants(places, batch, most)]
            if not short:
                continue
            for i, row, at in self._within(batch, [(i, needles[i]) for i in short]):
                found[i].setdefault(row, at)  # what begins before the run comes first
        return [[FoundAt(row, at[row]) for row in sorted(at)[:most]] for at in found]

    def _wants(self, places: dict[int, int], batch: tuple[int, int], most: int) -> bool:
        """Whether rows from this batch on can be among the first ``most``."""
        return len(places) < most or sum(row < batch[0] for row in places) < most

    def path(self, row: int) -> list[int]:
        """The rows from the top to this one."""
        rows = [row]
        while (row := int(self._parents[row])) >= 0:
            rows.append(row)
        return rows[::-1]

    def tokens(self, row: int, start: int, stop: int) -> TokenArray:
        """Tokens ``start`` … ``stop`` of the path to ``row``, as far as there are any."""
        parts: list[bytes] = []
        while row >= 0:
            first = self._depths[row] * self._page_size
            run = self._runs[row]
            low, high = max(start - first, 0), max(stop - first, 0)
            parts.append(run[low * TOKEN_BYTES : high * TOKEN_BYTES])
            if first <= start:
                break
            row = int(self._parents[row])
        return np.frombuffer(b"".join(reversed(parts)), TOKEN_DTYPE)

    # --- within runs -------------------------------------------------------------------------

    def _within(
        self, batch: tuple[int, int], needles: list[tuple[int, TokenArray]]
    ) -> Iterator[tuple[int, int, int]]:
        """Which needle ends in which row, and where it begins; the first place of each."""
        first, last = batch
        tokens = np.frombuffer(b"".join(self._runs[first:last]), TOKEN_DTYPE)
        lengths = self._lengths[first:last]
        ends = np.cumsum(lengths)
        begun: dict[int, npt.NDArray[np.intp]] = {}  # by a needle's first token: where that stands
        for i, needle in needles:
            token = int(needle[0])
            if token not in begun:
                begun[token] = np.flatnonzero(tokens == token)
            at = _go_on(tokens, begun[token], needle)
            rows = np.searchsorted(ends, at, side="right")
            inside = at + len(needle) <= ends[rows]
            rows, firsts = np.unique(rows[inside], return_index=True)
            offsets = at[inside][firsts] - (ends[rows] - lengths[rows])
            for row, offset in zip((rows + first).tolist(), offsets.tolist(), strict=True):
                yield i, row, self._depths[row] * self._page_size + offset

    def _batches(self) -> Iterator[tuple[int, int]]:
        """Rows with a million tokens together, or one row with more."""
        ends = np.cumsum(self._lengths)
        first = 0
        while first < len(ends):
            before = int(ends[first - 1]) if first else 0
            last = int(np.searchsorted(ends, before + _BATCH_TOKENS, side="right"))
            last = max(last, first + 1)
            yield first, last
            first = last

    # --- across borders ----------------------------------------------------------------------

    def _across(self, needle: TokenArray) -> Iterator[FoundAt]:
        """Where ``needle`` begins in what a run hangs from, and ends in the run."""
        symbols = needle.tobytes()
        parents, runs = self._parents, self._runs
        begun: dict[int, list[int]] = {}  # row → tokens of the needle that its path ends with
        inner = np.unique(parents[parents >= 0])
        ending = {symbols[i - TOKEN_BYTES : i] for i in range(TOKEN_BYTES, len(symbols), 4)}
        for row in inner.tolist():
            run = runs[row]
            if run[-TOKEN_BYTES:] not in ending:
                continue
            lengths = self._begun(symbols, run, begun.get(int(parents[row]), []))
            if not lengths:
                continue
            begun[row] = lengths
            children = np.searchsorted(parents, [row, row + 1])
            for child in range(*children.tolist()):
                # The most that had begun before is what begins first.
                for length in reversed(lengths):
                    if runs[child].startswith(symbols[length * TOKEN_BYTES :]):
                        yield FoundAt(child, self._depths[child] * self._page_size - length)
                        break

    def _begun(self, symbols: bytes, run: bytes, before: list[int]) -> list[int]:
        """How many leading tokens of ``symbols`` stand at the end of ``run`` and what it follows.

        All that there are, rising; ``before`` are those of what it follows.
        """
        whole = len(run) // TOKEN_BYTES
        lengths = [
            size // TOKEN_BYTES
            for size in range(TOKEN_BYTES, min(len(symbols), len(run) + 1), TOKEN_BYTES)
            if run.endswith(symbols[:size])
        ]
        for length in before:
            size = length * TOKEN_BYTES
            if size + len(run) < len(symbols) and symbols.startswith(run, size):
                lengths.append(length + whole)
        return lengths


def _go_on(
    tokens: TokenArray, at: npt.NDArray[np.intp], needle: TokenArray
) -> npt.NDArray[np.intp]:
    """The places among ``at``, where its first token stands, at which all of ``needle`` does."""
    at = at[: np.searchsorted(at, len(tokens) - len(needle), side="right")]
    for offset in range(1, len(needle)):
        if not len(at):
            break
        at = at[tokens[at + offset] == needle[offset]]
    return at
