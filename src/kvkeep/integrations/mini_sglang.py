"""`PrefixCache`: kvkeep's radix index as the prefix cache of mini-sglang.

mini-sglang finds its prefix caches by name, in a registry: docs/sglang.md has the lines that put
this one there. Nothing of mini-sglang is imported here: what is taken and given has the names and
the order of what its own caches take and give.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvkeep.core.errors import IllegalStep, InvalidValue, whole
from kvkeep.core.eviction import POLICIES
from kvkeep.core.eviction import policy as named_policy
from kvkeep.core.keys import Namespace
from kvkeep.core.prefix import RadixIndex
from kvkeep.core.tokens import TOKEN_BYTES, as_tokens

if TYPE_CHECKING:
    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.core.pages.table import PageArray
    from kvkeep.core.prefix import PrefixMatch
    from kvkeep.core.prefix.node import Node

__all__ = ["Handle", "InsertResult", "MatchResult", "PrefixCache", "SizeInfo"]

_ALL = Namespace()
_LEAST_ROOM = 1024


class Handle:
    """The beginning of a prompt, as it was found or stored.

    Attributes:
        cached_len: its tokens.
    """

    __slots__ = ("_cache", "_found", "_hold", "_locks", "_pages", "_symbols", "cached_len")

    def __init__(
        self, cache: PrefixCache, symbols: bytes, pages: PageArray, *, found: bool
    ) -> None:
        self.cached_len = len(symbols) // TOKEN_BYTES
        self._cache = cache
        self._symbols = symbols
        self._pages = pages
        self._found = found
        self._hold: Node | None = None
        self._locks = 0

    def get_matched_indices(self) -> torch.Tensor:
        """Its slots, int32 [cached_len], on the cache's device. They stay its own while locked."""
        return self._cache.slots_of(self._pages)

    def __repr__(self) -> str:
        return f"<Handle of {self.cached_len} tokens, {self._locks} locks>"


class MatchResult(NamedTuple):
    """What was found on the device; there is no other place."""

    cuda_handle: Handle
    host_handle: None = None


class InsertResult(NamedTuple):
    """``cached_len`` tokens were there before: their slots are the caller's to free."""

    cached_len: int
    handle: Handle


class SizeInfo(NamedTuple):
    """In tokens: what could be evicted, and what is locked."""

    evictable_size: int
    protected_size: int

    @property
    def total_size(self) -> int:
        """All that is stored."""
        return self.evictable_size + self.protected_size


