"""FlashAttention kernels that follow page tables, so that nothing is gathered.

Used if tensors lie on CUDA in half precision and such a kernel is installed:

- FlashAttention 3 (Hopper GPUs; module ``flash_attn_interface``) takes pages of any size.
- FlashAttention 2 (Ampere and later; package ``flash_attn``) takes pages of a multiple of 256
  tokens.

Both read K and V through strides, so a view of one layer of our pages, which lie a whole page
apart, is enough. FlexAttention is not used: it takes slots as one dimension with one stride, but
all other layers lie between two pages of one layer. Its slots would be those of all layers, with a
block mask for each layer and step, compiled anew for new shapes. Without a kernel, pages are
gathered and attended to with torch's own attention, as on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from kvkeep.core.pages import page_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from kvkeep.core.pages.tensors import PagedTensors
    from kvkeep.serve.engine.attention.dense import Scoring
    from kvkeep.serve.engine.attention.plan import PlacedPiece

__all__ = ["Kernel", "Tables", "find", "flash2", "flash3"]

_HALF = (torch.float16, torch.bfloat16)
_MOST_DIM = 256  # the largest head dimension that both take


class Kernel(Protocol):
    """A function that attends over pages, from and to [T, heads, dim]."""

    def __call__(
        self,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tables: Tables,
        *,
        window: int | None,
        scoring: Scoring,
    ) -> torch.Tensor:
        """``k`` and ``v`` are one layer's [pages, page_size, heads, dim]."""


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """The pieces of a batch in the form that kernels take; tensors are int32, on the device."""

    pages: torch.Tensor  # [n, most pages]; padded with page 0, which is not read
    lengths: torch.Tensor  # [n]: number of keys
    key_bounds: torch.Tensor  # [n + 1]: sums of the lengths before each piece
    query_bounds: torch.Tensor  # [n + 1]: where each piece's queries begin in the batch
    most_keys: int
    most_queries: int

    @classmethod
    def of(cls, pieces: Sequence[PlacedPiece], page_size: int, device: torch.device) -> Tables:
        """Make the tables of ``pieces``, which are in the order of their rows."""

        def tensor(values: npt.ArrayLike) -> torch.Tensor:
            return torch.from_numpy(np.asarray(values, np.int32)).to(device)

        keys = [one.stop for one in pieces]
        queries = [one.tokens for one in pieces]
        return cls(
            pages=tensor(page_tables([_all_valid(one, page_size) for one in pieces]).pages),
            lengths=tensor(keys),
            key_bounds=tensor(np.cumsum([0, *keys])),
            query_bounds=tensor(np.cumsum([0, *queries])),
            most_keys=max(keys),
            most_queries=max(queries),
        )


def _all_valid(one: PlacedPiece, page_size: int) -> npt.NDArray[np.int32]:
    """Return the pages of a piece, those that no query sees replaced by one that it sees.

    They may have been freed, and a kernel reads some keys before a window, to mask them.
    """
    first = one.first // page_size
    if not first:
        return one.pages
    pages = one.pages.copy()
    pages[:first] = pages[first]
    return pages


def find(tensors: PagedTensors) -> Kernel | None:
    """Return the kernel to attend over ``tensors`` with; None if there is none for them."""
    geometry, device = tensors.geometry, tensors.device
    fits = geometry.head_dim == geometry.value_dim <= _MOST_DIM and geometry.head_dim % 8 == 0
    if device.type != "cuda" or tensors.dtype not in _HALF or not fits:
        return None
    major, _ = torch.cuda.get_device_capability(device)
    if major == 9 and find_spec("flash_attn_interface") is not None:
        return flash3(import_module("flash_attn_interface").flash_attn_with_kvcache)
    if major >= 8 and tensors.page_size % 256 == 0 and find_spec("flash_attn") is not None:
        return flash2(import_module("flash_attn").flash_attn_varlen_func)
    return None


def flash2(function: Callable[..., Any]) -> Kernel:
    """Wrap FlashAttention 2's ``flash_attn_varlen_func``."""
    return _kernel(
        function,
        lambda tables: {
            "cu_seqlens_k": tables.key_bounds,
            "max_seqlen_k": tables.most_keys,
            "block_table": tables.pages,
        },
    )


def flash3(function: Callable[..., Any]) -> Kernel:
    """Wrap FlashAttention 3's ``flash_attn_with_kvcache``, with queries of several lengths."""
    return _kernel(
        function,
        lambda tables: {"cache_seqlens": tables.lengths, "page_table": tables.pages},
    )


def _kernel(function: Callable[..., Any], key_tables: Callable[[Tables], dict[str, Any]]) -> Kernel:
    def kernel(
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tables: Tables,
        *,
        window: int | None,
        scoring: Scoring,
    ) -> torch.Tensor:
        out: torch.Tensor = function(
            query,
            k,
            v,
            cu_seqlens_q=tables.query_bounds,
            max_seqlen_q=tables.most_queries,
            softmax_scale=scoring.scale,
            causal=True,
            # Their windows count the keys before a query, ours the query too.
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=0.0 if scoring.softcap is None else scoring.softcap,
            **key_tables(tables),
        )
        return out

    return kernel
