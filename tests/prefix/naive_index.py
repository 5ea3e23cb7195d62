"""A prefix index written for being obviously right: a node a page, everything recounted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.eviction import Entry
from kvkeep.core.prefix import PrefixMatch
from kvkeep.core.prefix.render import PrefixRun
from kvkeep.core.prefix.tree import Encoder
from kvkeep.core.prefix.tree import Inserted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.core.keys import Namespace
    from kvkeep.core.prefix.pinned import Pinned


class Bytes(Encoder):
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def lookup(self, tokens):
        return tokens.tobytes()

    def pages(self, tokens, start, stop):
        return tokens[start * self.page_size : stop * self.page_size].tobytes()

    def cut(self, pages):
        pass

    def fork(self):
        return self


class Page(Entry):
    __slots__ = (
        "children",
        "depth",
        "direct",
        "hard",
        "page",
        "parent",
        "pins",
        "space",
        "symbols",
    )

    def __init__(self, parent: Page | None, symbols: bytes, page: int, space: Namespace) -> None:
        super().__init__()
        self.parent = parent
        self.symbols = symbols
        self.page = page
        self.space = space
        self.size = 1
        self.depth = 0 if parent is None else parent.depth + 1
        self.children: list[Page] = []
        self.direct = 0
        self.pins = []
        self.hard = []

    @property
    def end(self) -> int:
        return self.depth

    @property
    def node(self) -> Page:
        """Itself: where a pin stands on it."""
        return self

    def all(self) -> Iterator[Page]:
        yield self
        for child in self.children:
            yield from child.all()

    def path(self) -> list[Page]:
        return [] if self.parent is None else [*self.parent.path(), self]


class NaivePins:
    """What `Pins` counts, recounted each time."""

    def __init__(self, index: NaiveIndex) -> None:
        self._index = index

    @property
    def num_pages(self) -> int:
        return self._index.num_pinned

    @property
    def num_hard(self) -> int:
        return self._index.num_hard_pinned

    @property
    def num_broken(self) -> int:
        return self._index.pins_broken

    @property
    def broken(self) -> list[Pinned]:
        return self._index.broken

    def would_keep(self, hold: Page) -> int:
        own = set(hold.path())
        return len(own | {n for node in self._index.nodes() if node.hard for n in node.path()})


class NaiveIndex:
    """Has the methods of `PrefixIndex` that the suite calls, and none of its code."""

    name = "naive"

    def __init__(self, page_size: int, policy: EvictionPolicy) -> None:
        self.page_size = page_size
        self.policy = policy
        self.pins = NaivePins(self)
        self.pins_broken = 0
        self.broken = []
        self.roots: dict[Namespace, Page] = {}
        self.queued: list[Page] = []

    def nodes(self) -> list[Page]:
        return [node for root in self.roots.values() for node in root.all() if node.parent]

    def held(self) -> set[Page]:
        """Pages with a hold on them or behind them, and roots likewise."""
        held: set[Page] = set()
        for root in self.roots.values():
            for node in root.all():
                if node.direct:
                    held.update((root, *node.path()))
        return held

    def settle(self) -> None:
        """Bring the policy and the roots to what they should be."""
        held = self.held()
        may_go = [n for n in self.nodes() if not n.children and n not in held and not n.pins]
        for node in [node for node in self.queued if node not in may_go]:
            self.policy.discard(node)
        for node in [node for node in may_go if node not in self.queued]:
            self.policy.add(node)
        self.queued = may_go
        for space in [s for s, r in self.roots.items() if not r.children and r not in held]:
            del self.roots[space]

    @property
    def num_pages(self) -> int:
        return len(self.nodes())

    @property
    def num_evictable(self) -> int:
        return len(set(self.nodes()) - self.held())

    def encoder(self, namespace):
        return Bytes(self.page_size)

    def match(self, symbols, namespace):
        node = self.roots.get(namespace)
        if node is None:
            return None
        unit = 4 * self.page_size
        at = 0
        while True:
            here = symbols[at : at + unit]
            equal = [child for child in node.children if child.symbols == here]
            if not equal:
                break
            node, at = equal[0], at + unit
        pages = np.array([page.page for page in node.path()], np.int32)
        match = PrefixMatch(pages, node, 1)
        for child in node.children:
            same = [a == b for a, b in zip(child.symbols, here, strict=False)]
            tokens = [*same, False].index(False) // 4
            if tokens > match.partial_tokens:
                match.partial_page, match.partial_tokens = child.page, tokens
                match.source = child
        return match

    def protects(self, match):
        if match is None:
            return 0
        last = match.source or match.end
        return len(set(last.path()) - self.held())

    def hold(self, match, namespace, *, used=True):
        if match is None:
            root = self.roots.setdefault(namespace, Page(None, b"", -1, namespace))
            root.direct += 1
            return root, None
        match.end.direct += 1
        if used:
            self.policy.hit(match.end)
        if match.source is not None:
            match.source.direct += 1
        self.settle()
        return match.end, match.source

    def again(self, hold):
        hold.direct += 1
        return hold

    def insert(self, hold, symbols, pages, priority):
        node, existing = hold, []
        unit = 4 * self.page_size
        for at, page in enumerate(pages.tolist()):
            own = symbols[at * unit : (at + 1) * unit]
            child = next((child for child in node.children if child.symbols == own), None)
            if child is None:
                child = Page(node, own, page, node.space)
                node.children.append(child)
                self.policy.stored(child, priority)
            else:
                existing.append(child.page)
                self.settle()
                if child in self.queued:
                    self.policy.discard(child)
                    self.queued.remove(child)
                child.priority = max(child.priority, priority)
            node = child
        node.direct += 1
        hold.direct -= 1
        self.settle()
        return Inserted(node, np.array(existing, np.int32))

    def shorten(self, hold, pages):
        return self.move(hold, hold, pages)

    def move(self, hold, path, pages):
        root = self.roots[hold.space]
        node = [root, *path.path()][pages]
        node.direct += 1
        hold.direct -= 1
        self.settle()
        return node

    def release(self, hold, *, used=True):
        assert hold.direct > 0
        if used:
            self.policy.used(hold)
        hold.direct -= 1
        self.settle()

    def remove(self, node: Page) -> int:
        assert not node.children
        assert node.parent is not None
        node.parent.children.remove(node)
        self.policy.inherit(node.parent, node)
        for pin in node.pins:
            pin.spot = node.parent if node.parent.parent else None
        if node.parent.parent is None:
            self.pins_broken += len(node.pins)
            self.broken += node.pins
        else:
            node.parent.pins += node.pins
        node.parent = None
        return node.page

    def drop(self, hold, keep):
        gone = []
        self.release(hold)
        node = hold
        while node.depth > keep and node in self.queued:
            parent = node.parent
            self.policy.discard(node)
            self.queued.remove(node)
            gone.append(self.remove(node))
            self.settle()
            node = parent
        return np.array(gone, np.int32)

    def evict(self, count):
        gone = []
        for _ in range(min(count, self.num_evictable)):
            victim = self.policy.pop()
            if victim is None:
                held = self.held()
                pinned = [n for n in self.nodes() if not n.children and n not in held]
                victim = min(pinned, key=lambda node: node.last_used)
            else:
                self.queued.remove(victim)
            gone.append(self.remove(victim))
            self.settle()
        return np.array(gone, np.int32)

    def clear(self, namespace=None):
        gone = []
        while leaves := [
            node
            for node in self.nodes()
            if namespace in {None, node.space} and not node.children and node not in self.held()
        ]:
            for node in leaves:
                if node in self.queued:
                    self.policy.discard(node)
                    self.queued.remove(node)
                gone.append(self.remove(node))
            self.settle()
        return np.array(gone, np.int32)

    def pin(self, hold, pin, *, hard=False):
        (hold.hard if hard else hold.pins).append(pin)
        pin.spot = hold
        self.settle()

    def unpin(self, pin):
        page, pin.spot = pin.spot, None
        if page is None:
            return
        if pin in page.hard:
            page.hard.remove(pin)
            self.release(page)
        else:
            page.pins.remove(pin)
            self.settle()

    @property
    def num_pinned(self):
        return len({n for node in self.nodes() if node.pins or node.hard for n in node.path()})

    @property
    def num_hard_pinned(self):
        return len({n for node in self.nodes() if node.hard for n in node.path()})

    @property
    def num_namespaces(self):
        return len(self.roots)

    def namespaces(self):
        return {space: len([*root.all()]) - 1 for space, root in self.roots.items()}

    def runs(self, namespace):
        root = self.roots.get(namespace)
        for node in [] if root is None else root.all():
            if node.parent:
                yield PrefixRun(
                    depth=node.depth - 1,
                    start=node.depth - 1,
                    pages=np.array([node.page], np.int32),
                    symbols=node.symbols,
                    tokens=np.frombuffer(node.symbols, "<i4"),
                    children=len(node.children),
                    holders=node.direct,
                    pins=len(node.pins),
                    state=self.policy.describe(node),
                )

    def check(self, holds):
        nodes = [node for root in self.roots.values() for node in root.all()]
        for node in nodes:
            assert node.direct == sum(hold is node for hold in holds)
        assert all(hold in nodes for hold in holds)
        return np.array([node.page for node in self.nodes()], np.int32)