class PrefixCache:
    """A prefix cache for mini-sglang: whole pages, evicted exactly as many as are asked for.

    A page's slots follow each other and begin at a multiple of ``page_size``. They never leave the
    device: the index knows pages by numbers of its own, and a tensor there has the first slot of
    each, so nothing waits for the device.

    Args:
        device: where the page table lies.
        page_size: tokens of a page.
        policy: what is evicted first (`kvkeep.core.eviction`); one of those that need not be told
            what
            is asked for.

    Thread safety: none, as mini-sglang's own: its scheduler is one thread. Cost: `match_prefix` and
    `lock_handle` one memcmp per run of the tree, `evict` about 1.5 µs a run that goes.

    Raises:
        InvalidValue: there is no such policy, or it needs to be told.
    """

    def __init__(
        self, device: torch.device | str, page_size: int, *, policy: str | EvictionPolicy = "lru"
    ) -> None:
        chosen = named_policy(policy)
        if chosen.remembers:
            others = [name for name in POLICIES if not named_policy(name).remembers]
            raise InvalidValue(
                f"{chosen.name} decides by what was asked for before, which mini-sglang does not "
                f"say; these policies do without: {', '.join(others)}"
            )
        self.device = torch.device(device)
        self.page_size = whole("page_size", page_size, 1)
        self._index = RadixIndex(self.page_size, chosen)
        self._root, _ = self._index.hold(None, _ALL)  # there is always something to match
        self._locked: Counter[Node] = Counter()
        self._free: PageArray = np.empty(0, np.int32)  # numbers without a page
        self._starts = torch.empty(0, dtype=torch.int32, device=self.device)
        self._offsets = torch.arange(self.page_size, dtype=torch.int32, device=self.device)

    def match_prefix(self, input_ids: torch.Tensor) -> MatchResult:
        """The longest stored beginning of ``input_ids`` (int, on the CPU), in whole pages."""
        symbols = self._symbols(input_ids)
        pages = self._match(symbols).pages
        symbols = symbols[: len(pages) * self.page_size * TOKEN_BYTES]
        return MatchResult(Handle(self, symbols, pages, found=True))

    def lock_handle(self, handle: Handle, unlock: bool = False) -> None:
        """Protect what the handle stands for from eviction, or (``unlock``) no longer.

        Raises:
            IllegalStep: it was evicted before it was locked, or is not locked.
        """
        if unlock:
            if handle._hold is None:
                raise IllegalStep(f"{handle} is not locked")
            self._index.release(handle._hold)
            self._locked -= Counter((handle._hold,))
            handle._locks -= 1
            if not handle._locks:
                handle._hold = None
            return
        if handle._hold is None:
            found = self._match(handle._symbols)
            if len(found.pages) * self.page_size < handle.cached_len:
                raise IllegalStep(f"{handle} was evicted since; match again, and lock at once")
            handle._pages = found.pages
            handle._hold, _ = self._index.hold(found, _ALL, used=handle._found)
        else:
            self._index.again(handle._hold)
        handle._locks += 1
        self._locked[handle._hold] += 1

    def insert_prefix(self, input_ids: torch.Tensor, indices: torch.Tensor) -> InsertResult:
        """Store the whole pages of ``input_ids``, which are in the slots ``indices``.

        What was stored before stays where it is. ``indices`` are copied.

        Raises:
            InvalidValue: fewer slots than tokens.
        """
        symbols = self._symbols(input_ids)
        tokens = len(symbols) // TOKEN_BYTES
        if len(indices) < tokens:
            raise InvalidValue(f"{len(indices)} indices for {tokens} tokens; one for each")
        match = self._match(symbols)
        pages = match.pages
        there = len(pages) * self.page_size
        if there < tokens:
            new = self._take((tokens - there) // self.page_size)
            self._starts[self._where(new)] = indices[there : tokens : self.page_size]
            hold, _ = self._index.hold(match, _ALL, used=False)
            stored = self._index.insert(hold, symbols[there * TOKEN_BYTES :], new, 0)
            assert not len(stored.existing), "what is stored was matched"
            self._index.release(stored.hold)
            pages = np.concatenate((pages, new))
        return InsertResult(there, Handle(self, symbols, pages, found=False))

    def evict(self, size: int) -> torch.Tensor:
        """Forget ``size`` tokens, rounded up to whole pages; their slots.

        Raises:
            IllegalStep: more than could be evicted; nothing changed.
        """
        pages = -(-size // self.page_size)
        if pages > self._index.num_evictable:
            raise IllegalStep(f"{size} tokens are to be evicted, of {self.size_info}")
        gone = self._index.evict(pages)
        slots = self.slots_of(gone)
        self._free = np.concatenate((self._free, gone))
        return slots

    def reset(self) -> None:
        """Forget everything; the slots are the caller's.

        Raises:
            IllegalStep: something is locked; nothing changed.
        """
        if locked := self.size_info.protected_size:
            raise IllegalStep(f"{locked} tokens are locked; unlock them first")
        self._free = np.concatenate((self._free, self._index.clear()))

    @property
    def size_info(self) -> SizeInfo:
        """How much is stored."""
        evictable = self._index.num_evictable * self.page_size
        return SizeInfo(evictable, self._index.num_pages * self.page_size - evictable)

    def check_integrity(self) -> None:
        """Recount everything that is stored; an ``AssertionError`` is a fault of kvkeep."""
        stored = self._index.check([self._root, *self._locked.elements()])
        numbers = np.sort(np.concatenate((stored, self._free)))
        assert np.array_equal(numbers, np.arange(len(self._starts))), "a page is lost, or twice"

    def slots_of(self, pages: PageArray) -> torch.Tensor:
        """The slots of ``pages``, in order, int32 on the device."""
        return (self._starts[self._where(pages)][:, None] + self._offsets).flatten()

    def _symbols(self, input_ids: torch.Tensor) -> bytes:
        """The whole pages of a prompt, as the index compares them."""
        tokens = as_tokens(input_ids.numpy())
        return tokens[: len(tokens) // self.page_size * self.page_size].tobytes()

    def _match(self, symbols: bytes) -> PrefixMatch:
        match = self._index.match(symbols, _ALL)
        assert match is not None, "the root is held"
        return match.without_partial()

    def _take(self, count: int) -> PageArray:
        """Numbers for ``count`` pages; how many there are, nobody says, so there may be more."""
        if count > len(self._free):
            have = len(self._starts)
            more = max(have, count, _LEAST_ROOM)
            self._free = np.append(self._free, np.arange(have, have + more, dtype=np.int32))
            self._starts = torch.cat((self._starts, self._starts.new_empty(more)))
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _where(self, pages: PageArray) -> torch.Tensor:
        """``pages`` as torch wants them for an index."""
        return torch.from_numpy(pages.astype(np.int64)).to(self.device, non_blocking=True)
