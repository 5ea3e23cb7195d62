"""kvkeep's radix index as a prefix cache of mini-sglang: a class behind its interface.

mini-sglang (github.com/sgl-project/mini-sglang, as of its commit 02b130b) takes it from a file with
these lines, started with ``python FILE --model-path MODEL --cache-type kvkeep``:

    from minisgl.core import get_global_ctx
    from minisgl.kvcache import SUPPORTED_CACHE_MANAGER
    from minisgl.server.launch import launch_server

    from mini_sglang import PrefixCache

    @SUPPORTED_CACHE_MANAGER.register("kvkeep")  # outside of the condition: its processes import it
    def kvkeep_cache(device):
        return PrefixCache(device, get_global_ctx().page_size)

    if __name__ == "__main__":
        launch_server()

It was not run inside mini-sglang, which needs a GPU; a test drives it as its scheduler does.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvkeep.core.errors import IllegalStep, InvalidValue, whole
from kvkeep.core.eviction import policy
from kvkeep.core.keys import Namespace
from kvkeep.core.prefix import Tree
from kvkeep.core.tokens import TOKEN_BYTES, as_tokens
from kvkeep.integrations.sglang.slot_tree import PageSlots

if TYPE_CHECKING:
    from kvkeep.core.pages.pool import PageArray
    from kvkeep.core.prefix import PrefixMatch
    from kvkeep.core.prefix.node import Node

_ONE = Namespace()  # mini-sglang has one model and no tenants


class Handle:
    """A stored prefix of a prompt, as `PrefixCache` found or inserted it.

    Attributes:
        cached_len: length of the prefix in tokens.
        symbols: its tokens, as the index compares them.
        pages: its page numbers in the index.
        found: whether `PrefixCache.match_prefix` made the handle; locking it counts as a use.
        hold: protection of the prefix from eviction while ``locks`` is not zero.
    """

    __slots__ = ("_cache", "cached_len", "found", "hold", "locks", "pages", "symbols")

    def __init__(
        self, cache: PrefixCache, symbols: bytes, pages: PageArray, *, found: bool
    ) -> None:
        self._cache = cache
        self.cached_len = len(symbols) // TOKEN_BYTES
        self.symbols = symbols
        self.pages = pages
        self.found = found
        self.hold: Node | None = None
        self.locks = 0

    def get_matched_indices(self) -> torch.Tensor:
        """Return the slots of the prefix, int32 [cached_len], on the cache's device.

        They are valid only while the handle is locked.
        """
        return self._cache.slots.of(self.pages)

    def __repr__(self) -> str:
        return f"<Handle of {self.cached_len} tokens, {self.locks} locks>"


class MatchResult(NamedTuple):
    """Result of `PrefixCache.match_prefix`; nothing is kept on the host."""

    cuda_handle: Handle
    host_handle: None = None


class InsertResult(NamedTuple):
    """Result of `PrefixCache.insert_prefix`.

    The first ``cached_len`` tokens were stored before; the caller frees the slots it gave for them.
    """

    cached_len: int
    handle: Handle


class SizeInfo(NamedTuple):
    """Stored tokens that can be evicted, and stored tokens that are locked."""

    evictable_size: int
    protected_size: int

    @property
    def total_size(self) -> int:
        """All stored tokens."""
        return self.evictable_size + self.protected_size


class PrefixCache:
    """A prefix cache for mini-sglang: whole pages, and eviction of exactly the requested number.

    The slots of a page are consecutive and begin at a multiple of ``page_size``. They stay on the
    device, so no call waits for it (`PageSlots`).

    Args:
        device: device of the page table.
        page_size: tokens of a page.

    Thread safety: none, like mini-sglang's own; its scheduler is one thread. Cost: `match_prefix`
    and `lock_handle` one memcmp per run or trail of runs, `evict` about 1.5 µs an evicted run.
    """

    def __init__(self, device: torch.device | str, page_size: int) -> None:
        self.device = torch.device(device)
        self.page_size = whole("page_size", page_size, 1)
        self._index = Tree(self.page_size, policy("lru"))
        self._root, _ = self._index.hold(None, _ONE)  # so that every prompt matches something
        self._locked: Counter[Node] = Counter()
        self.slots = PageSlots(self.page_size, self.device, torch.int32)

    def match_prefix(self, input_ids: torch.Tensor) -> MatchResult:
        """Return the longest stored prefix of ``input_ids`` (int, on the CPU), in whole pages."""
        symbols = self._symbols(input_ids)
        pages = self._match(symbols).pages
        symbols = symbols[: len(pages) * self.page_size * TOKEN_BYTES]
        return MatchResult(Handle(self, symbols, pages, found=True))

    def lock_handle(self, handle: Handle, unlock: bool = False) -> None:
        """Protect the prefix of ``handle`` from eviction, or end that with ``unlock``.

        Locks are counted.

        Raises:
            IllegalStep: the prefix was evicted before this first lock; or it is not locked.
        """
        if unlock:
            if handle.hold is None:
                raise IllegalStep(f"{handle} is not locked")
            self._index.release(handle.hold)
            self._locked -= Counter((handle.hold,))
            handle.locks -= 1
            if not handle.locks:
                handle.hold = None
            return
        if handle.hold is None:
            found = self._match(handle.symbols)
            if len(found.pages) * self.page_size < handle.cached_len:
                raise IllegalStep(f"{handle} was evicted since; match again, and lock at once")
            handle.pages = found.pages
            handle.hold, _ = self._index.hold(found, _ONE, used=handle.found)
        else:
            self._index.retain(handle.hold)
        handle.locks += 1
        self._locked[handle.hold] += 1

    def insert_prefix(self, input_ids: torch.Tensor, indices: torch.Tensor) -> InsertResult:
        """Store the whole pages of ``input_ids``, whose KV is in the slots ``indices``.

        A prefix that is stored already keeps its old slots. ``indices`` are copied.

        Raises:
            InvalidValue: fewer slots than tokens.
        """
        symbols = self._symbols(input_ids)
        tokens = len(symbols) // TOKEN_BYTES
        if len(indices) < tokens:
            raise InvalidValue(f"{len(indices)} indices for {tokens} tokens; each token needs one")
        match = self._match(symbols)
        pages = match.pages
        there = len(pages) * self.page_size
        if there < tokens:
            new = self.slots.take(indices[there:tokens])
            hold, _ = self._index.hold(match, _ONE, used=False)
            stored = self._index.insert(hold, symbols[there * TOKEN_BYTES :], new, 0)
            assert not len(stored.existing), "what is stored was matched"
            self._index.release(stored.hold)
            pages = np.concatenate((pages, new))
        return InsertResult(there, Handle(self, symbols, pages, found=False))

    def evict(self, size: int) -> torch.Tensor:
        """Evict ``size`` tokens, rounded up to whole pages, and return their slots.

        Raises:
            IllegalStep: fewer tokens can be evicted; nothing changed.
        """
        pages = -(-size // self.page_size)
        if pages > self._index.num_evictable:
            raise IllegalStep(f"cannot evict {size} tokens of {self.size_info}")
        gone = self._index.evict(pages)
        slots = self.slots.of(gone)
        self.slots.give_back(gone)
        return slots

    def reset(self) -> None:
        """Remove everything; all slots belong to the caller again.

        Raises:
            IllegalStep: a handle is locked; nothing changed.
        """
        if locked := self.size_info.protected_size:
            raise IllegalStep(f"{locked} tokens are locked; unlock them first")
        self.slots.give_back(self._index.clear())

    @property
    def size_info(self) -> SizeInfo:
        """The number of stored tokens."""
        evictable = self._index.num_evictable * self.page_size
        return SizeInfo(evictable, self._index.num_pages * self.page_size - evictable)

    def check_integrity(self) -> None:
        """Recount everything that is stored; an ``AssertionError`` is a bug of kvkeep."""
        self.slots.check(self._index.check([self._root, *self._locked.elements()]))

    def _symbols(self, input_ids: torch.Tensor) -> bytes:
        """Return the tokens of a prompt's whole pages, as the index compares them."""
        tokens = as_tokens(input_ids.numpy())
        return tokens[: len(tokens) // self.page_size * self.page_size].tobytes()

    def _match(self, symbols: bytes) -> PrefixMatch:
        match = self._index.match(symbols, _ONE)
        assert match is not None, "the root is held"
        return match.without_partial()


def main() -> None:
    """Two prompts that begin alike: the second one finds the pages of the first."""
    cache = PrefixCache("cpu", page_size=2)
    cache.insert_prefix(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([6, 7, 2, 3, 8]))
    handle = cache.match_prefix(torch.tensor([1, 2, 3, 9])).cuda_handle
    cache.lock_handle(handle)
    print(
        f"{handle.cached_len} tokens are cached, in slots {handle.get_matched_indices().tolist()}"
    )
    cache.lock_handle(handle, unlock=True)
    print(f"evicted: slots {cache.evict(2).tolist()}")


if __name__ == "__main__":
    main()
