"""One host pool in the store: from SGLang's hashes and indices to records, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvkeep.integrations.sglang.naming import page_keys
from kvkeep.integrations.sglang.pages import bytes_of, first_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvkeep.integrations.records import Bytes
    from kvkeep.integrations.sglang.pages import HostPages
    from kvkeep.integrations.sglang.transport import Transport

__all__ = ["StoredPool"]


class StoredPool:
    """The pages of one pool as records in a store.

    Thread safety: all methods.

    Args:
        transport: what moves the records.
        pages: the pool's pages.
        digests: a digest for each record of a page, which separates its keys from all others.
        writes: whether this rank writes; False if another rank writes the same records.
    """

    def __init__(
        self, transport: Transport, pages: HostPages, digests: Sequence[bytes], *, writes: bool
    ) -> None:
        assert len(digests) == pages.records, (len(digests), pages.records)
        self.pages = pages
        self._transport = transport
        self._digests = digests
        self._writes = writes

    def keys(self, hashes: list[str]) -> list[bytes]:
        """Return the keys of the records of these pages, page after page."""
        return page_keys(self._digests, hashes)

    def lookup(self, hashes: list[str], until: float | None = None) -> int:
        """Return how many leading pages are stored; shared tiers are queried until ``until``."""
        return self._transport.lookup(self.keys(hashes), until, self.pages.records)

    def load(self, hashes: list[str], host_indices: torch.Tensor | None) -> list[bool]:
        """Load pages into the pool; return which of them were loaded.

        Raises:
            ValueError: there are not as many indices as these pages have tokens.
        """
        pages, records = self.pages, self.pages.records
        starts = first_tokens(host_indices, len(hashes), pages)

        def sink(at: int, raw: memoryview) -> None:
            pages.load(starts[at // records], raw, at % records)

        return self._transport.load(self.keys(hashes), pages.size, sink, records)

    def save(self, hashes: list[str], host_indices: torch.Tensor | None) -> list[bool]:
        """Store pages of the pool; return which of them are stored. Raises as `load` does."""
        pages, records = self.pages, self.pages.records
        starts = first_tokens(host_indices, len(hashes), pages)
        if not self._writes:
            return [True] * len(hashes)

        def fill(at: int, raw: memoryview) -> None:
            pages.save(starts[at // records], raw, at % records)

        return self._transport.save(self.keys(hashes), pages.size, fill, records)

    def load_into(self, hashes: list[str], targets: Sequence[torch.Tensor | None]) -> list[bool]:
        """Load pages into tensors, one a page; return which of them were loaded.

        Nothing is loaded if a tensor is not as long as a page, or not in memory of the CPU.
        """
        if (arrays := self._memory(hashes, targets)) is None:
            return [False] * len(hashes)
        pages, records = self.pages, self.pages.records

        def sink(at: int, raw: memoryview) -> None:
            part = pages.part(arrays[at // records], at % records)
            np.copyto(part, np.frombuffer(raw, np.uint8).reshape(part.shape))

        return self._transport.load(self.keys(hashes), pages.size, sink, records)

    def save_from(self, hashes: list[str], values: Sequence[torch.Tensor | None]) -> list[bool]:
        """Store tensors as pages; return which of them are stored. None is, as in `load_into`."""
        given = [None if value is None else value.contiguous() for value in values]
        if (arrays := self._memory(hashes, given)) is None:
            return [False] * len(hashes)
        if not self._writes:
            return [True] * len(hashes)
        pages, records = self.pages, self.pages.records

        def fill(at: int, raw: memoryview) -> None:
            part = pages.part(arrays[at // records], at % records)
            np.copyto(np.frombuffer(raw, np.uint8).reshape(part.shape), part)

        return self._transport.save(self.keys(hashes), pages.size, fill, records)

    def _memory(
        self, hashes: list[str], tensors: Sequence[torch.Tensor | None]
    ) -> list[Bytes] | None:
        """Return the memory of pages; None if it is not what these pages need."""
        size = self.pages.size * self.pages.records
        arrays = [
            bytes_of(tensor)
            for tensor in tensors
            if tensor is not None and tensor.is_contiguous() and tensor.device.type == "cpu"
        ]
        fits = len(arrays) == len(tensors) == len(hashes)
        return arrays if fits and all(array.size == size for array in arrays) else None
