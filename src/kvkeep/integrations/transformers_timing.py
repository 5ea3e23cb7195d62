"""`PassClock`: tells a store's cost model what the forward passes of a Transformers model take."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from kvkeep.core.cost import LearnedPrefill

__all__ = ["PassClock"]


class PassClock:
    """Times the passes of ``model`` over more than one token a row, and tells ``prefill``.

    On a GPU it waits for the end of each pass, which is when its KV is used.

    Thread safety: none, as the model.
    """

    def __init__(self, model: PreTrainedModel, prefill: LearnedPrefill) -> None:
        self._model = model
        self._prefill = prefill

    @contextmanager
    def timing(self, rows: int, start: int, stop: int) -> Iterator[None]:
        """Time a pass over columns ``start`` … ``stop - 1`` of ``rows`` rows."""
        began = self._now()
        yield
        self._observe(rows, start, stop, began)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Time the passes that ``generate`` makes, until the end of the ``with`` block."""
        begun: list[float] = []

        def before(_module: Any, _given: Any, _named: Any) -> None:
            begun[:] = [self._now()]

        def after(_module: Any, given: Any, named: dict[str, Any], _result: Any) -> None:
            ids = named.get("input_ids", given[0] if given else None)
            cache = named.get("past_key_values")
            if ids is None or cache is None or ids.shape[1] < 2 or not begun:
                return
            stop = int(cache.get_seq_length())  # the pass has added its columns
            self._observe(len(ids), stop - ids.shape[1], stop, begun[0])

        hooks = [
            self._model.register_forward_pre_hook(before, with_kwargs=True),
            self._model.register_forward_hook(after, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _observe(self, rows: int, start: int, stop: int, began: float) -> None:
        if stop - start > 1 and start >= 0:
            self._prefill.observe([(start, stop)] * rows, self._now() - began)

    def _now(self) -> float:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return time.perf_counter()
