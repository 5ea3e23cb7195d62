"""`GroupTransform`: the arithmetic of one group of heads of a basis."""

from __future__ import annotations

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

__all__ = ["GroupTransform"]

_LARGEST = 127  # of a code
_SLICE = 1 << 16  # numbers decoded at once, in float32: they stay in the processor's cache


class _Run(NamedTuple):
    """Channels of adjacent heads of a part: ``place`` is where they are among the group's."""

    part: int
    heads: slice
    channels: slice
    place: slice


class GroupTransform:
    """Turns numbers of the heads of ``group`` into codes, and codes into numbers.

    ``views`` in the methods are the parts of a block [tokens, heads, dim], as unsigned integers of
    the size of ``dtype``. ``turns`` are cosines and sines of the tokens' positions, one head's
    behind another's for at least ``turned`` pairs, if parts are rotated.

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
        self._bits = np.dtype(f"u{dtype.itemsize}")
        self._whole = list(_runs(group.heads, basis.parts))
        self._runs, self.turned = _sorted_runs(group.heads, basis)
        order = _order(self._runs, self._whole, self.width)
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
        keys = self._numbers([one[:SAMPLE_TOKENS] for one in views])
        return positions.correlate(keys[:, : 2 * self.turned], self._mean[: 2 * self.turned])

    def encode(
        self, views: Sequence[Bits], turns: tuple[Tensor, Tensor] | None
    ) -> tuple[NDArray[np.int8], NDArray[np.bool_]]:
        """Return codes [rank, tokens], and which tokens are exact.

        A token is exact if its error in a channel would exceed the tolerance; its codes are 0.
        """
        tokens = len(views[0])
        codes = np.empty((self.rank, tokens), np.int8)
        exact = np.empty(tokens, np.bool_)
        end = torch.finfo(self._dtype).max / 2
        for some in self._slices(tokens):
            given = self._numbers([one[some] for one in views])
            kept = ~(given.abs().amax(1) < end)
            given.masked_fill_(kept[:, None], 0)
            if turns is not None:
                self._rotate(given, turns[0][some], -turns[1][some])
            wanted = torch.mm(given - self._mean, self._forward).round_()
            coded = wanted.clamp_(-_LARGEST, _LARGEST).to(torch.int8)
            error = self._restore(coded).sub_(given).abs_()
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
    ) -> None:
        """Write the numbers of ``codes`` [rank, tokens] into ``views``."""
        for some in self._slices(codes.shape[1]):
            given = torch.from_numpy(np.ascontiguousarray(codes[:, some]))
            numbers = self._restore(given.T)
            if turns is not None:
                self._rotate(numbers, turns[0][some], turns[1][some])
            bits = numbers.to(self._dtype).view(torch.uint8).numpy().view(self._bits)
            _scatter(bits, self._runs, [one[some] for one in views])

    def rows_of(self, views: Sequence[Bits], tokens: slice | NDArray[np.bool_]) -> bytes:
        """Return the numbers [n, width] of these tokens as they are."""
        given = [one[tokens] for one in views]
        gathered = np.empty((len(given[0]), self.width), self._bits)
        _gather(given, self._whole, gathered)
        return gathered.tobytes()

    def place(
        self, rows: memoryview, tokens: slice | NDArray[np.int64], views: Sequence[Bits]
    ) -> None:
        """Write the numbers [n, width] in ``rows`` to these tokens of ``views``."""
        given = np.frombuffer(rows, self._bits).reshape(-1, self.width)
        for part, heads, channels, place in self._whole:
            target = views[part][:, heads, channels]
            target[tokens] = given[:, place].reshape(len(given), *target.shape[1:])

    def _slices(self, tokens: int) -> Iterator[slice]:
        step = max(1, _SLICE // self.width)
        for at in range(0, tokens, step):
            yield slice(at, min(tokens, at + step))

    def _numbers(self, views: Sequence[Bits]) -> Tensor:
        """Return the channels [tokens, width] in the order inside, float32, in a new tensor."""
        gathered = np.empty((len(views[0]), self.width), self._bits)
        _gather(views, self._runs, gathered)
        numbers = torch.from_numpy(gathered.view(np.uint8)).view(self._dtype)
        return numbers.to(torch.float32)

    def _restore(self, codes: Tensor) -> Tensor:
        """Return the numbers of ``codes`` [tokens, rank] before they are turned, float32."""
        if not self.rank:
            return self._mean.repeat(len(codes), 1)
        if self._product is not None and len(codes) > 1:
            sums = self._product(codes, self._rows).float()
        else:  # torch gets a transposed matrix of one row wrong
            sums = torch.mm(codes.float(), self._rows.float())
        # Not fused: a fused sum is rounded once, and not every machine has it.
        return sums.mul_(self._scale).add_(self._mean)

    def _rotate(self, numbers: Tensor, cosines: Tensor, sines: Tensor) -> None:
        if self.turned:
            first = numbers[:, : self.turned]
            second = numbers[:, self.turned : 2 * self.turned]
            rotate(first, second, cosines[:, : self.turned], sines[:, : self.turned])


def _gather(views: Sequence[Bits], runs: Sequence[_Run], gathered: Bits) -> None:
    for part, heads, channels, place in runs:
        source = views[part][:, heads, channels]
        gathered[:, place].reshape(source.shape)[...] = source


def _scatter(gathered: Bits, runs: Sequence[_Run], views: Sequence[Bits]) -> None:
    for part, heads, channels, place in runs:
        target = views[part][:, heads, channels]
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
def _product() -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return torch's product of int8 matrices, if it is right and faster than that of float32.

    Processors without instructions for int8 are slow at it, or add in too few bits.
    """
    product: Callable[[Tensor, Tensor], Tensor] | None = getattr(torch, "_int_mm", None)
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
