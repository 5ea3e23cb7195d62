"""Trials: caches of sampled block keys that show how often a policy would hit."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvkeep.core.eviction.base import Entry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.eviction.base import EvictionPolicy

__all__ = ["Asked", "KeyLists", "KeyTrial", "Trial"]


class Asked(NamedTuple):
    """A sampled block of a prompt."""

    key: bytes
    known: bool
    """Whether it was requested before."""
    before: int
    """Blocks before it."""


class Trial(Protocol):
    """A cache of sampled keys under one policy."""

    def requested(self, blocks: Sequence[Asked]) -> int:
        """Request sampled blocks of a prompt, last to first; return how many were held."""


class KeyLists:
    """2Q over keys: a share ``probation`` of ``size`` keys was requested once; None is LRU."""

    def __init__(self, probation: float | None, size: int) -> None:
        self._size = size
        self._plain = probation is None
        self._most = size if probation is None else int(probation * size)
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._again: OrderedDict[bytes, None] = OrderedDict()

    def requested(self, blocks: Sequence[Asked]) -> int:
        """Request sampled blocks of a prompt, last to first; return how many were held."""
        once, again, hits = self._once, self._again, 0
        for key, known, _ in blocks:
            if key in again:
                hits += 1
                again.move_to_end(key)
                continue
            if key in once:
                hits += 1
                del once[key]
                again[key] = None
                continue
            (again if known or self._plain else once)[key] = None
            if len(once) + len(again) > self._size:
                queue = once if len(once) > self._most or not again else again
                queue.popitem(last=False)
        return hits


class _Key(Entry):
    __slots__ = ("key",)

    def __init__(self, key: bytes, known: bool, before: int) -> None:
        super().__init__()
        self.key = key
        self.size = 1
        self.depth = before
        self.hits = int(known)


class KeyTrial:
    """Any policy over ``size`` keys, each an entry of one page; blocks have one page."""

    def __init__(self, policy: EvictionPolicy, size: int) -> None:
        self.policy = policy
        self._size = size
        self._kept: dict[bytes, _Key] = {}

    def requested(self, blocks: Sequence[Asked]) -> int:
        """Request sampled blocks of a prompt, last to first; return how many were held."""
        policy, kept, hits = self.policy, self._kept, 0
        now = policy.moment
        for key, known, before in blocks:
            entry = kept.get(key)
            if entry is not None:
                hits += 1
                policy.discard(entry)
                entry.hits += 1
            else:
                entry = kept[key] = _Key(key, known, before)
            entry.last_used = now
            policy.add(entry)
            if len(kept) > self._size:
                victim = policy.pop()
                assert isinstance(victim, _Key)
                del kept[victim.key]
        return hits
