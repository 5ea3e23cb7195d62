"""`BasisFit`: fits a basis to the KV of a model and to what the model makes of it.

How much an error in KV matters is measured: with g the gradient of the log probability of a token
that the model itself draws, E[g gᵀ] is the Fisher information S, and KV with a small error e moves
the model's predictions by eᵀ S e / 2 nats. In channels W = S^(1/2) · (KV - mean) every error of the
same size costs the same nats, so all codes there have one step, and the code lengths follow from
the spectrum: reverse water-filling. The axes are those of the covariance of W, so that codes are
uncorrelated; axes whose variance is below a quarter of the steps' error are left out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kvkeep.core.errors import InvalidValue
from kvkeep.store.codecs.basis import WIDEST, Basis, HeadGroup
from kvkeep.store.codecs.positions import RUN_TOKENS, Positions, rotate

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["BasisFit", "grouping"]

_RIDGE = 0.03  # of a head's mean sensitivity, added to every channel's
_FLOOR = 1e-6  # the same, of all channels' mean
_LEFT_OUT = 0.25  # of the error of a step: axes of less variance are left out
_TOLERATED = 8.0  # standard deviations of the expected error
_LARGEST_SPREAD = 30.0  # of codes: 127 is more than four of them
_CODE = 127


class BasisFit:
    """Sums up KV and gradients, and makes bases of them.

    Numbers and gradients are given as parts [tokens, heads, dim] of consecutive tokens from
    position 0 on, in any type. Memory: two matrices [width, width] of float64 for each group.
    """

    def __init__(
        self,
        parts: Sequence[tuple[int, int]],
        rotated: Sequence[int],
        speeds: NDArray[np.float64],
        width: int = 256,
    ) -> None:
        self.parts = tuple(parts)
        self.rotated = tuple(rotated)
        self.speeds = speeds
        self._groups = grouping(self.parts, self.rotated, width)
        self._positions = Positions(speeds, 1)
        widths = [sum(self._dim(head) for head in heads) for heads in self._groups]
        self._sums = [torch.zeros(width, dtype=torch.float64) for width in widths]
        self._squares = [torch.zeros(width, width, dtype=torch.float64) for width in widths]
        self._sensitivity = [torch.zeros(width, width, dtype=torch.float64) for width in widths]
        self._tokens = 0
        self._draws = 0
        self._following = 0

    def add_numbers(self, parts: Sequence[Tensor]) -> None:
        """Add the KV of some tokens."""
        self._tokens += len(parts[0])
        for number, given in enumerate(self._gathered(parts)):
            self._sums[number] += given.sum(0)
            self._squares[number] += given.T @ given

    def add_gradients(self, parts: Sequence[Tensor], following: int) -> None:
        """Add the gradients, by the KV of some tokens, of ``following`` later log probabilities.

        Each is the log probability of a token drawn from the model's prediction; they are summed.
        """
        self._draws += 1
        self._following += following
        for number, given in enumerate(self._gathered(parts)):
            self._sensitivity[number] += given.T @ given

    def variance(self) -> float:
        """Return the mean over channels of the logarithm of the variance."""
        logs = []
        for sums, squares in zip(self._sums, self._squares, strict=True):
            mean = sums / self._tokens
            variances = squares.diagonal() / self._tokens - mean.square()
            logs.append(variances.clamp(min=1e-30).log())
        return float(torch.cat(logs).mean())

    def spectra(self) -> list[Tensor]:
        """Return for each group the nats a token that each axis carries, descending, float64.

        That is what the loss of the axis would cost: half its variance in sensitive channels.
        """
        return [self._axes(number)[0] / 2 for number in range(len(self._groups))]

    def noise_of(self, nats: float) -> float:
        """Return the error of a code, in nats a token, at which all cost ``nats`` together."""
        spectrum = torch.cat(self.spectra())
        low, high = 1e-18, float(spectrum.max()) + 1e-18
        for _ in range(100):
            middle = math.sqrt(low * high)
            cost = float(spectrum.clamp(max=middle).sum())
            low, high = (low, middle) if cost > nats else (middle, high)
        return low

    def basis(self, noise: float, model: str, longest: int) -> Basis:
        """Return the basis whose codes each have an error of ``noise`` nats a token.

        Raises:
            InvalidValue: no gradients or fewer tokens than two were added.
        """
        if self._tokens < 2 or not self._draws:
            raise InvalidValue("a basis is fitted to KV and gradients: add both")
        groups = tuple(self._group(number, 2 * noise) for number in range(len(self._groups)))
        basis = Basis(model, self.parts, self.rotated, self.speeds, longest, groups)
        return basis.signed()

    def _group(self, number: int, variance: float) -> HeadGroup:
        spectrum, forth, back = self._axes(number)
        active = spectrum > variance * _LEFT_OUT
        rows = back[active] * math.sqrt(12 * variance)
        spread = (spectrum[active] / (12 * variance)).sqrt()
        coarser = (spread / _LARGEST_SPREAD).ceil().clamp_(min=1)
        order = (spread / coarser).argsort(descending=True, stable=True)
        rows, spread = (rows * coarser[:, None])[order], (spread / coarser)[order]
        scale = torch.ones(rows.shape[1], dtype=torch.float64)
        if len(rows):
            peaks = rows.abs().amax(0)
            scale = torch.where(peaks > 0, peaks / _CODE, scale).float().double()
        whole = (rows / scale).round().clamp_(-_CODE, _CODE)
        meant = whole * scale
        # The codes nearest in nats, for the rows as rounded.
        weighted = forth @ (forth.T @ meant.T)
        inverse = weighted @ torch.linalg.inv(meant @ weighted)
        left_out = back[~active] * spectrum[~active].sqrt()[:, None]
        error = (meant.square().sum(0) / 12 + left_out.square().sum(0)).sqrt() * _TOLERATED
        mean = self._sums[number] / self._tokens
        return HeadGroup(
            heads=self._groups[number],
            mean=mean.float().numpy(),
            scale=scale.float().numpy(),
            tolerance=error.clamp_(min=1e-30).float().numpy(),
            spread=spread.float().numpy(),
            rows=whole.to(torch.int8).numpy(),
            forward=inverse.float().contiguous().numpy(),
        )

    def _axes(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return variances of the axes (descending), and the matrices to them and back from them.

        An axis' variance is in units of nats a token, times two.
        """
        mean = self._sums[number] / self._tokens
        covariance = self._squares[number] / self._tokens - torch.outer(mean, mean)
        root = self._sensitive_root(number)
        values, vectors = torch.linalg.eigh(root @ covariance @ root)
        vectors = vectors.flip(1)
        forth = root @ vectors
        return values.flip(0).clamp_(min=0), forth, torch.linalg.inv(forth)

    def _sensitive_root(self, number: int) -> Tensor:
        """Return S^(1/2) of a group, S in nats a token times two, for errors of every token."""
        total = self._sensitivity[number] / self._following
        every = sum(float(one.diagonal().sum()) for one in self._sensitivity)
        every /= self._following * sum(len(one) for one in self._sensitivity)
        ridge = torch.full((len(total),), _FLOOR * every + 1e-300, dtype=torch.float64)
        at = 0
        for head in self._groups[number]:
            channels = slice(at, at + self._dim(head))
            ridge[channels] += _RIDGE * total.diagonal()[channels].mean()
            at = channels.stop
        values, vectors = torch.linalg.eigh(total + torch.diag(ridge))
        root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
        return root

    def _gathered(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return each group's channels [tokens, width], turned back to position 0, float64."""
        tokens = len(parts[0])
        heads: list[Tensor] = []
        for number, part in enumerate(parts):
            given = part.detach().float().cpu().clone()
            if number in self.rotated:
                pairs = len(self.speeds)
                for at in range(0, tokens, RUN_TOKENS):
                    some = given[at : at + RUN_TOKENS]
                    cosines, sines = self._positions.turns(at, len(some))
                    first, second = some[..., :pairs], some[..., pairs : 2 * pairs]
                    rotate(first, second, (cosines[:, None], -sines[:, None]))
            heads += given.unbind(1)
        return [torch.cat([heads[head] for head in group], 1).double() for group in self._groups]

    def _dim(self, head: int) -> int:
        for heads, dim in self.parts:
            if head < heads:
                return dim
            head -= heads
        raise AssertionError("a head that is in no part")


def grouping(
    parts: Sequence[tuple[int, int]], rotated: Sequence[int], width: int
) -> list[tuple[int, ...]]:
    """Return the heads of each group, of at most ``width`` channels if its heads are not wider.

    A head's keys and values are together if they fit, then the heads of a layer, then those of the
    next layers. In a group, rotated heads are first.

    Raises:
        InvalidValue: a head is wider than a group can be, or ``width`` is no width.
    """
    if not 1 <= width <= WIDEST or max(dim for _, dim in parts) > WIDEST:
        raise InvalidValue(f"a group has up to {WIDEST} channels, and so has a head; got {width}")
    starts = [sum(heads for heads, _ in parts[:number]) for number in range(len(parts))]
    paired = len(parts) % 2 == 0 and all(
        parts[number][0] == parts[number + 1][0] for number in range(0, len(parts), 2)
    )
    found: list[list[tuple[bool, int]]] = []
    room = 0
    step = 2 if paired else 1
    for layer in range(0, len(parts), step):
        for head in range(parts[layer][0]):
            members = range(layer, layer + step)
            needed = sum(parts[part][1] for part in members)
            units = [members] if needed <= width else [[part] for part in members]
            for unit in units:
                needed = sum(parts[part][1] for part in unit)
                if needed > room:
                    found.append([])
                    room = max(width, needed)
                room -= needed
                found[-1] += [(part not in rotated, starts[part] + head) for part in unit]
    return [tuple(head for _, head in sorted(group)) for group in found]
