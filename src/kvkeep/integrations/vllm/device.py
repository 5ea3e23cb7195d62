"""Pages on a GPU: copied within the GPU in vLLM's stream, then to the store.

    pages ─ in vLLM's stream ─▶ a copy on the GPU ─ in our own stream ─▶ the store's memory

The first copy is in vLLM's stream, so vLLM overwrites pages only after it: preemption and reuse
need no fence. Copies take memory of the GPU, so at most `_ASIDE_BYTES` exist at a time; blocks
beyond that are dropped. Loads copy from the store's page-locked memory straight into the
pages.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.integrations.vllm.messages import BlockSpan, Save
    from kvkeep.integrations.vllm.pages import GroupPages

__all__ = ["DeviceCopies"]

_ASIDE_BYTES = 512 << 20
_AT_ONCE = 64  # blocks of one copy


class DeviceCopies:
    """Moves pages of a GPU.

    Thread safety: vLLM's thread calls `mark` and `save`; loader threads call what `sinker` returns.
    """

    def __init__(
        self,
        pages: Sequence[GroupPages],
        write: Callable[[BlockSpan, Callable[[int, memoryview], None], Save], None],
        drop: Callable[[BlockSpan], None],
    ) -> None:
        self._pages = pages
        self._write = write
        self._drop = drop
        self._device = pages[0].device
        self._saver = ThreadPoolExecutor(1, "kvkeep save")
        self._out = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._aside = 0  # bytes

    def mark(self) -> torch.cuda.Event:
        """Return an event behind all work in vLLM's stream so far; loads wait for it."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def save(self, save: Save) -> None:
        """Copy pages within the GPU and return; later work in the stream may overwrite them."""
        for span in save.spans:
            for start in range(0, len(span.keys), _AT_ONCE):
                end = start + _AT_ONCE
                piece = type(span)(span.group, span.keys[start:end], span.pages[start:end])
                size = self._pages[span.group].record_bytes * len(piece.keys)
                with self._lock:
                    fits = self._aside + size <= _ASIDE_BYTES
                    self._aside += size if fits else 0
                if not fits:
                    self._drop(piece)
                    continue
                rows = torch.tensor(piece.pages, device=self._device)
                copies = [run.index_select(0, rows) for run in self._pages[span.group].tensors]
                self._saver.submit(self._carry, piece, copies, self.mark(), size, save)

    def _carry(
        self,
        span: BlockSpan,
        copies: list[torch.Tensor],
        made: torch.cuda.Event,
        size: int,
        save: Save,
    ) -> None:
        """In a thread: copy from the GPU into the store's memory."""

        def fill(at: int, raw: memoryview) -> None:
            record, start = torch.frombuffer(raw, dtype=torch.uint8), 0
            for copy in copies:
                end = start + copy.shape[1]
                record[start:end].copy_(copy[at], non_blocking=True)
                start = end
            self._out.synchronize()

        try:
            with torch.cuda.stream(self._out):
                self._out.wait_event(made)
                self._write(span, fill, save)
        finally:
            with self._lock:
                self._aside -= size

    def sinker(self, span: BlockSpan, begun: torch.cuda.Event) -> Callable[[int, memoryview], None]:
        """Return ``sink(i, raw)`` for one loader: it copies ``raw`` into page ``span.pages[i]``."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_event(begun)
        runs = self._pages[span.group].tensors

        def sink(at: int, raw: memoryview) -> None:
            record, start = torch.frombuffer(raw, dtype=torch.uint8), 0
            with torch.cuda.stream(stream):
                for run in runs:
                    end = start + run.shape[1]
                    run[span.pages[at]].copy_(record[start:end], non_blocking=True)
                    start = end
            stream.synchronize()

        return sink

    def drain(self) -> None:
        """Wait until all copies that were begun are in the store."""
        self._saver.submit(lambda: None).result()  # its one thread takes them in order

    def close(self) -> None:
        """Wait until all copies are in the store."""
        self._saver.shutdown(wait=True)
