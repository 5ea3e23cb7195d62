"""The blocks that `KVStore.remove` deletes: those of a prompt, its tails, and known followers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvkeep.store.kv.names import PromptBlocks
    from kvkeep.store.tiers import Removed, TieredStore

__all__ = ["Followers", "delete_from", "delete_ids"]

_MOST_LINKS = 1 << 15


def delete_from(
    tiered: TieredStore,
    prompt: PromptBlocks,
    followers: Followers,
    delete: Callable[[list[bytes]], Removed],
) -> Removed:
    """Delete every block with a token from ``prompt.start`` on, and the blocks known to follow.

    ``delete`` is ``tiered.remove`` or ``tiered.supersede``.
    """
    tiered.check_open()
    return delete_ids(_ids_from(prompt), followers, delete)


def delete_ids(
    ids: list[bytes], followers: Followers, delete: Callable[[list[bytes]], Removed]
) -> Removed:
    """Delete blocks, and the blocks known to follow them."""
    return delete([*ids, *followers.take(ids)])


def _ids_from(prompt: PromptBlocks) -> list[bytes]:
    """Return the ids of all blocks of a prompt that have a token from its ``start`` on.

    These are its full blocks and every tail, also those that shorter prompts put within a full
    block. Cost: about 1 µs a token.
    """
    row, start, names = prompt
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
    """Remembers which blocks follow which, so that a removal can delete them too.

    Block ids are hashes, from which the order cannot be read. The latest ``most`` links of prompts
    that this store put or read are kept.

    Thread safety: all methods. Cost: about 0.1 µs a block, and up to 500 bytes a link.
    """

    def __init__(self, most: int = _MOST_LINKS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._next: OrderedDict[bytes, set[bytes]] = OrderedDict()
        self._links = 0

    def note(self, blocks: Sequence[bytes]) -> None:
        """Record that a prompt consists of ``blocks``, in this order."""
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
