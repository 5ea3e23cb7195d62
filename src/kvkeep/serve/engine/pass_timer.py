"""`PassTimer`: tells a cost model how long forward passes over prompts take."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from kvkeep.core.cost import LearnedPrefill

__all__ = ["PassTimer"]

_MOST_PENDING: Final = 64


class PassTimer:
    """Times passes, on a GPU to when their results are there; nothing waits for that.

    `begin`, the pass, and `end` are in one thread. Thread safety: none.
    """

    def __init__(self, prefill: LearnedPrefill, device: torch.device) -> None:
        self._prefill = prefill
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._began: Any = None
        self._pending: deque[tuple[list[tuple[int, int]], Any, Any]] = deque()

    def begin(self) -> None:
        """Note that a pass begins."""
        self._began = self._mark() if self._on_gpu else perf_counter()

    def end(self, pieces: list[tuple[int, int]]) -> None:
        """Note that the pass over ``pieces``, (start, stop) of each, was handed to the device."""
        if not self._on_gpu:
            self._prefill.observe(pieces, perf_counter() - self._began)
            return
        self._pending.append((pieces, self._began, self._mark()))
        if len(self._pending) > _MOST_PENDING:
            self._pending.popleft()
        self._learn()

    def _learn(self) -> None:
        """Tell the times of passes whose results are there."""
        while self._pending and self._pending[0][2].query():
            pieces, began, ended = self._pending.popleft()
            self._prefill.observe(pieces, began.elapsed_time(ended) / 1e3)

    def _mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        # Without a stream it would be one of the thread's current device, which may be another.
        event.record(torch.cuda.current_stream(self._device))
        return event
