"""`SlotTree`: which of an engine's slots have the KV of which tokens."""

from __future__ import annotations

import time
from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch

from kvkeep.core.errors import IllegalStep
from kvkeep.core.keys import Namespace
from kvkeep.core.pages.pool import EMPTY_PAGES, joined
from kvkeep.core.prefix import PrefixMatch, Tree
from kvkeep.core.prefix.node import descend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.core.pages.pool import PageArray
    from kvkeep.core.prefix.node import Node
    from kvkeep.core.prefix.tree import Encoder

__all__ = ["GivenPages", "PageSlots", "PathHandle", "SlotIndex", "SlotTree", "namespace_of"]


class PathHandle:
    """A stored prefix: the first ``pages`` pages of a path in ``tree``.

    Attributes:
        tree: the tree that has stored it.
        namespace: its namespace.
        tokens: tokens that begin with those of the prefix, to match them again.
        pages: its pages.
        node: the node in which it ended when it was made; None if nothing was stored there.
        evictions: how often the tree had evicted by then.
        hold: its protection from eviction while ``locks`` is not zero.
        counted: whether its request is counted.
    """

    __slots__ = (
        "counted", "evictions", "hold", "locks", "namespace", "node", "pages", "tokens",
        "tree",
    )  # fmt: skip

    def __init__(
        self,
        tree: SlotTree,
        namespace: Namespace,
        tokens: Sequence[int],
        pages: int = 0,
        node: Node | None = None,
    ) -> None:
        self.tree = tree
        self.namespace = namespace
        self.tokens = tokens
        self.pages = pages
        self.node = node
        self.evictions = tree.evictions
        self.hold: Node | None = None
        self.locks = 0
        self.counted = False

    def end(self) -> Node | None:
        """Return the node in which the prefix ends now; None if it has to be matched again.

        Cost: the splits since it was made.
        """
        node = self.hold
        if node is None:
            node = self.node if self.evictions == self.tree.evictions else None
        if node is None or not node.in_tree:  # in no tree: evicted, or joined with another
            return None
        while node.depth >= self.pages and node.parent is not None:
            node = node.parent
        return node if node.end >= self.pages else None

    def __repr__(self) -> str:
        return f"<PathHandle of {self.pages} pages, {self.locks} locks>"


class GivenPages(NamedTuple):
    """Pages ``start`` … ``stop`` of a prompt, with the slots that have their KV."""

    tokens: Sequence[int]
    """All tokens of the prompt."""
    start: int
    stop: int
    slots: torch.Tensor
    priority: int = 0


class StoredPages(NamedTuple):
    """The result of `SlotTree.store`."""

    hold: Node
    """The hold, moved to the end of the pages."""
    existing: PageArray
    """Pages that were stored before, in place of the first of the given ones."""
    new: PageArray
    symbols: bytes
    """What the index compares for ``new``."""
    parent: int
    """The page before ``new``; -1 for none."""


