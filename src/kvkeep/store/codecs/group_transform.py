"""`GroupTransform`: the arithmetic of one group of heads of a basis."""

from __future__ import annotations

import math
import threading
import time
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvkeep.store.codecs.positions import SAMPLE_TOKENS, rotate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from numpy.typing import NDArray
    from torch import Tensor

    from kvkeep.store.codecs.basis import Basis, HeadGroup
    from kvkeep.store.codecs.positions import Positions

    Bits = NDArray[Any]

__all__ = ["GroupTransform", "Workspace", "words_of"]

_LARGEST = 127  # of a code
_SLICE = 1 << 16  # numbers decoded at once, in float32: they stay in the processor's cache


class _Run(NamedTuple):
    """Channels of adjacent heads of a part: ``place`` is where they are among the group's."""

    part: int
    heads: slice
    channels: slice
    place: slice


class Workspace(threading.local):
    """Memory for slices of numbers of ``dtype``, for each thread: 1.3 MiB at most.

    New memory for each slice costs as much as the arithmetic: the kernel clears its pages.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._numbers = torch.empty(_SLICE, dtype=torch.float32)
        self._sums = torch.empty(_SLICE, dtype=torch.int32)
        self._spare = torch.empty(_SLICE, dtype=torch.float32)
        self._rounded = torch.empty(_SLICE, dtype=dtype)

    def numbers(self, tokens: int, width: int) -> Tensor:
        """Return float32 memory [tokens, width]."""
        return self._numbers[: tokens * width].view(tokens, width)

    def sums(self, tokens: int, width: int) -> Tensor:
        """Return int32 memory [tokens, width]."""
        return self._sums[: tokens * width].view(tokens, width)

    def rounded(self, tokens: int, width: int) -> Tensor:
        """Return memory [tokens, width] of the block's type."""
        return self._rounded[: tokens * width].view(tokens, width)

    def spare(self, tokens: int, pairs: int) -> tuple[Tensor, Tensor]:
        """Return float32 memory [tokens, pairs], twice."""
        both = self._spare[: 2 * tokens * pairs].view(2, tokens, pairs)
        return both[0], both[1]


