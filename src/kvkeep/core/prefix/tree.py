"""`RunTree`: a radix tree whose edges are runs of pages; the body of both prefix indices.

What it compares are *symbols*: a fixed number of bytes per page. `RadixIndex` uses the page's
tokens, `ChainIndex` its 32-byte block key. A run is kept as one `bytes`, so that following an edge
is one dictionary probe and one memcmp, however long the edge is.

    root ── "system prompt", 12 pages ─┬─ "first question", 3 pages
     (one per namespace)               └─ "second question", 4 pages ── "its follow-up", 2 pages

Three decisions make eviction cheap:

- A hold stands on a node and is counted upwards only until the first ancestor that is held
  already, so a node with ``holders == 0`` is exactly a node that nobody needs.
- Only leaves that nobody holds are in the eviction policy; taking one makes its parent the next
  candidate. Tail first comes by itself, and nothing is ever searched.
- A use is recorded where it ends, and inherited by the parent when a child goes
  (`EvictionPolicy.inherit`), so using a long path costs no walk along it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction.hints import Hinted
from kvkeep.core.eviction.queues import AgeQueue
from kvkeep.core.prefix.base import EMPTY_PAGES, Inserted, Look, PrefixIndex, PrefixMatch, PrefixRun
from kvkeep.core.prefix.heads import Heads, common_bytes
from kvkeep.core.prefix.marks import Marks
from kvkeep.core.prefix.node import Node, Root, descend
from kvkeep.core.prefix.owners import Owners
from kvkeep.core.prefix.pinned import Pins
from kvkeep.core.tokens import TOKEN_BYTES, TOKEN_DTYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvkeep.core.eviction import EvictionPolicy
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.table import PageArray
    from kvkeep.core.prefix.owners import Owner
    from kvkeep.core.prefix.pinned import Pinned
    from kvkeep.core.prefix.walk import TreeWalk

__all__ = ["RunTree"]

_GROW_PAGES = 128
"""A leaf shorter than this grows in place when its only holder publishes more: a conversation or
a long decode becomes a few long runs, not one per publish, and no publish copies more than this."""


class RunTree(PrefixIndex[Node]):
    """See the module; subclasses say what the symbols are."""

    unit: int
    """Bytes of symbols per page."""
    exact = False
    """Symbols are tokens, so pages that match only in part are found too."""

    def __init__(self, page_size: int, policy: EvictionPolicy) -> None:
        if policy.taken:
            raise InvalidValue(f"{policy!r} serves another cache; make a policy for each")
        policy.taken = True
        self.page_size = page_size
        self.policy = policy
        self.marks = Marks()
        self.num_pages = 0
        self.num_evictable = 0
        self.pins_broken = 0
        self.owners: Owners | None = None
        self._pins = Pins()
        self.broken = self._pins.broken
        self._roots: dict[Namespace, Root] = {}
        self._pinned = AgeQueue[float]()  # leaves that could go, but for their pins
        self._serial = 0  # of the node made last

    def keep_owners(self) -> Owners:
        """Begin to keep who uses what; what is stored already counts as shared."""
        if self.owners is None:
            if not isinstance(self.policy, Hinted):
                self.policy = Hinted(self.policy)
            self.owners = Owners(self.policy)
        return self.owners

    # --- finding -----------------------------------------------------------------------------

    def match(self, symbols: bytes, namespace: Namespace) -> PrefixMatch[Node] | None:
        """The longest cached prefix, or None when the namespace is empty. Changes nothing.

        Cost: one dict probe and one memcmp per run on the path, about 0.3 µs and 20 ps a byte.
        """
        root = self._roots.get(namespace)
        if root is None:
            return None
        node: Node = root
        unit = self.unit
        startswith = symbols.startswith
        offset = 0
        pages: list[PageArray] = []
        while child := node.children.get(symbols[offset : offset + unit]):
            run = child.run
            if not startswith(run, offset):
                return self._match_inside(symbols, offset, child, pages)
            offset += len(run)
            pages.append(child.pages)
            node = child
        match = PrefixMatch(_joined(pages), node, node.size)
        if self.exact and node.children and offset < len(symbols):
            self._match_head(symbols[offset : offset + unit], match)
        return match

    def _match_inside(
        self, symbols: bytes, offset: int, child: Node, pages: list[PageArray]
    ) -> PrefixMatch[Node]:
        """The prompt leaves, or ends, inside the run of ``child``, after its first page."""
        common = common_bytes(symbols, offset, child.run)
        taken = common // self.unit
        pages.append(child.pages[:taken])
        match = PrefixMatch(_joined(pages), child, taken)
        tokens = (common - taken * self.unit) // TOKEN_BYTES
        if self.exact and tokens:
            match.partial_page = int(child.pages[taken])
            match.partial_tokens = tokens
            match.source = child
        return match

    def _match_head(self, head: bytes, match: PrefixMatch[Node]) -> None:
        """The prompt leaves between two runs: look for the child that begins most like it."""
        node = match.end
        if node.heads is None:
            (key,) = node.children
            found: tuple[bytes, int] | None = key, common_bytes(head, 0, key)
        else:
            found = node.heads.closest(head, node.children)
        if found is not None and found[1] >= TOKEN_BYTES:
            match.source = node.children[found[0]]
            match.partial_page = int(match.source.pages[0])
            match.partial_tokens = found[1] // TOKEN_BYTES

    # --- holding -----------------------------------------------------------------------------

    def protects(self, match: PrefixMatch[Node] | None) -> int:
        """How many evictable pages `hold` would protect. Cost: up to the first held ancestor."""
        if match is None:
            return 0
        count = 0
        if match.source is not None and not match.source.holders:
            count = 1  # the page that matches in part
        node: Node | None = match.end
        if not match.end.holders:
            count += match.taken - match.end.size  # hold() splits, and leaves the rest to go
        while node is not None and not node.holders:
            count += node.size
            node = node.parent
        return count

    def hold(
        self, match: PrefixMatch[Node] | None, namespace: Namespace, *, used: bool = True
    ) -> tuple[Node, Node | None]:
        """Protect a match: a hold on its full pages, and one on its partial page if it has one."""
        if match is None:
            root = self._roots.get(namespace)
            if root is None:
                self._serial += 1
                root = self._roots[namespace] = Root(namespace, self._serial)
            self._hold(root)
            return root, None
        end = match.end
        if match.taken < end.size:
            end = self._split(end, match.taken)
        self._hold(end)
        if used:
            self.policy.hit(end)
            if end.end:  # nothing is reused of a root
                end.uses += 1
        source = match.source
        if source is not None:
            if source.size > 1:  # one page is wanted: the rest of a long run may go meanwhile
                source = self._split(source, 1)
            self._hold(source)
        return end, source

    def again(self, hold: Node) -> Node:
        """A second hold on the same path."""
        hold.holders += 1
        return hold

    def _hold(self, node: Node) -> None:
        while True:
            node.holders += 1
            if node.holders > 1 or node.parent is None:
                return
            self.num_evictable -= node.size
            if not node.children:
                self._leave(node)
            node = node.parent

    def release(self, hold: Node, *, used: bool = True) -> None:
        """End a hold. Cost: up to the first ancestor that is held by others."""
        if used:
            self.policy.used(hold)
        node = hold
        while True:
            assert node.holders > 0, "released more often than held"
            node.holders -= 1
            if node.holders:
                break
            if node.parent is None:
                self._forget_if_empty(node)
                break
            self.num_evictable += node.size
            if not node.children:
                self._enter(node)
            node = node.parent
        if not used and len(hold.children) == 1:
            self._rejoin(hold)

    def shorten(self, hold: Node, pages: int) -> Node:
        """Move a hold back so that it covers the first ``pages`` pages."""
        return self.move(hold, hold, pages)

    def move(self, hold: Node, path: Node, pages: int) -> Node:
        """Move a hold to the first ``pages`` pages of another's path, which begins with its own."""
        node = path
        while node.parent is not None and node.parent.end >= pages:
            node = node.parent
        if node.end > pages:
            node = self._split(node, pages - (node.end - node.size))
        if node is not hold:
            self._hold(node)
            self.release(hold, used=False)
        return node

    def _enter(self, leaf: Node) -> None:
        if leaf.pins:
            self._pinned.push(leaf, leaf.last_used)
        else:
            self.policy.add(leaf)

    def _leave(self, leaf: Node) -> None:
        if leaf.pins:
            self._pinned.remove(leaf)
        else:
            self.policy.discard(leaf)

    # --- storing -----------------------------------------------------------------------------

    def insert(
        self,
        hold: Node,
        symbols: bytes,
        pages: PageArray,
        priority: int,
        *,
        known: bool = False,
        owner: Owner | None = None,
    ) -> Inserted[Node]:
        """Store ``pages`` after the path of ``hold`` and move the hold to their end."""
        assert len(symbols) == len(pages) * self.unit
        unit = self.unit
        node = hold
        offset = 0
        existing: list[PageArray] = []
        while child := node.children.get(symbols[offset : offset + unit]):
            if not symbols.startswith(child.run, offset):
                child = self._split(child, common_bytes(symbols, offset, child.run) // unit)
            offset += len(child.run)
            existing.append(child.pages)
            node = child
        if self.owners is not None and (existing or owner is None):
            self.owners.used(node, owner)
        if offset < len(symbols):
            node = self._append(
                node,
                hold,
                symbols[offset:],
                pages[offset // unit :],
                priority,
                known=known,
                owner=owner,
            )
        if node is not hold:
            self._hold(node)
            self.release(hold, used=False)
        node.priority = max(node.priority, priority)  # it is held now, so no queue minds
        return Inserted(node, _joined(existing))

    def _append(
        self,
        node: Node,
        hold: Node,
        symbols: bytes,
        pages: PageArray,
        priority: int,
        *,
        known: bool,
        owner: Owner | None,
    ) -> Node:
        self.num_pages += len(pages)
        if (
            node is hold
            and node.holders == 1  # the publisher alone
            and not node.children
            and not node.pins
            and node.parent is not None
            and node.size < _GROW_PAGES
            and node.owner is owner
            and (known == bool(node.hits) or not self.policy.remembers)
        ):
            node.run = b"".join((node.run, symbols))
            node.pages = np.concatenate((node.pages, pages))
            node.size += len(pages)
            node.end += len(pages)
            if self.owners is not None:
                self.owners.resized(node, len(pages))
            self.policy.grown(node)
            return node
        if not node.children and not node.holders and node.parent is not None:
            self._leave(node)
        self._serial += 1
        leaf = Node(node, symbols, pages.copy(), self.unit, self._serial)
        self._attach(node, leaf)
        self.policy.stored(leaf, priority, known=known)
        self.num_evictable += leaf.size
        if owner is not None:
            assert self.owners is not None
            self.owners.born(leaf, owner)
        self._enter(leaf)
        return leaf

    def _attach(self, node: Node, child: Node) -> None:
        node.children[child.key] = child
        if not self.exact or len(node.children) < 2:
            return
        if node.heads is None:
            node.heads = Heads()
            for key in node.children:
                node.heads.add(key, node.children)
        else:
            node.heads.add(child.key, node.children)

    def _split(self, node: Node, at: int) -> Node:
        """Cut a run before its page ``at``; the new front is returned, ``node`` stays the end."""
        assert 0 < at < node.size
        parent = node.parent
        assert parent is not None
        # The queue of pinned leaves goes by use alone, as some policies do.
        requeued = self.policy.sized and not (node.children or node.holders or node.pins)
        if requeued:
            self._leave(node)
        cut = at * self.unit
        front = node.pages[:at].copy()
        self._serial += 1
        upper = Node(parent, bytes(node.run[:cut]), front, self.unit, self._serial)
        self.policy.split(upper, node)
        if node.covered:
            self._pins.split(upper, node)
        upper.holders = 1 if node.holders else 0
        parent.children[upper.key] = upper  # in the place of node
        node.run = bytes(node.run[cut:])
        node.key = node.run[: self.unit]
        node.pages = node.pages[at:].copy()
        node.size -= at
        node.depth += at
        node.parent = upper
        upper.children[node.key] = node
        if self.owners is not None:
            self.owners.split(upper, node)
        if requeued:
            self._enter(node)
        return upper

    def _rejoin(self, upper: Node) -> None:
        """Undo a split that was made for a hold, which ended and was no use: one run again.

        Without this, most prompts that begin with the same token by chance would end up in two
        runs each. It is done where nothing tells the two apart: no hold, pin, use or owner of the
        front's own. A run that is longer than `_GROW_PAGES` then stays cut, which bounds the bytes
        copied; its front is a small part of it.
        """
        parent = upper.parent
        (lower,) = upper.children.values()
        if (
            parent is None
            or upper.holders > bool(lower.holders)
            or upper.spot is not None
            or upper.hits
            or upper.uses
            or upper.last_used > lower.last_used
            or upper.priority > lower.priority
            or upper.owner is not lower.owner
            or (upper.died, upper.due) != (lower.died, lower.due)
            or upper.size + lower.size > _GROW_PAGES
        ):
            return
        requeued = self.policy.sized and not (lower.children or lower.holders or lower.pins)
        if requeued:
            self._leave(lower)
        if self.owners is not None:
            self.owners.rejoined(upper)
        lower.run = b"".join((upper.run, lower.run))
        lower.key = upper.key
        lower.pages = np.concatenate((upper.pages, lower.pages))
        lower.size += upper.size
        lower.depth = upper.depth
        lower.parent = parent
        parent.children[lower.key] = lower  # in the place of upper
        upper.parent = None
        if requeued:
            self._enter(lower)

    # --- forgetting --------------------------------------------------------------------------

    def evict(self, count: int) -> PageArray:
        """Forget ``count`` pages and return them: tail pages of what the policy names.

        Soft pins give way when nothing else is left. Cost: about 1.5 µs a run, whatever is stored.
        """
        count = min(count, self.num_evictable)
        freed: list[PageArray] = []
        pop = cast("Callable[[], Node | None]", self.policy.pop)
        portions = self.policy.portions
        left = count
        while left:
            leaf = pop()
            most = left
            if leaf is None:
                leaf = cast("Node | None", self._pinned.pop())
                assert leaf is not None, "evictable pages that no queue knows"
            elif portions:
                most = min(left, self.policy.portion(leaf))
                assert most > 0, "a policy that wants nothing of its victim"
            if leaf.size > most:
                freed.append(self._trim(leaf, most))
                if leaf.pins:
                    self._enter(leaf)
                else:
                    self.policy.put_back(leaf)
                left -= most
                continue
            left -= leaf.size
            freed.append(leaf.pages)
            self._unlink(leaf)
        self.num_pages -= count
        self.num_evictable -= count
        return _joined(freed)

    def _trim(self, leaf: Node, count: int) -> PageArray:
        """Take ``count`` pages off the tail; bytes are copied only when half of them are gone."""
        keep = leaf.size - count
        if self.owners is not None:
            self.owners.resized(leaf, -count)
        if leaf.covered:
            self._pins.trimmed(leaf, count)
        gone = leaf.pages[keep:]
        leaf.pages = leaf.pages[:keep]
        leaf.size = keep
        leaf.end -= count
        view = memoryview(leaf.run)
        leaf.run = view[: keep * self.unit]
        if isinstance(view.obj, bytes) and len(view.obj) > 2 * len(leaf.run):
            leaf.run = bytes(leaf.run)
            leaf.pages = leaf.pages.copy()
        return gone

    def _unlink(self, leaf: Node) -> None:
        """Take a leaf out of the tree; its parent may be the next to go."""
        parent = leaf.parent
        assert parent is not None
        if self.owners is not None:
            self.owners.gone(leaf)
        leaf.parent = None
        if leaf.pins:
            if parent.parent is None:
                self.pins_broken += leaf.pins
            self._pins.pass_on(leaf, parent)  # the parent is in no queue yet
        del parent.children[leaf.key]
        self.policy.inherit(parent, leaf)
        uses = leaf.uses
        if uses:
            parent.uses += uses
        if parent.children:
            return
        parent.heads = None
        if parent.parent is None:
            self._forget_if_empty(parent)
        elif not parent.holders:
            self._enter(parent)

    def _forget_if_empty(self, root: Node) -> None:
        assert isinstance(root, Root)
        if not root.children and not root.holders:
            del self._roots[root.namespace]

    def drop(self, hold: Node, keep: int) -> PageArray:
        """End a hold and forget its path beyond ``keep`` pages, so far as nobody else needs it."""
        self.release(hold)
        freed: list[PageArray] = []
        node = hold
        while node.end > keep and not node.holders and not node.children and not node.pins:
            parent = node.parent
            assert parent is not None
            self._leave(node)
            count = min(node.size, node.end - keep)
            self.num_pages -= count
            self.num_evictable -= count
            if count < node.size:
                freed.append(self._trim(node, count))
                self._enter(node)
                break
            freed.append(node.pages)
            self._unlink(node)
            node = parent
        return _joined(freed)

    def clear(self, namespace: Namespace | None = None) -> PageArray:
        """Forget all that nobody holds, pinned or not, in one namespace or in all."""
        if namespace is None:
            return self.evict(self.num_evictable)
        root = self._roots.get(namespace)
        return EMPTY_PAGES if root is None else self.evict_below(root)

    def top_of(self, match: PrefixMatch[Node]) -> Node | None:
        """The run with which the path of a match begins; None for a match without a full page."""
        if not len(match.pages):
            return None
        node = match.end
        while node.parent is not None and node.parent.parent is not None:
            node = node.parent
        return node

    def evict_below(self, place: Node) -> PageArray:
        """Forget a run and all behind it, pinned or not, so far as nobody holds it."""
        freed: list[PageArray] = []
        for node in [n for n, _ in descend(place)][::-1]:  # children before parents
            if node.holders or node.parent is None:
                continue
            self._leave(node)
            self.num_pages -= node.size
            self.num_evictable -= node.size
            freed.append(node.pages)
            self._unlink(node)
        return _joined(freed)

    # --- pins --------------------------------------------------------------------------------

    def pin(self, hold: Node, pin: Pinned, *, hard: bool = False) -> None:
        """Keep the end of this path until nothing else is left to evict, or for good."""
        assert hold.holders, "a pin is set while its path is held"
        self._pins.add(hold, pin, hard=hard)

    def unpin(self, pin: Pinned) -> None:
        """Take a pin away; nothing happens when it is broken."""
        spot = pin.spot
        if spot is None:
            return
        node = spot.node
        if pin in spot.hard:
            self._pins.remove(pin)
            self.release(node)
            return
        queued = not node.children and not node.holders
        if queued:
            self._leave(node)
        self._pins.remove(pin)
        if queued:
            self._enter(node)

    def pinned(self, pin: Pinned) -> int:
        """Pages on the path of ``pin``."""
        spot = pin.spot
        return 0 if spot is None else spot.node.end

    @property
    def num_pinned(self) -> int:
        """Pages on the paths of pins, each counted once."""
        return self._pins.num_pages

    @property
    def num_hard_pinned(self) -> int:
        """Pages on the paths of hard pins, each counted once."""
        return self._pins.num_hard

    def would_keep(self, hold: Node) -> int:
        """Pages of hard pins with one more. Cost: up to the first run that one covers already."""
        return self._pins.would_keep(hold)

    def length(self, hold: Node) -> int:
        """Pages on the path of ``hold``."""
        return hold.end

    # --- looking -----------------------------------------------------------------------------

    @property
    def moment(self) -> int:
        """The policy's count of events so far, of which ``last_used`` is one."""
        policy = self.policy.inner if isinstance(self.policy, Hinted) else self.policy
        return policy.moment

    def walk(self, columns: Iterable[str], top: Namespace | Node | None = None) -> TreeWalk:
        """A walk over all there is, one namespace (with its root), or a node and all behind it."""
        from kvkeep.core.prefix.walk import TreeWalk  # noqa: PLC0415 - for those who look

        if isinstance(top, Node):
            return TreeWalk([top], *columns)
        tops = [*self._roots.values()] if top is None else [self._roots.get(top)]
        return TreeWalk([root for root in tops if root is not None], *columns)

    def keeps(self, place: Node) -> bool:
        """Whether it is still there."""
        return place.parent is not None or isinstance(place, Root)

    def look(self, place: Node) -> Look:
        """All there is to know of a node."""
        path: list[Node] = [place]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        root = path[-1]
        assert isinstance(root, Root)
        return Look(
            namespace=root.namespace,
            path=tuple(node.id for node in path[:0:-1]),
            start=place.depth,
            pages=place.pages.copy(),
            symbols=bytes(place.run),
            children=len(place.children),
            state=self.policy.describe(place) if place.end else "",
        )

    def before(self, place: Node) -> tuple[Namespace, bytes]:
        """The namespace of a node, and the symbols on the way to it."""
        runs: list[bytes | memoryview] = []
        while place.parent is not None:
            place = place.parent
            runs.append(place.run)
        assert isinstance(place, Root)
        return place.namespace, b"".join(reversed(runs))

    def at(self, place: Node) -> PrefixMatch[Node]:
        """As if a prompt had matched up to the end of a node; its pages are not looked up."""
        return PrefixMatch(place.pages, place, place.size)

    def pins_at(self, place: Node) -> list[Pinned]:
        """The soft pins that stand at the end of a node."""
        return [] if place.spot is None else list(place.spot.soft)

    def pins_below(self, place: Node) -> list[Pinned]:
        """The soft pins of what `evict_below` takes away. Cost: all nodes below."""
        return [
            pin
            for node, _ in descend(place)
            if node.spot is not None and not node.holders
            for pin in node.spot.soft
        ]

    @property
    def num_namespaces(self) -> int:
        """Namespaces in which anything is stored or held."""
        return len(self._roots)

    def namespaces(self) -> dict[Namespace, int]:
        """Pages stored per namespace. Cost: all nodes."""
        return {
            namespace: sum(node.size for node, _ in descend(root))
            for namespace, root in self._roots.items()
        }

    def runs(self, namespace: Namespace) -> Iterator[PrefixRun]:
        """What is stored, depth first, most recently used branches first."""
        root = self._roots.get(namespace)
        if root is None:
            return
        for node, depth in descend(root):
            if node.parent is not None:
                symbols = bytes(node.run)
                row = np.frombuffer(symbols, TOKEN_DTYPE)
                tokens, extras = self.marks.plain(row) if self.exact else (None, ())
                yield PrefixRun(
                    depth=depth - 1,
                    start=node.end - node.size,
                    pages=node.pages.copy(),
                    symbols=symbols,
                    tokens=tokens,
                    children=len(node.children),
                    holders=node.holders,
                    pins=node.pins,
                    state=self.policy.describe(node),
                    extras=extras,
                )

    def check(self, holds: list[Node]) -> PageArray:
        """Recount everything given all holds there are; returns the pages stored."""
        direct: dict[Node, int] = {}
        for hold in holds:
            direct[hold] = direct.get(hold, 0) + 1
        stored: list[PageArray] = []
        evictable = queued = pinned = 0
        for namespace, root in self._roots.items():
            assert root.holders or root.children, f"nothing is left in {namespace}"
            assert root.parent is None
            assert root.size == root.end == 0
            for node, _ in descend(root):
                held = sum(1 for child in node.children.values() if child.holders)
                assert node.holders == held + direct.pop(node, 0), f"wrong holders: {node}"
                for key, child in node.children.items():
                    assert child.parent is node
                    assert child.key == key == bytes(child.run[: self.unit])
                if self.exact and len(node.children) > 1:
                    assert node.heads is not None
                if node is root:
                    continue
                assert node.size == len(node.pages) > 0
                assert len(node.run) == node.size * self.unit
                assert node.parent is not None
                assert node.end == node.parent.end + node.size
                assert node.depth == node.parent.end
                stored.append(node.pages)
                if not node.holders:
                    evictable += node.size
                    if not node.children:
                        queued += not node.pins
                        pinned += bool(node.pins)
        if self.owners is not None:
            self.owners.check(list(self._roots.values()))
        roots = self._roots.values()
        self._pins.check(node for root in roots for node, _ in descend(root) if node.parent)
        assert not direct, f"holds on nodes that are not in the tree: {list(direct)}"
        pages = _joined(stored)
        assert len(pages) == self.num_pages, (len(pages), self.num_pages)
        assert evictable == self.num_evictable, (evictable, self.num_evictable)
        assert queued == len(self.policy), (queued, len(self.policy))
        assert pinned == len(self._pinned), (pinned, len(self._pinned))
        return pages

    def __repr__(self) -> str:
        return f"<{self.name} index, {self.num_pages} pages, {self.num_evictable} evictable>"


def _joined(parts: list[PageArray]) -> PageArray:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else EMPTY_PAGES
