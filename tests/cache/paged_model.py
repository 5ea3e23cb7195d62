"""What a `PagedCache` must answer, worked out the slow way: from events, tables and whole lists."""

from __future__ import annotations

import copyreg
import pickle
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kvkeep import PagedCache
from kvkeep.core.events import Closed, Evicted, Stored
from kvkeep.core.keys import chain_keys, root_key
from naive_cache import NaiveCache
from tagged_pages import TaggedPages, tags

if TYPE_CHECKING:
    from kvkeep import PageCopy, Pin, Sequence
    from kvkeep.core.cache.copies import Claim


# A run cut short is a memoryview, which deepcopy takes only when told how.
copyreg.pickle(memoryview, lambda view: (bytes, (bytes(view),)))
# What a policy learned has a lock.
copyreg.pickle(type(threading.RLock()), lambda _lock: (threading.RLock, ()))


class Clock:
    """Time that stands still until it is told to move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Live:
    """A running sequence, as its engine sees it."""

    seq: Sequence
    namespace: str
    tokens: list[int]
    computed: int
    family: int
    own: set[int] = field(default_factory=set)
    """Pages that it published after all those of others: `close(keep=False)` forgets these."""
    made: list[PageCopy] = field(default_factory=list)
    """The copies handed out last: their sources may not change yet."""

    @property
    def table(self) -> list[int]:
        return self.seq.pages.tolist()

    @property
    def copying(self) -> bool:
        return len(self.seq.claims()) > len(self.made)

    def waiting(self) -> list[PageCopy]:
        claims = self.seq.claims()
        return [claim.copy for claim in claims[: len(claims) - len(self.made)]]


@dataclass(eq=False)
class Pinned:
    """A pin, and the pages of its path that have not been evicted since."""

    pin: Pin
    path: list[int]
    hard: bool
    until: float


class PagedModel:
    """A cache, an engine that uses it, and all that can be said about both without cleverness."""

    def __init__(
        self, num_pages: int, page_size: int, prefix: str, eviction: str, hard_pin_pages: int
    ) -> None:
        self.clock = Clock()
        self.cache = PagedCache(
            num_pages,
            page_size,
            prefix=prefix,
            eviction=eviction,
            hard_pin_pages=hard_pin_pages,
            clock=self.clock,
        )
        self.cache.tree.trails.steps = 2  # trees are small here: join early
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix = prefix
        self.eviction = eviction
        self.budget = hard_pin_pages
        self.memory = TaggedPages(num_pages, page_size)
        self.naive = NaiveCache(page_size, exact=prefix == "radix")
        self.live: list[Live] = []
        self.closed: list[Live] = []
        self.pins: list[Pinned] = []
        self.late: list[tuple[Live, PageCopy]] = []  # handed out, not made yet; in order
        self.recency: dict[int, int] = {}  # page → the step that used it last
        self.events: list[object] = []
        self.expect: Counter[str] = Counter()
        self.step = 0
        self.failed = False  # true during a step, and so after one that raised
        self.cache.subscribe(self._take)

    def _take(self, event: object) -> None:
        self.events.append(event)
        if isinstance(event, Evicted):
            gone = set(event.pages.tolist())
            assert len(gone) == len(event.pages) > 0
            assert not gone & self.held_before, "evicted pages that were held"
        self.naive(event)

    # --- pages -------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return self.cache.pool.num_free

    def claims(self, without: Live | None = None) -> list[Claim]:
        """Each once, though forks share those that they were made with."""
        live = [live for live in self.live if live is not without]
        return list(dict.fromkeys(claim for one in live for claim in one.seq.claims()))

    def claimed(self, without: Live | None = None) -> set[int]:
        """Stored pages that wait to be copied from, and what lies before them."""
        held: set[int] = set()
        for claim in self.claims(without):
            if claim.copy.src in self.naive.pages:
                held.update(self.naive.path(claim.copy.src))
        return held

    def held(self, *, stale: bool = False, without: Live | None = None) -> set[int]:
        """Stored pages that must not be evicted; ``stale``: pins whose time is over count too."""
        held = self.claimed(without)
        for live in self.live:
            if live is not without:
                held.update(page for page in live.table if page in self.naive.pages)
        for pinned in self.pins:
            if pinned.hard and pinned.pin.active and (stale or pinned.until > self.clock.now):
                held.update(pinned.path)
        return held

    def evictable(self) -> set[int]:
        return set(self.naive.pages) - self.held()

    def soft_pinned(self) -> set[int]:
        """Pages that soft pins keep at present."""
        kept: set[int] = set()
        for pinned in self.pins:
            if not pinned.hard and pinned.until > self.clock.now:
                kept.update(pinned.path[: pinned.pin.num_tokens // self.page_size])
        return kept

    def needed_by_others(self, live: Live, page: int, offset: int) -> bool:
        return (
            page in self.naive.pages
            or any(page in other.table for other in self.live if other is not live)
            or any(c.copy.src == page and c.copy.tokens > offset for c in self.claims())
        )

    def forgotten(self, live: Live, stored: list[int]) -> list[int]:
        """What `close(keep=False)` forgets: the tail that it published and nobody else needs."""
        needed = self.held(without=live) | self.soft_pinned()
        needed |= {claim.copy.src for claim in live.seq.claims()}
        left = dict(self.naive.pages)
        gone: list[int] = []
        for page in reversed(stored):
            followed = any(other.parent == page for other in left.values())
            if page not in live.own or page in needed or followed:
                break
            del left[page]
            gone.append(page)
        return gone

    # --- hints, of which this one knows nothing: see `paged_hints` ---------------------------

    def opening(self, path: list[int], namespace: str, session: str | None) -> None:
        """A request whose prompt matches ``path`` is about to be opened, and will be."""

    def opened(self, seq: Sequence) -> None:
        """This is its sequence."""

    def published(self, live: Live, path: list[int], start: int, existing: int) -> None:
        """``live`` has published ``path`` from page ``start`` on; so many were there already."""

    # --- steps -------------------------------------------------------------------------------

    def begin(self, *, closing: Live | None = None) -> None:
        """Before a step: remember what the step's events are judged by."""
        self.step += 1
        self.failed = True
        self.events = []
        self.held_before = self.held(without=closing)
        self.soft_before = self.soft_pinned()
        self.pins_before = [p for p in self.pins if p.pin.active]

    def unchanged(self) -> object:
        """The state that a refused step must leave; it may end pins whose time is over."""
        self.begin()
        self.cache.stats()
        self.end()
        return self.snapshot()

    def touch(self, pages: list[int] | set[int]) -> None:
        for page in pages:
            if page in self.naive.pages:
                self.recency[page] = self.step

    def end(self) -> None:
        """After a step: follow what it did, scribble over free pages, look at everything."""
        self._follow_events()
        for pinned in self.pins_before:
            if pinned.hard and not pinned.pin.active:
                self.touch(pinned.path)
        self._judge_evictions()
        references = self.cache.pool.references
        self.memory.scribble(np.flatnonzero(references == 0).tolist())
        self.look()
        self.failed = False

    def _follow_events(self) -> None:
        for event in self.events:
            if isinstance(event, Stored):
                for page in event.pages.tolist():
                    self.recency[page] = self.step
                if event.pages[-1] in self.naive.pages:
                    self.touch(self.naive.path(int(event.pages[-1])))
            elif isinstance(event, Evicted):
                gone = set(event.pages.tolist())
                for pinned in self.pins:
                    at = [i for i, page in enumerate(pinned.path) if page in gone]
                    del pinned.path[min(at, default=len(pinned.path)) :]
                self.expect["evictions"] += 1
                self.expect["evicted_pages"] += len(gone)

    def _judge_evictions(self) -> None:
        gone: set[int] = set()
        for event in self.events:
            if isinstance(event, Evicted) and event.reason in {"pressure", "asked"}:
                gone.update(event.pages.tolist())
        left = self.evictable()
        if gone & self.soft_before:
            assert not left - self.soft_before, "a soft pin gave way before what is not pinned"
        elif self.eviction == "lru" and gone:
            used = [self.recency[page] for page in left - self.soft_before]
            newest = max(self.recency[page] for page in gone)
            assert newest <= min(used, default=newest), "not least recently used"

    # --- the engine --------------------------------------------------------------------------

    def make_copies(self, *owners: Live) -> None:
        """Make late copies, in order, until none of ``owners`` is left."""
        last = max((i for i, (owner, _) in enumerate(self.late) if owner in owners), default=-1)
        for _, page_copy in self.late[: last + 1]:
            self.memory.copy(page_copy)
        del self.late[: last + 1]

    def family(self, live: Live) -> list[Live]:
        return [other for other in self.live if other.family == live.family]

    def compute(self, live: Live, stop: int) -> None:
        """Compute tokens up to ``stop``, as a model would: copies first, then write."""
        assert not live.copying
        self.make_copies(*self.family(live))
        if stop > live.computed:
            computed = tags(live.tokens[:stop], live.namespace)[live.computed :]
            self.memory.write(live.seq.pages, live.computed, computed)
            live.computed = stop

    # --- looking -----------------------------------------------------------------------------

    def look(self) -> None:
        """Everything that must be true between two steps."""
        self.cache.check()
        for live in self.live:
            assert live.seq.tokens.tolist() == live.tokens
            assert live.seq.num_tokens == len(live.tokens)
            stored = [page in self.naive.pages for page in live.table]
            assert live.seq.num_published == min(sum(stored) * self.page_size, len(live.tokens)), (
                "the published part of the table is what is stored"
            )
            self._look_at_contents(live)
        self._look_at_stored()
        cache = self.cache
        assert cache.tree.num_pages == len(self.naive)
        assert cache.tree.num_evictable == len(self.naive.pages.keys() - self.held(stale=True))
        used = set(self.naive.pages).union(*(live.table for live in self.live))
        used.update(claim.copy.src for claim in self.claims())
        assert cache.pool.num_used == len(used)
        for pinned in self.pins:
            kept = pinned.pin.num_tokens
            if pinned.until <= self.clock.now or not pinned.pin.active:
                assert kept == 0
            else:
                assert kept == len(pinned.path) * self.page_size

    def _look_at_contents(self, live: Live) -> None:
        size = self.page_size
        right = tags(live.tokens[: live.computed], live.namespace)
        found = self.memory.read(live.seq.pages, live.computed)
        wrong = found != right
        unmade = [c for _, c in self.late] + live.waiting()
        table = live.table
        for page_copy in unmade:
            if page_copy.dst in table:
                at = table.index(page_copy.dst) * size
                wrong[at : at + page_copy.tokens] = False
        assert not wrong.any(), f"{live.seq!r} holds wrong content at {np.flatnonzero(wrong)}"

    def _look_at_stored(self) -> None:
        """Every stored page has the right content, and the index agrees with the events."""
        size = self.page_size
        for page in self.naive.pages.values():
            right = tags(page.prefix, page.namespace)[-size:]
            assert (self.memory.slots[page.page] == right).all(), f"{page} has wrong content"
        seen: set[int] = set()
        spaces = self.cache.namespaces()
        for space, count in spaces.items():
            assert count == len(self.naive.of(space))
            for run in self.cache.runs(space):
                seen.update(run.pages.tolist())
                last = self.naive.pages[int(run.pages[-1])]
                first = run.start * size
                assert last.namespace == space
                assert self.naive.path(last.page)[run.start :] == run.pages.tolist()
                tokens = np.array(last.prefix, "<i4").tobytes()
                if self.prefix == "radix":
                    assert run.symbols == tokens[first * 4 :]
                else:
                    keys = chain_keys(root_key(space), tokens, size * 4)
                    assert run.symbols == b"".join(keys[run.start :])
        assert seen == set(self.naive.pages)

    def snapshot(self) -> object:
        """All there is to know about the cache, down to the order of eviction."""
        index = pickle.loads(pickle.dumps(self.cache.tree, -1))
        order = [index.evict(1).tolist() for _ in range(index.num_evictable)]
        runs = {
            space: [
                (run.start, run.pages.tolist(), run.symbols, *run[5:])
                for run in self.cache.runs(space)
            ]
            for space in self.cache.namespaces()
        }
        sequences = [
            (
                s.tokens.tolist(),
                s.pages.tolist(),
                s.num_cached,
                s.num_published,
                s.priority,
                repr(s),
                [claim.copy for claim in s.claims()],
            )
            for s in self.cache.sequences.values()
        ]
        free = (self.cache.pool._head + np.arange(self.cache.pool.num_free)) % self.num_pages
        return (
            order,
            runs,
            sequences,
            self.cache.pool._ring[free].tolist(),
            self.cache.pool.references.tolist(),
            [(p.pin.num_tokens, p.pin.active) for p in self.pins],
            replace(self.cache.counters, out_of_pages=0),
        )

    def closed_event(self) -> Closed:
        (event,) = [event for event in self.events if isinstance(event, Closed)]
        return event
