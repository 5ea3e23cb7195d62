"""Terms for planning the attention calls of a batch: sizes of calls, and places of pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvkeep.core.pages.prepared import Scratch
    from kvkeep.core.pages.tensors import PagedTensors

    IntArray = npt.NDArray[np.int32]

__all__ = ["ALIGNED", "CPU", "GPU", "Grain", "PlacedPiece", "PlanContext", "aligned"]

# The elements between rows of a mask, and before it, are multiples of this. Fused kernels read 16
# bytes at once: torch copies a mask with other rows at every layer, and one that begins elsewhere
# is a misaligned address.
ALIGNED: Final = 16


def aligned(count: int) -> int:
    """Return the first multiple of `ALIGNED` that is not below ``count``."""
    return -(-count // ALIGNED) * ALIGNED


@dataclass(frozen=True, slots=True)
class Grain:
    """The size of attention calls on a kind of device.

    ``query_rows`` tokens of a long piece attend in one call: masks stay small, and few keys beyond
    the causal edge are multiplied. ``call_bytes`` is the cost of one more call, in bytes that could
    be gathered meanwhile: short pieces of different lengths are padded up to it. ``group_bytes``
    bounds the K and V that are gathered for several pieces at once.
    """

    query_rows: int
    call_bytes: int
    group_bytes: int


# Gathered K and V should still be in a core's own cache when they are multiplied.
CPU: Final = Grain(query_rows=128, call_bytes=384 << 10, group_bytes=2 << 20)
# A kernel launch takes some 5 µs, in which a GPU reads 10 MiB; one call is about ten kernels.
GPU: Final = Grain(query_rows=1024, call_bytes=64 << 20, group_bytes=1 << 30)


@dataclass(frozen=True, slots=True, eq=False)
class PlanContext:
    """The terms that all pieces share under one window: memory, grain, and the model's heads.

    ``window`` counts the keys a token sees, itself included; None: all before it. ``group`` query
    heads share one KV head.
    """

    tensors: PagedTensors
    scratch: Scratch
    grain: Grain
    window: int | None
    group: int

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.tensors.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V of one page in one layer."""
        return self.tensors.page_bytes // self.tensors.geometry.layers

    def mask(self, seen: torch.Tensor) -> torch.Tensor:
        """Return the mask to add to scores: 0 where ``seen``, else minus infinity.

        Its rows are `ALIGNED`. Boolean masks would be converted to this at every layer.
        """
        hidden = ~seen.to(self.tensors.device)
        *rows, keys = hidden.shape
        mask = torch.zeros(*rows, aligned(keys), dtype=self.tensors.dtype, device=hidden.device)
        return mask[..., :keys].masked_fill_(hidden, float("-inf"))


@dataclass(frozen=True, slots=True, eq=False)
class PlacedPiece:
    """Consecutive tokens of a sequence, where they lie in the batch, and the keys that they see.

    ``begin`` is the row of the batch where they begin, ``start`` and ``stop`` are their positions
    in the sequence. ``pages`` is the page table of the layers that attend. Keys before the position
    ``first`` are not seen, and pages before it are not read: they are outside of the window or
    chunk, or a cascade attends to them.
    """

    begin: int
    start: int
    stop: int
    pages: IntArray
    first: int = 0

    @property
    def tokens(self) -> int:
        """The number of queries."""
        return self.stop - self.start

    def num_pages(self, page_size: int) -> int:
        """Return the number of pages with keys to attend to."""
        return -(-self.stop // page_size) - self.first // page_size

    def seen_pages(self, page_size: int) -> IntArray:
        """Return the pages with keys to attend to."""
        return self.pages[self.first // page_size : -(-self.stop // page_size)]
