"""`RadixIndex`: a tree over tokens; reuse is exact to the token."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.prefix.tree import Encoder, Tree
from kvkeep.core.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.keys import Namespace
    from kvkeep.core.prefix.policy import EvictionPolicy
    from kvkeep.core.tokens import TokenArray

__all__ = ["RadixIndex"]

_SHORT = 1 << 16  # bytes: steps along a copy are faster, and a copy takes less than that saves


class RadixIndex(Tree):
    """Compares tokens: runs of full pages, and then the first tokens of one page more.

    Memory: 4 bytes a token, 4 a page, and about 600 bytes a run. Up to twice the bytes of
    tokens and pages again for paths that are kept joined (`kvkeep.core.prefix.trails`).
    """

    name = "radix"

    def __init__(
        self,
        page_size: int,
        policy: EvictionPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(page_size, policy, unit=page_size * TOKEN_BYTES, exact=True, clock=clock)
        self._encoder = _TokenEncoder(page_size)

    def encoder(self, namespace: Namespace) -> Encoder:
        """Return the same encoder for all sequences: token bytes depend on nothing else."""
        return self._encoder


class _TokenEncoder(Encoder):
    """Returns the tokens as bytes; has no state."""

    __slots__ = ("_page_size",)

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def lookup(self, tokens: TokenArray) -> bytes | memoryview:
        if tokens.nbytes <= _SHORT or not tokens.flags.c_contiguous:
            return tokens.tobytes()
        return tokens.view(np.uint8).data

    def pages(self, tokens: TokenArray, start: int, stop: int) -> bytes:
        return tokens[start * self._page_size : stop * self._page_size].tobytes()
