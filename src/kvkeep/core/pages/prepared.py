"""Work that `PagedTensors` does once per forward pass instead of once per layer.

A model stores the same tokens and gathers the same pages layer after layer. Checking ids, splitting
slots and allocating memory take longer than storing one token, so `PagedTensors.prepare_store` and
`prepare_gather` do it once for all layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Gather", "Places", "Scratch"]

# Larger gathers take fresh memory: computing on them takes longer than allocating.
_KEPT: Final = 64 << 20  # bytes


class Places:
    """Slots split into int64 ``pages`` and ``offsets`` [tokens], for `PagedTensors.store`."""

    __slots__ = ("offsets", "pages")

    def __init__(self, slots: Tensor, page_size: int) -> None:
        self.pages = slots // page_size
        self.offsets = slots % page_size

    def __len__(self) -> int:
        return len(self.pages)


class Scratch:
    """Memory that gathers of K and V share.

    Fresh memory is expensive on a CPU, as the kernel hands out its pages first: gathering 16 MiB
    takes 2 ms into reused memory and 2 to 26 ms into fresh memory. Grows to the largest gather so
    far, 64 MiB at most; a larger `Gather` has memory of its own.

    Thread safety: none. All gathers that share a scratch overwrite each other.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._memory.nbytes

    def take(self, elements: int) -> Tensor:
        """Return uninitialised memory for ``elements``, valid until the next call."""
        if elements <= len(self._memory):
            return self._memory[:elements]
        # A tensor made in inference mode cannot be written outside of it.
        with torch.inference_mode(mode=False):
            fresh = torch.empty(elements, dtype=self._memory.dtype, device=self._memory.device)
        if fresh.nbytes <= _KEPT:
            self._memory = fresh
        return fresh


class Gather:
    """Pages whose K and V are gathered layer after layer, into the same memory.

    ``keys`` and ``values`` are [tokens, heads, dim], for all tokens of the pages in order. They
    hold the result of the last `fill`, until another gather with the same scratch is filled.
    """

    __slots__ = ("_index", "_k", "_layers", "_v", "keys", "values")

    def __init__(
        self,
        layers: tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None],
        index: Tensor,
        scratch: Scratch,
        dtype: torch.dtype,
        value_dim: int,
    ) -> None:
        """``layers`` are K and V of every layer, [pages, page_size, heads, dim].

        V is None where it is the leading ``value_dim`` of each K and not stored again.
        """
        self._layers = layers
        self._index = index
        shapes = [(len(index), *part[0].shape[1:]) for part in layers if part is not None]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        parts = torch.split(scratch.take(sum(sizes)), sizes)
        self._k, *rest = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        self._v = rest[0] if rest else None
        self.keys = self._k.view(dtype).flatten(0, 1)
        values = self._k if self._v is None else self._v
        self.values = values.view(dtype).flatten(0, 1)[..., :value_dim]

    def fill(self, layer: int) -> None:
        """Gather the pages of ``layer``. Cost: the bytes, at the speed of scattered reads."""
        keys, values = self._layers
        torch.index_select(keys[layer], 0, self._index, out=self._k)
        if values is not None:
            assert self._v is not None
            torch.index_select(values[layer], 0, self._index, out=self._v)
