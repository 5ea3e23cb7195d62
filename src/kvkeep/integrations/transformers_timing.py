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

        def before(_module: Any, given: Any, named: dict[str, Any]) -> None:
            # Passes of an answer's single tokens are not waited for.
            begun[:] = [self._now()] if _shape(given, named)[1] > 1 else []

        def after(_module: Any, given: Any, named: dict[str, Any], _result: Any) -> None:
            cache = named.get("past_key_values")
            if not begun or cache is None:
                return
            rows, columns = _shape(given, named)
            stop = int(cache.get_seq_length())  # the pass has added its columns
            self._observe(rows, stop - columns, stop, begun[0])

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


def _shape(given: Any, named: dict[str, Any]) -> tuple[int, int]:
    """Return rows and columns of a pass; none if it is not given tokens."""
    ids = named.get("input_ids", given[0] if given else None)
    return (0, 0) if ids is None else (int(ids.shape[0]), int(ids.shape[1]))