class GroupTransform:
    """Turns numbers of the heads of ``group`` into codes, and codes into numbers.

    ``views`` in the methods are the parts of a block [tokens, heads, words]: a word is an unsigned
    integer that holds `words_of` numbers of ``dtype``, to copy several at once. ``turns`` are
    cosines and sines of the tokens' positions, one head's behind another's for at least ``turned``
    pairs, if parts are rotated.

    Inside, the group's channels have another order: first the first channels of all pairs, then
    the second ones, then the others. So a rotation is a few operations on whole rows.

    Codes and rows are whole numbers whose sums float32 holds exactly, so every machine decodes the
    same numbers, whatever its order of summing.

    Thread safety: immutable.
    """

    def __init__(self, group: HeadGroup, basis: Basis, dtype: torch.dtype) -> None:
        self.group = group
        self.width, self.rank = group.width, group.rank
        self._dtype = dtype
        self._whole = list(_runs(group.heads, basis.parts))
        self._runs, self.turned = _sorted_runs(group.heads, basis)
        order = _order(self._runs, self._whole, self.width)
        self._words = np.dtype(f"u{dtype.itemsize * words_of(basis, dtype)}")
        self._runs = _in_words(self._runs, words_of(basis, dtype))
        self._whole = _in_words(self._whole, words_of(basis, dtype))
        self._row = self.width // words_of(basis, dtype)
        self._mean = torch.from_numpy(group.mean[order])
        self._scale = torch.from_numpy(group.scale[order])
        self._tolerance = torch.from_numpy(group.tolerance[order])
        self._forward = torch.from_numpy(group.forward[order])
        self._rows = torch.from_numpy(np.ascontiguousarray(group.rows[:, order]))
        self._product = _product()

    def correlate(self, positions: Positions, views: Sequence[Bits]) -> Tensor | None:
        """Return how the group's keys are turned, see `Positions.correlate`; None without keys."""
        if not self.turned:
            return None
        keys = self._numbers(views, slice(min(SAMPLE_TOKENS, len(views[0]))))
        return positions.correlate(keys[:, : 2 * self.turned], self._mean[: 2 * self.turned])

    def encode(
        self,
        views: Sequence[Bits],
        turns: tuple[Tensor, Tensor] | None,
        memory: Workspace,
    ) -> tuple[NDArray[np.int8], NDArray[np.bool_]]:
        """Return codes [rank, tokens], and which tokens are exact.

        A token is exact if its error in a channel would exceed the tolerance; its codes are 0.
        """
        tokens = len(views[0])
        codes = np.empty((self.rank, tokens), np.int8)
        exact = np.empty(tokens, np.bool_)
        end = torch.finfo(self._dtype).max / 2
        for some in self._slices(tokens):
            given = self._numbers(views, some)
            kept = ~(given.abs().amax(1) < end)
            given.masked_fill_(kept[:, None], 0)
            if turns is not None:
                self._rotate(given, (turns[0][some], -turns[1][some]), memory)
            wanted = torch.mm(given - self._mean, self._forward).round_()
            coded = wanted.clamp_(-_LARGEST, _LARGEST).to(torch.int8)
            error = self._restore(coded, memory).sub_(given).abs_()
            kept |= ~(error <= self._tolerance).all(1)
            coded.masked_fill_(kept[:, None], 0)
            torch.from_numpy(codes)[:, some] = coded.T
            exact[some] = kept.numpy()
        return codes, exact

    def decode(
        self,
        codes: NDArray[np.int8],
        turns: tuple[Tensor, Tensor] | None,
        views: Sequence[Bits],
        memory: Workspace,
    ) -> None:
        """Write the numbers of ``codes`` [rank, tokens] into ``views``."""
        for some in self._slices(codes.shape[1]):
            given = torch.from_numpy(np.ascontiguousarray(codes[:, some]))
            numbers = self._restore(given.T, memory)
            if turns is not None:
                self._rotate(numbers, (turns[0][some], turns[1][some]), memory)
            rounded = memory.rounded(*numbers.shape).copy_(numbers)
            words = rounded.view(torch.uint8).numpy().view(self._words)
            _scatter(words, self._runs, views, some)

    def rows_of(self, views: Sequence[Bits], tokens: slice | NDArray[np.bool_]) -> bytes:
        """Return the numbers [n, width] of these tokens as they are."""
        if isinstance(tokens, slice):
            return _gathered(views, self._whole, tokens, self._row).tobytes()
        every = _gathered(views, self._whole, slice(0, len(tokens)), self._row)
        return every[tokens].tobytes()

    def place(
        self, rows: memoryview, tokens: slice | NDArray[np.int64], views: Sequence[Bits]
    ) -> None:
        """Write the numbers [n, width] in ``rows`` to these tokens of ``views``."""
        given = np.frombuffer(rows, self._words).reshape(-1, self._row)
        for part, heads, channels, place in self._whole:
            target = views[part][:, heads, channels]
            target[tokens] = given[:, place].reshape(len(given), *target.shape[1:])

    def _slices(self, tokens: int) -> Iterator[slice]:
        step = max(1, _SLICE // self.width)
        for at in range(0, tokens, step):
            yield slice(at, min(tokens, at + step))

    def _numbers(self, views: Sequence[Bits], tokens: slice) -> Tensor:
        """Return the channels [tokens, width] in the order inside, float32, in a new tensor."""
        gathered = _gathered(views, self._runs, tokens, self._row)
        numbers = torch.from_numpy(gathered.view(np.uint8)).view(self._dtype)
        return numbers.to(torch.float32)

    def _restore(self, codes: Tensor, memory: Workspace) -> Tensor:
        """Return the numbers of ``codes`` [tokens, rank] before they are turned, float32.

        They are in ``memory``, until the next call.
        """
        numbers = memory.numbers(len(codes), self.width)
        if not self.rank:
            return numbers.copy_(self._mean)
        if self._product is not None and len(codes) > 1:
            sums = memory.sums(len(codes), self.width)
            numbers.copy_(self._product(codes, self._rows, out=sums))
        else:  # torch gets a transposed matrix of one row wrong
            torch.mm(codes.float(), self._rows.float(), out=numbers)
        # Not fused: a fused sum is rounded once, and not every machine has it.
        return numbers.mul_(self._scale).add_(self._mean)

    def _rotate(self, numbers: Tensor, turns: tuple[Tensor, Tensor], memory: Workspace) -> None:
        if self.turned:
            first = numbers[:, : self.turned]
            second = numbers[:, self.turned : 2 * self.turned]
            cosines, sines = (one[:, : self.turned] for one in turns)
            rotate(first, second, (cosines, sines), memory.spare(*first.shape))


def words_of(basis: Basis, dtype: torch.dtype) -> int:
    """Return how many numbers are copied at once: up to 8 bytes, in which heads can be cut."""
    return math.gcd(8 // dtype.itemsize, len(basis.speeds), *(dim for _, dim in basis.parts))


def _in_words(runs: Sequence[_Run], size: int) -> list[_Run]:
    """Return runs whose channels and places count words of ``size`` numbers."""

    def cut(one: slice) -> slice:
        return slice(one.start // size, one.stop // size)

    return [run._replace(channels=cut(run.channels), place=cut(run.place)) for run in runs]


def _gathered(views: Sequence[Bits], runs: Sequence[_Run], tokens: slice, width: int) -> Bits:
    """Return the channels [tokens, width] of these tokens, in the order of ``runs``."""
    gathered = np.empty((len(range(tokens.start or 0, tokens.stop)), width), views[0].dtype)
    for part, heads, channels, place in runs:
        source = views[part][tokens, heads, channels]
        gathered[:, place].reshape(source.shape)[...] = source
    return gathered


def _scatter(gathered: Bits, runs: Sequence[_Run], views: Sequence[Bits], tokens: slice) -> None:
    for part, heads, channels, place in runs:
        target = views[part][tokens, heads, channels]
        target[...] = gathered[:, place].reshape(target.shape)


def _runs(heads: Sequence[int], parts: Sequence[tuple[int, int]]) -> Iterator[_Run]:
    """Yield the heads of a group with all their channels, joined where adjacent in a part."""
    place = [(number, head) for number, (count, _) in enumerate(parts) for head in range(count)]
    run: _Run | None = None
    at = 0
    for part, head in (place[number] for number in heads):
        dim = parts[part][1]
        if run and run.part == part and run.heads.stop == head:
            run = run._replace(
                heads=slice(run.heads.start, head + 1), place=slice(run.place.start, at + dim)
            )
        else:
            if run:
                yield run
            run = _Run(part, slice(head, head + 1), slice(0, dim), slice(at, at + dim))
        at += dim
    if run:
        yield run


def _sorted_runs(heads: Sequence[int], basis: Basis) -> tuple[list[_Run], int]:
    """Return runs in the order inside, and how many pairs all rotated heads have together."""
    pairs = len(basis.speeds)
    whole = list(_runs(heads, basis.parts))
    found: list[_Run] = []
    at = 0

    def add(run: _Run, channels: slice) -> None:
        nonlocal at
        size = (run.heads.stop - run.heads.start) * (channels.stop - channels.start)
        if size:
            found.append(_Run(run.part, run.heads, channels, slice(at, at + size)))
            at += size

    rotated = [run for run in whole if run.part in basis.rotated]
    for channels in (slice(0, pairs), slice(pairs, 2 * pairs)):
        for run in rotated:
            add(run, channels)
    turned = at // 2
    for run in whole:
        begin = 2 * pairs if run.part in basis.rotated else 0
        add(run, slice(begin, run.channels.stop))
    return found, turned


def _order(runs: Sequence[_Run], whole: Sequence[_Run], width: int) -> NDArray[np.int64]:
    """Return for each channel inside its number in the group's order."""
    order = np.empty(width, np.int64)
    for part, heads, channels, place in runs:
        home = next(
            run
            for run in whole
            if run.part == part and run.heads.start <= heads.start < run.heads.stop
        )
        dim = home.channels.stop
        head = np.arange(heads.start, heads.stop)[:, None] - home.heads.start
        channel = np.arange(channels.start, channels.stop)
        order[place] = (home.place.start + head * dim + channel).reshape(-1)
    return order


@cache
def _product() -> Callable[..., Tensor] | None:
    """Return torch's product of int8 matrices, if it is right and faster than that of float32.

    Processors without instructions for int8 are slow at it, or add in too few bits.
    """
    product: Callable[..., Tensor] | None = getattr(torch, "_int_mm", None)
    if product is None:
        return None
    generator = torch.Generator().manual_seed(0)
    for largest in (127, 5):
        codes = torch.randint(-largest, largest + 1, (128, 192), generator=generator)
        rows = torch.randint(-127, 128, (192, 256), generator=generator)
        codes[:64], rows[:, :128] = codes[:64].sign() * 127, rows[:, :128].sign() * 127
        small, other = codes.to(torch.int8), rows.to(torch.int8)
        try:
            right = torch.equal(product(small, other).long(), codes @ rows)
        except RuntimeError:
            return None
        if not right:
            return None
    floats = small.float(), other.float()
    if _seconds(lambda: product(small, other)) < _seconds(lambda: torch.mm(*floats)):
        return product
    return None


def _seconds(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best