class SlotTree:
    """A prefix index over pages that an engine allocates, with locks on prefixes.

    Thread safety: none. Cost: `match` is one memcmp per run or trail of runs, `store` is flat in
    the pages before those that it stores, `evict` takes about 1.5 µs an evicted run. Memory: 12
    bytes for each page of the ``capacity``, besides the index's.

    Attributes:
        index: the index, by page numbers.
        slots: the slots behind the numbers.
        evictions: how often pages were evicted.
    """

    def __init__(
        self, index: SlotIndex, device: torch.device, dtype: torch.dtype, capacity: int
    ) -> None:
        self.index = index
        self.slots = PageSlots(index.page_size, device, dtype, capacity)
        self.evictions = 0
        self._locked: dict[PathHandle, None] = {}

    def match(self, tokens: Sequence[int], pages: int, namespace: Namespace) -> PathHandle:
        """Return the longest stored prefix of the first ``pages`` pages of ``tokens``."""
        found = self.index.match(self.index.lookup(tokens, pages), namespace)
        if found is None:
            return PathHandle(self, namespace, tokens)
        return PathHandle(self, namespace, tokens, len(found.pages), found.end)

    def end(self, handle: PathHandle) -> Node | None:
        """Return the node in which a prefix ends; None for no pages.

        Raises:
            IllegalStep: the prefix was evicted.
        """
        if not handle.pages:
            return None
        node = handle.end()
        if node is None:
            symbols = self.index.lookup(handle.tokens, handle.pages)
            found = self.index.match(symbols, handle.namespace)
            if found is None or len(found.pages) < handle.pages:
                raise IllegalStep(f"{handle} was evicted since; match again, and lock at once")
            node = handle.node = found.end
            handle.evictions = self.evictions
        return node

    def slots_of(self, handle: PathHandle) -> torch.Tensor:
        """Return the slots of a prefix [tokens], on the device; raise as `end` does."""
        node = self.end(handle)
        parts: list[PageArray] = []
        while node is not None and node.parent is not None:
            if node.depth < handle.pages:
                parts.append(node.pages[: handle.pages - node.depth])
            node = node.parent
        return self.slots.of(joined(parts[::-1]))

    # --- locks -----------------------------------------------------------------------------------

    def lock(self, handle: PathHandle) -> int:
        """Protect a prefix from eviction; return how many pages became protected.

        Raises:
            IllegalStep: it was evicted before this first lock.
        """
        before = self.index.num_evictable
        if handle.hold is None:
            node = self.end(handle)
            match = None
            if node is not None:
                match = PrefixMatch(EMPTY_PAGES, node, handle.pages - node.depth)
            handle.hold, _ = self.index.hold(match, handle.namespace, used=False)
            self._locked[handle] = None
        else:
            self.index.retain(handle.hold)
        handle.locks += 1
        return before - self.index.num_evictable

    def unlock(self, handle: PathHandle) -> int:
        """End one lock, a use of the prefix; return how many pages became evictable.

        Raises:
            IllegalStep: it is not locked.
        """
        before = self.index.num_evictable
        self.index.release(self.detach(handle))
        return self.index.num_evictable - before

    def detach(self, handle: PathHandle) -> Node:
        """End one lock without releasing it: the hold belongs to the caller."""
        hold = handle.hold
        if hold is None:
            raise IllegalStep(f"{handle} is not locked")
        handle.locks -= 1
        if not handle.locks:
            handle.node, handle.evictions, handle.hold = hold, self.evictions, None
            del self._locked[handle]
        return hold

    def attach(self, handle: PathHandle, hold: Node) -> None:
        """Give a new handle the caller's hold on its end, as its first lock."""
        handle.node = handle.hold = hold
        handle.locks = 1
        self._locked[handle] = None

    def ends_with(self, handle: PathHandle, tokens: Sequence[int]) -> bool:
        """Whether the last page of a locked prefix has the tokens that ``tokens`` have there."""
        assert handle.hold is not None
        last = self.index.symbols(tokens, max(handle.pages - 1, 0), handle.pages)
        return bytes(handle.hold.run[-self.index.unit :]) == last

    # --- storing and evicting --------------------------------------------------------------------

    def store(self, hold: Node, given: GivenPages) -> StoredPages:
        """Store pages behind the path of ``hold``, and move the hold to their end."""
        index, count = self.index, given.stop - given.start
        assert hold.end == given.start, (hold, given)
        parent = int(hold.pages[-1]) if hold.size else -1
        symbols = index.symbols(given.tokens, given.start, given.stop)
        numbers = self.slots.take(given.slots)
        existing = EMPTY_PAGES
        if count:
            hold, existing = index.insert(hold, symbols, numbers, given.priority)
        there = len(existing)
        self.slots.give_back(numbers[:there])
        if there:
            parent = int(existing[-1])
        return StoredPages(hold, existing, numbers[there:], symbols[there * index.unit :], parent)

    def evict(self, pages: int) -> tuple[PageArray, torch.Tensor]:
        """Evict pages, or all that can be if they are fewer; return their numbers and slots."""
        gone = self.index.evict(pages)
        slots = self.slots.of(gone)
        self.slots.give_back(gone)
        self.evictions += bool(len(gone))
        return gone, slots

    def nodes(self) -> Iterator[tuple[Node, int]]:
        """Yield all nodes with their depth, parents first; roots have no pages."""
        for root in self.index.roots.values():
            yield from descend(root)

    def pages(self) -> PageArray:
        """Return the numbers of all stored pages. Cost: all nodes."""
        return joined([node.pages for node, _ in self.nodes() if node.end])

    def check(self) -> None:
        """Recount everything. Asserts."""
        locks = [handle.hold for handle in self._locked for _ in range(handle.locks)]
        held = [hold for hold in locks if hold is not None]
        assert len(held) == len(locks), "a lock without a hold"
        self.slots.check(self.index.check(held))


