"""`History`: the blocks that were requested lately, including evicted ones."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

__all__ = ["History", "leading"]


def leading(keys: Sequence[bytes], known: Container[object]) -> int:
    """Return how many leading ``keys`` are ``known``."""
    for at, key in enumerate(keys):
        if key not in known:
            return at
    return len(keys)


class History:
    """The chain keys of the last ``limit`` blocks that prompts were made of.

    Memory: about 250 bytes a block. Cost: about 0.1 µs a block.
    """

    def __init__(self, limit: int) -> None:
        self._limit = max(1, limit)
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def requested(self, keys: Sequence[bytes]) -> int:
        """Record a prompt of these blocks; return how many leading ones were known before.

        The end of a prompt is forgotten before its beginning.
        """
        seen = self._keys
        known = leading(keys, seen)
        move_to_end = seen.move_to_end
        for key in reversed(keys):
            seen[key] = None
            move_to_end(key)
        while len(seen) > self._limit:
            seen.popitem(last=False)
        return known
