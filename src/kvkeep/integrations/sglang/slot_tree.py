"""`SlotTree`: which of an engine's slots have the KV of which tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvkeep.core.errors import IllegalStep
from kvkeep.core.prefix import PrefixMatch
from kvkeep.core.prefix.node import descend
from kvkeep.core.prefix.results import EMPTY_PAGES, joined
from kvkeep.integrations.page_slots import PageSlots

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix.node import Node
    from kvkeep.integrations.sglang.symbols import SlotIndex

__all__ = ["GivenPages", "PathHandle", "SlotTree", "StoredPages"]


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
            self.index.again(handle.hold)
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
        for root in self.index.tree.roots.values():
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
