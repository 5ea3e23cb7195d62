"""The blocks that `KVStore.remove` deletes: those of a prompt, its tails, and known followers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvkeep.core.tokens import TokenArray
    from kvkeep.store.kv.names import Names

__all__ = ["Followers", "ids_of"]

_MOST_LINKS = 1 << 15


def ids_of(names: Names, row: TokenArray, start: int = 0) -> list[bytes]:
    """Return the ids of all blocks of ``row`` that have a token from ``start`` on.

    These are its full blocks and every tail, also those that shorter prompts put within a full
    block. Cost: about 1 µs a token.
    """
    size = names.block_tokens
    full = names.full(row)
    ids: list[bytes] = []
    for number in range(start // size, -(-len(row) // size)):
        begin = number * size
        before = full[max(0, number - 1) : number]
        tails = names.tails(before, row[begin : begin + size], start=begin)
        ids += tails[max(0, start - begin) :]  # the tail of a whole block is that block
    return ids


class Followers:
    """Remembers which blocks follow which, so that they can be deleted with them.

    Ids are hashes and do not tell it. The last ``most`` links of prompts that this store put or
    read are kept.

    Thread safety: all methods. Cost: about 0.1 µs a block, and up to 500 bytes a link.
    """

    def __init__(self, most: int = _MOST_LINKS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._next: OrderedDict[bytes, set[bytes]] = OrderedDict()
        self._links = 0

    def note(self, blocks: Sequence[bytes]) -> None:
        """Note that a prompt consists of ``blocks``, in this order."""
        known = self._next
        new = [
            (before, block)
            for before, block in pairwise(blocks)
            if block not in known.get(before, ())
        ]
        if not new:
            return
        with self._lock:
            for before, block in new:
                behind = known.setdefault(before, set())
                self._links += block not in behind
                behind.add(block)
            while self._links > self._most:
                self._links -= len(known.popitem(last=False)[1])

    def take(self, blocks: Iterable[bytes]) -> list[bytes]:
        """Return all blocks known to follow ``blocks``, directly or not, and forget these links."""
        found: dict[bytes, None] = {}
        ahead = list(blocks)
        with self._lock:
            while ahead:
                behind = self._next.pop(ahead.pop(), None)
                if behind is None:
                    continue
                self._links -= len(behind)
                ahead += behind
                found.update(dict.fromkeys(behind))
        return list(found)
