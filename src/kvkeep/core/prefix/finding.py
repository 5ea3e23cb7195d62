"""Search a tree for tokens: within runs, and across the borders between them."""

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
    """A place where tokens were found."""

    row: int
    """Row of the run in which they end."""
    at: int
    """Their position in the prompt, in tokens."""


class Finding:
    """Searches the runs of a `TreeWalk`, whose symbols are tokens.

    Thread safety: none, and no lock is needed: the data is a snapshot. Cost: a pass over all
    tokens, 1 to 2 ns each per needle, and 1 µs a run; memory for a million tokens.
    """

    COLUMNS = ("parent", "end", "serial", "run", "depth")

    def __init__(self, walk: TreeWalk, page_size: int, marks: Marks | None = None) -> None:
        self._parents = walk.parents()
        self._page_size = page_size
        self._depths: list[int] = walk.columns["depth"]
        # A run that lost its tail is a memoryview of the longer one.
        self._runs: list[bytes] = [
            run if type(run) is bytes else bytes(run) for run in walk.columns["run"]
        ]
        unknown = walk.unknown()
        if marks is not None and len(marks):
            for row, run in enumerate(self._runs):
                self._runs[row] = marks.plain_bytes(run)
                if len(self._runs[row]) < len(run):  # evicted meanwhile, with its marks
                    unknown.append(row)
        for row in unknown:
            self._runs[row] = b""
        self._lengths = np.array([len(run) for run in self._runs], np.int64) // TOKEN_BYTES

    def places(self, needles: Sequence[TokenArray], most: int) -> list[list[FoundAt]]:
        """Return for each needle its first place in each run, shallow runs first.

        ``most`` limits the places of each needle.
        """
        assert all(len(needle) for needle in needles)
        found = [dict(self._across(needle)) for needle in needles]
        for batch in self._batches():
            short = [i for i, places in enumerate(found) if self._wants(places, batch, most)]
            if not short:
                continue
            for i, row, at in self._within(batch, [(i, needles[i]) for i in short]):
                found[i].setdefault(row, at)  # a place that begins before the run precedes
        return [[FoundAt(row, at[row]) for row in sorted(at)[:most]] for at in found]

    def _wants(self, places: dict[int, int], batch: tuple[int, int], most: int) -> bool:
        """Whether rows from this batch on can be among the first ``most``."""
        return len(places) < most or sum(row < batch[0] for row in places) < most

    def path(self, row: int) -> list[int]:
        """Return the rows from the top to this one."""
        rows = [row]
        while (row := int(self._parents[row])) >= 0:
            rows.append(row)
        return rows[::-1]

    def tokens(self, row: int, start: int, stop: int) -> TokenArray:
        """Return tokens ``start`` … ``stop`` of the path to ``row``, as far as they exist."""
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
        """Yield needle, row and position for the first place of each needle in each run."""
        first, last = batch
        tokens = np.frombuffer(b"".join(self._runs[first:last]), TOKEN_DTYPE)
        lengths = self._lengths[first:last]
        ends = np.cumsum(lengths)
        begun: dict[int, npt.NDArray[np.intp]] = {}  # positions of each first token
        for i, needle in needles:
            token = int(needle[0])
            if token not in begun:
                begun[token] = np.flatnonzero(tokens == token)
            at = _continued(tokens, begun[token], needle)
            rows = np.searchsorted(ends, at, side="right")
            inside = at + len(needle) <= ends[rows]
            rows, firsts = np.unique(rows[inside], return_index=True)
            offsets = at[inside][firsts] - (ends[rows] - lengths[rows])
            for row, offset in zip((rows + first).tolist(), offsets.tolist(), strict=True):
                yield i, row, self._depths[row] * self._page_size + offset

    def _batches(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of rows with up to a million tokens together, or one longer row."""
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
        """Yield the places where ``needle`` begins before a run and ends in it."""
        symbols = needle.tobytes()
        parents, runs = self._parents, self._runs
        begun: dict[
            int, list[int]
        ] = {}  # row → lengths of the needle's heads that its path ends with
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
                # The longest head begins first.
                for length in reversed(lengths):
                    if runs[child].startswith(symbols[length * TOKEN_BYTES :]):
                        yield FoundAt(child, self._depths[child] * self._page_size - length)
                        break

    def _begun(self, symbols: bytes, run: bytes, before: list[int]) -> list[int]:
        """Return the lengths of all heads of ``symbols`` with which the path up to ``run`` ends.

        In tokens, ascending; ``before`` are those of the path before ``run``.
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


def _continued(
    tokens: TokenArray, at: npt.NDArray[np.intp], needle: TokenArray
) -> npt.NDArray[np.intp]:
    """Return those of the positions ``at`` of its first token where all of ``needle`` follows."""
    at = at[: np.searchsorted(at, len(tokens) - len(needle), side="right")]
    for offset in range(1, len(needle)):
        if not len(at):
            break
        at = at[tokens[at + offset] == needle[offset]]
    return at
