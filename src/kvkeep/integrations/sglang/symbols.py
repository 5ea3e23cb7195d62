"""`SlotIndex`: kvkeep's tree over the keys that SGLang matches by."""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import numpy as np

from kvkeep.core.errors import IllegalStep
from kvkeep.core.keys import Namespace
from kvkeep.core.prefix import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.core.prefix.base import Encoder

__all__ = ["SlotIndex", "namespace_of"]

_WIDTH = 8  # bytes of a token: SGLang's are int64, and those of images exceed int32


@lru_cache(maxsize=1024)
def namespace_of(extra_key: str | None, cache_salt: str | None) -> Namespace:
    """Return the namespace of a request: its adapter and its ``extra_key``, and its salt."""
    return Namespace(tenant=cache_salt or "", lora=extra_key or "")


class SlotIndex(PrefixIndex):
    """Compares whole pages of int64 tokens.

    For EAGLE, SGLang matches pairs of neighbouring tokens (``bigrams``): a page of pairs is named
    by its tokens and the one behind them.

    Memory: 8 bytes a token, 4 a page, and about 600 bytes a run. Up to twice the bytes of
    tokens and pages again for paths that are kept joined (`kvkeep.core.prefix.tree`).
    """

    name = "radix"
    exact = False

    def __init__(self, page_size: int, policy: EvictionPolicy, *, bigrams: bool = False) -> None:
        self.overlap = int(bigrams)
        """Tokens behind a page that are part of its name."""
        super().__init__(page_size, policy, unit=(page_size + self.overlap) * _WIDTH)

    def encoder(self, namespace: Namespace) -> Encoder:
        """Raise `IllegalStep`: the tokens of SGLang's requests are encoded by `symbols`."""
        raise IllegalStep(f"{namespace}: this index has no encoder; use symbols()")

    def pages_of(self, tokens: int) -> int:
        """Return the whole pages of a key of so many tokens."""
        return max(0, tokens - self.overlap) // self.page_size

    def symbols(self, tokens: Sequence[int], start: int, stop: int) -> bytes:
        """Return what the index compares for the pages ``start`` … ``stop``.

        Cost: one copy for an ``array`` of int64. ``tokens`` may change afterwards.
        """
        size = self.page_size
        row = _row_of(tokens)[start * size : stop * size + self.overlap]
        if not self.overlap:
            return row.tobytes()
        if stop <= start:
            return b""
        windows = np.lib.stride_tricks.sliding_window_view(row, size + 1)
        return windows[::size].tobytes()

    def lookup(self, tokens: Sequence[int], pages: int) -> bytes | memoryview:
        """Return the symbols of the first pages, to match at once: maybe in the tokens' memory."""
        if self.overlap:
            return self.symbols(tokens, 0, pages)
        return _row_of(tokens)[: pages * self.page_size].view(np.uint8).data


def _row_of(tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return SGLang's tokens as an array; a view of an ``array`` of int64."""
    if isinstance(tokens, array) and tokens.typecode == "q":
        return np.frombuffer(cast("bytes", tokens), np.int64)
    return np.asarray(tokens, np.int64)
