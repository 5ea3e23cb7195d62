"""`Forms` and `Buffers`: KV in page order and in token order, and host memory for the copies."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from torch import Tensor

    from kvkeep.core.pages.tensors import Layout, PagedTensors

__all__ = ["Buffers", "Forms"]


class Forms:
    """Converts between blocks of pages, as `PagedTensors.read` gives them, and a store's KV.

    A store's KV is [layers, 2, tokens, heads, dim] ("NHD"), [layers, 2, heads, tokens, dim]
    ("HND"), or [layers, tokens, width] of a latent. Bits are moved, never changed. Thread safety:
    all. Raises `InvalidValue` for a geometry whose K and V have different widths.
    """

    def __init__(self, tensors: PagedTensors, layout: Layout) -> None:
        geometry = tensors.geometry
        self._latent = geometry.latent_dim is not None
        if not self._latent and geometry.value_dim != geometry.head_dim:
            raise InvalidValue(
                f"keys have {geometry.head_dim} elements and values {geometry.value_dim}; a store "
                "takes only KV whose keys and values are alike"
            )
        self._at = 1 if self._latent else 2  # dimension of pages, or of tokens
        self._layers = geometry.layers
        self._heads = geometry.rank_heads
        self._width = geometry.head_dim
        self._page_size = tensors.page_size
        self._dtype = tensors.dtype
        self._pages_are_hnd = tensors.layout == "HND"
        self._tokens_are_hnd = layout == "HND" and not self._latent

    def by_token(self, block: Tensor, tokens: int) -> Tensor:
        """Return the first ``tokens`` tokens of ``block`` in new memory.

        ``block`` is uint8 [pages, page_bytes]. Cost: one copy with strides.
        """
        pages = self._by_layer(block)
        whole = torch.empty(pages.shape, dtype=self._dtype)
        whole.copy_(pages)
        kv = whole.flatten(self._at, self._at + 1).narrow(self._at, 0, tokens)
        return (kv.transpose(2, 3) if self._tokens_are_hnd else kv).contiguous()

    def part(self, kv: Tensor, start: int, stop: int) -> Tensor:
        """Return tokens ``start`` … ``stop - 1`` of a store's ``kv``, as a view."""
        at = 3 if self._tokens_are_hnd and kv.dim() == 5 else self._at
        return kv.narrow(at, start, stop - start)

    def by_page(self, kv: Tensor, tokens: int, block: Tensor) -> None:
        """Write the first ``tokens`` tokens of a store's ``kv`` to ``block``, from its first page.

        The rest of the last page is set to zero. Raises `InvalidValue` for another shape or dtype
        than this geometry's.
        """
        if self._tokens_are_hnd and kv.dim() == 5:
            kv = kv.transpose(2, 3)
        pages = self._by_layer(block)
        at = self._at
        given, wanted = list(kv.shape), list(pages.shape)
        alike = given[:at] + given[at + 1 :] == wanted[:at] + wanted[at + 2 :]
        if not alike or given[at] < tokens or kv.dtype != self._dtype:
            raise InvalidValue(
                f"KV is {given}, {kv.dtype}; {tokens} tokens for pages of {wanted}, {self._dtype} "
                "are needed"
            )
        full, rest = divmod(tokens, self._page_size)
        if full:
            many = kv.narrow(at, 0, tokens - rest)
            split = (*given[:at], full, self._page_size, *given[at + 1 :])
            pages.narrow(at, 0, full).copy_(many.view(split))
        if rest:
            last = pages.select(at, full)
            last.narrow(at, 0, rest).copy_(kv.narrow(at, tokens - rest, rest))
            last.narrow(at, rest, self._page_size - rest).zero_()

    def _by_layer(self, block: Tensor) -> Tensor:
        """View as [layers, 2, pages, page_size, heads, dim], or [layers, pages, …] of a latent."""
        shape = [len(block), self._layers]
        elements = block.view(self._dtype)
        if self._latent:
            return elements.view(*shape, self._page_size, self._width).permute(1, 0, 2, 3)
        if self._pages_are_hnd:
            pages = elements.view(*shape, 2, self._heads, self._page_size, self._width)
            return pages.permute(1, 2, 0, 4, 3, 5)
        pages = elements.view(*shape, 2, self._page_size, self._heads, self._width)
        return pages.permute(1, 2, 0, 3, 4, 5)


class Buffers:
    """Up to ``count`` reusable blocks of host memory, each uint8 [pages, page_bytes].

    Allocated at first use and kept, because allocation is slow; ``pinned`` for copies from and to a
    GPU. Thread safety: all methods.
    """

    def __init__(self, count: int, pages: int, page_bytes: int, *, pinned: bool) -> None:
        self._shape = (pages, page_bytes)
        self._pinned = pinned
        self._left = count  # blocks not allocated yet
        self._free: list[Tensor] = []
        self._changed = threading.Condition()

    def take(self, timeout: float = 0.0) -> Tensor | None:
        """Return a free block, waiting ``timeout`` seconds for one; None if none becomes free."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free or self._left, timeout):
                return None
            if self._free:
                return self._free.pop()
            self._left -= 1
        return torch.empty(self._shape, dtype=torch.uint8, pin_memory=self._pinned)

    def give(self, block: Tensor) -> None:
        """Return ``block`` to the free blocks."""
        with self._changed:
            self._free.append(block)
            self._changed.notify()
