"""`PageSlots`: numbers for pages whose slots an engine allocates, for an index over its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from kvkeep.core.pages.tables import PageArray

__all__ = ["PageSlots"]

_LEAST_ROOM = 1024


class PageSlots:
    """Page numbers for an index, and the engine's slots behind them, which stay on its device.

    The slots of a page are consecutive and begin at a multiple of ``page_size``. The index works on
    numbers of its own, and a tensor on the device maps each to the page's first slot, so no call
    waits for the device.

    Args:
        page_size: tokens of a page.
        device: device of the slots.
        dtype: their dtype.
        room: pages to have room for; more is made when it is needed.

    Thread safety: none. Cost: of `take` and `of` one operation on the device for all pages.
    """

    def __init__(
        self, page_size: int, device: torch.device, dtype: torch.dtype, room: int = 0
    ) -> None:
        self.page_size = page_size
        self.device = device
        self._starts = torch.empty(0, dtype=dtype, device=device)
        self._offsets = torch.arange(page_size, dtype=dtype, device=device)
        self._unused: PageArray = np.empty(0, np.int32)  # a stack of `_num_unused`
        self._num_unused = 0
        if room:
            self._grow(room)

    def take(self, slots: torch.Tensor) -> PageArray:
        """Return new numbers for the pages with these slots [pages * page_size], in order.

        There is no limit on numbers. ``slots`` are copied.
        """
        starts = slots[:: self.page_size]
        if len(starts) > self._num_unused:
            self._grow(len(starts))
        top = self._num_unused
        self._num_unused = top - len(starts)
        numbers = self._unused[self._num_unused : top].copy()
        # scatter_ and index_select are three times as fast here as indexing with brackets.
        self._starts.scatter_(0, self._where(numbers), starts.to(self._starts.dtype))
        return numbers

    def give_back(self, numbers: PageArray) -> None:
        """Make numbers unused."""
        top = self._num_unused + len(numbers)
        self._unused[self._num_unused : top] = numbers
        self._num_unused = top

    def _grow(self, count: int) -> None:
        have = len(self._starts)
        more = max(have, count, _LEAST_ROOM)
        self._starts = torch.cat((self._starts, self._starts.new_empty(more)))
        unused = np.empty(have + more, np.int32)
        top = self._num_unused
        unused[:top] = self._unused[:top]
        unused[top : top + more] = np.arange(have, have + more)
        self._unused, self._num_unused = unused, top + more

    def of(self, numbers: PageArray) -> torch.Tensor:
        """Return the slots of these pages [pages * page_size], in order, on the device."""
        starts = self._starts.index_select(0, self._where(numbers))
        return starts if self.page_size == 1 else (starts[:, None] + self._offsets).flatten()

    def check(self, stored: PageArray) -> None:
        """Assert that each number is either unused or among ``stored``, once."""
        numbers = np.sort(np.concatenate((stored, self._unused[: self._num_unused])))
        assert np.array_equal(numbers, np.arange(len(self._starts))), "a page is lost, or twice"

    def _where(self, numbers: PageArray) -> torch.Tensor:
        """Return ``numbers`` as an index tensor on the device."""
        return torch.from_numpy(numbers.astype(np.int64)).to(self.device, non_blocking=True)