_LEAST_ROOM = 1024


class PageSlots:
    """Page numbers for an index, and the engine's slots behind them, which stay on its device.

    The slots of a page are consecutive and begin at a multiple of ``page_size``. The index works on
    numbers of its own, and a tensor on the device maps each to the page's first slot, so no call
    waits for the device.

    Args:
        page_size: tokens of a page.
        device: device of the slots.
        dtype: their dtype.
        room: pages to have room for; more is made when it is needed.

    Thread safety: none. Cost: of `take` and `of` one operation on the device for all pages.
    """

    def __init__(
        self, page_size: int, device: torch.device, dtype: torch.dtype, room: int = 0
    ) -> None:
        self.page_size = page_size
        self.device = device
        self._starts = torch.empty(0, dtype=dtype, device=device)
        self._offsets = torch.arange(page_size, dtype=dtype, device=device)
        self._unused: PageArray = np.empty(0, np.int32)  # a stack of `_num_unused`
        self._num_unused = 0
        if room:
            self._grow(room)

    def take(self, slots: torch.Tensor) -> PageArray:
        """Return new numbers for the pages with these slots [pages * page_size], in order.

        There is no limit on numbers. ``slots`` are copied.
        """
        starts = slots[:: self.page_size]
        if len(starts) > self._num_unused:
            self._grow(len(starts))
        top = self._num_unused
        self._num_unused = top - len(starts)
        numbers = self._unused[self._num_unused : top].copy()
        # scatter_ and index_select are three times as fast here as indexing with brackets.
        self._starts.scatter_(0, self._where(numbers), starts.to(self._starts.dtype))
        return numbers

    def give_back(self, numbers: PageArray) -> None:
        """Make numbers unused."""
        top = self._num_unused + len(numbers)
        self._unused[self._num_unused : top] = numbers
        self._num_unused = top

    def _grow(self, count: int) -> None:
        have = len(self._starts)
        more = max(have, count, _LEAST_ROOM)
        self._starts = torch.cat((self._starts, self._starts.new_empty(more)))
        unused = np.empty(have + more, np.int32)
        top = self._num_unused
        unused[:top] = self._unused[:top]
        unused[top : top + more] = np.arange(have, have + more)
        self._unused, self._num_unused = unused, top + more

    def of(self, numbers: PageArray) -> torch.Tensor:
        """Return the slots of these pages [pages * page_size], in order, on the device."""
        starts = self._starts.index_select(0, self._where(numbers))
        return starts if self.page_size == 1 else (starts[:, None] + self._offsets).flatten()

    def check(self, stored: PageArray) -> None:
        """Assert that each number is either unused or among ``stored``, once."""
        numbers = np.sort(np.concatenate((stored, self._unused[: self._num_unused])))
        assert np.array_equal(numbers, np.arange(len(self._starts))), "a page is lost, or twice"

    def _where(self, numbers: PageArray) -> torch.Tensor:
        """Return ``numbers`` as an index tensor on the device."""
        return torch.from_numpy(numbers.astype(np.int64)).to(self.device, non_blocking=True)


_WIDTH = 8  # bytes of a token: SGLang's are int64, and those of images exceed int32


@lru_cache(maxsize=1024)
def namespace_of(extra_key: str | None, cache_salt: str | None) -> Namespace:
    """Return the namespace of a request: its adapter and its ``extra_key``, and its salt."""
    return Namespace(tenant=cache_salt or "", lora=extra_key or "")


class SlotIndex(Tree):
    """Compares whole pages of int64 tokens.

    For EAGLE, SGLang matches pairs of neighbouring tokens (``bigrams``): a page of pairs is named
    by its tokens and the one behind them.

    Memory: 8 bytes a token, 4 a page, and about 600 bytes a run. Up to twice the bytes of
    tokens and pages again for paths that are kept joined (`kvkeep.core.prefix.trails`).
    """

    name = "radix"

    def __init__(
        self,
        page_size: int,
        policy: EvictionPolicy,
        *,
        bigrams: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.overlap = int(bigrams)
        """Tokens behind a page that are part of its name."""
        unit = (page_size + self.overlap) * _WIDTH
        super().__init__(page_size, policy, clock, unit=unit)

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
