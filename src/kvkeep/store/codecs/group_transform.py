"""`GroupTransform`: the arithmetic of one group of heads of a basis."""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvkeep.store.codecs.positions import rotate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvkeep.store.codecs.basis import Basis, Group

__all__ = ["GroupTransform"]

_LARGEST = 127  # of a code


class _Heads(NamedTuple):
    """Adjacent heads of a part: ``channels`` are theirs in the group."""

    part: int
    first: int
    last: int
    dim: int
    channels: slice
    rotated: bool


class GroupTransform:
    """Turns numbers of the heads of ``group`` into codes, and codes into numbers.

    ``views`` in the methods are the parts of a block [tokens, heads, dim], in the block's type.
    ``turns`` are cosines and sines of the tokens' positions, if parts are rotated.

    Codes and rows are whole numbers whose sums float32 holds exactly, so every machine decodes the
    same numbers, whatever its order of summing (sines aside, whose last bit is the C library's).

    Thread safety: immutable.
    """

    def __init__(self, group: Group, basis: Basis) -> None:
        self.group = group
        self.width, self.rank = group.width, group.rank
        self._heads = list(_runs(group.heads, basis))
        self._mean = torch.from_numpy(group.mean)
        self._scale = torch.from_numpy(group.scale)
        self._tolerance = torch.from_numpy(group.tolerance)
        self._forward = torch.from_numpy(group.forward)
        self._rows = torch.from_numpy(group.rows)
        self._product = _product()
        self._float_rows = None if self._product else self._rows.float()

    def means(self) -> list[tuple[int, slice, Tensor]]:
        """Return part, heads, and means [heads, dim] of the rotated heads."""
        return [
            (one.part, slice(one.first, one.last), self._mean[one.channels].view(-1, one.dim))
            for one in self._heads
            if one.rotated
        ]

    def gather(self, views: Sequence[Tensor]) -> Tensor:
        """Return the group's channels [tokens, width] in the block's type, in a new tensor."""
        tokens = views[0].shape[0]
        gathered = torch.empty((tokens, self.width), dtype=views[0].dtype)
        for one in self._heads:
            target = gathered[:, one.channels].view(tokens, -1, one.dim)
            target.copy_(views[one.part][:, one.first : one.last])
        return gathered

    def encode(
        self, numbers: Tensor, turns: tuple[Tensor, Tensor] | None
    ) -> tuple[NDArray[np.int8], NDArray[np.bool_]]:
        """Return codes [rank, tokens] of ``numbers`` [tokens, width], and which tokens are exact.

        A token is exact if its error in a channel would exceed the tolerance; its codes are 0.
        """
        end = torch.finfo(numbers.dtype).max / 2
        given = numbers.float()
        exact = ~((given.abs() < end).all(1))
        given[exact] = 0
        if turns is not None:
            self._rotate(given, turns[0], -turns[1])
        wanted = torch.mm(given - self._mean, self._forward).round_()
        codes = wanted.clamp_(-_LARGEST, _LARGEST).to(torch.int8)
        error = self._restore(codes).sub_(given).abs_()
        exact |= ~((error <= self._tolerance).all(1))
        codes[exact] = 0
        return codes.T.contiguous().numpy(), exact.numpy()

    def decode(
        self,
        codes: NDArray[np.int8],
        turns: tuple[Tensor, Tensor] | None,
        views: Sequence[Tensor],
    ) -> None:
        """Write the numbers of ``codes`` [rank, tokens] into ``views``."""
        numbers = self._restore(torch.from_numpy(codes).T)
        if turns is not None:
            self._rotate(numbers, *turns)
        for one in self._heads:
            source = numbers[:, one.channels].view(len(numbers), -1, one.dim)
            views[one.part][:, one.first : one.last] = source

    def place(self, rows: Tensor, tokens: Tensor, views: Sequence[Tensor]) -> None:
        """Write exact ``rows`` [n, width] of these ``tokens`` [n] into ``views``."""
        for one in self._heads:
            source = rows[:, one.channels].reshape(len(rows), -1, one.dim)
            views[one.part][:, one.first : one.last][tokens] = source

    def _restore(self, codes: Tensor) -> Tensor:
        """Return the numbers of ``codes`` [tokens, rank] before they are turned, float32."""
        if not self.rank:
            return self._mean.repeat(len(codes), 1)
        if self._product is not None:
            sums = self._product(codes, self._rows).float()
        else:
            assert self._float_rows is not None
            sums = torch.mm(codes.float(), self._float_rows)
        # Not fused: a fused sum is rounded once, and not every machine has it.
        return sums.mul_(self._scale).add_(self._mean)

    def _rotate(self, numbers: Tensor, cosines: Tensor, sines: Tensor) -> None:
        for one in self._heads:
            if one.rotated:
                rotate(numbers[:, one.channels].view(len(numbers), -1, one.dim), cosines, sines)


def _runs(heads: Sequence[int], basis: Basis) -> list[_Heads]:
    """Return the heads of a group, joined where they are adjacent in a part."""
    place = [
        (number, head) for number, (count, _) in enumerate(basis.parts) for head in range(count)
    ]
    found: list[_Heads] = []
    channel = 0
    for part, head in (place[number] for number in heads):
        dim = basis.parts[part][1]
        if found and found[-1].part == part and found[-1].last == head:
            last = found[-1]
            channels = slice(last.channels.start, channel + dim)
            found[-1] = last._replace(last=head + 1, channels=channels)
        else:
            channels = slice(channel, channel + dim)
            found.append(_Heads(part, head, head + 1, dim, channels, part in basis.rotated))
        channel += dim
    return found


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
