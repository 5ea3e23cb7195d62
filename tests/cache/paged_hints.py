"""Sessions at random: the machine and its model again, with hints and what must come of them.

The model keeps, for each page, who alone has used it. The cache does so for nodes of its tree, and
only looks where it must.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from paged_base import NAMESPACES, PICK, some_stored
from paged_machine import PagedMachine
from paged_model import PagedModel
from paged_requests import FORM, room

from kvkeep import InvalidValue
from kvkeep.core.events import Evicted
from kvkeep.core.eviction import POLICIES
from prompt_recipes import Recipe, recipes

if TYPE_CHECKING:
    from paged_model import Live

    from kvkeep import Sequence

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
MOST = 4
"""Sessions that the cache may know."""


@dataclass(eq=False)
class NaiveLine:
    """A session that the cache knows."""

    due: float = 0.0
    left: bool = False


class HintedModel(PagedModel):
    """Knows which pages are dead and which are awaited, page by page."""

    def __init__(self, *measures: Any) -> None:
        super().__init__(*measures)
        self.cache.sessions.most = MOST
        self.clock.now = -2.0  # so that a time to come may be 0, or before
        self.lines: OrderedDict[tuple[str, str], NaiveLine] = OrderedDict()
        self.away: list[NaiveLine] = []
        self.owner: dict[int, NaiveLine | None] = {}
        self.dead: set[int] = set()
        self.line_of: dict[int, NaiveLine | None] = {}  # by family of sequences

    # --- who uses what -----------------------------------------------------------------------

    def opening(self, path: list[int], namespace: str, session: str | None) -> None:
        self.line = None if session is None else self.enter((namespace, session))
        self.use(path, self.line)
        self.kept_before = self.kept()

    def enter(self, key: tuple[str, str]) -> NaiveLine:
        line = self.lines.setdefault(key, NaiveLine())
        self.lines.move_to_end(key)
        self.wake(line)
        if len(self.lines) > MOST:
            self.wake(self.lines.popitem(last=False)[1])
        return line

    def opened(self, seq: Sequence) -> None:
        self.line_of[seq.id] = self.line

    def use(self, path: list[int], line: NaiveLine | None) -> None:
        for page in path:
            if self.owner[page] is not line:
                self.owner[page] = None
            if self.owner[page] is None or not self.owner[page].left:
                self.dead.discard(page)

    def published(self, live: Live, path: list[int], start: int, existing: int) -> None:
        line = self.line_of[live.family]
        if existing:
            self.use(path[: start + existing], line)
        for at in range(start + existing, len(path)):
            self.owner[path[at]] = line
            if line is not None and (line.left or (at and path[at - 1] in self.dead)):
                self.dead.add(path[at])

    def own(self, line: NaiveLine) -> set[int]:
        """Living pages that only this session has used."""
        own = {page for page, owner in self.owner.items() if owner is line}
        return (own & self.naive.pages.keys()) - self.dead

    # --- hints -------------------------------------------------------------------------------

    def wake(self, line: NaiveLine) -> None:
        line.due = 0.0
        if line in self.away:
            self.away.remove(line)

    def kept(self) -> set[int]:
        """Pages of sessions that are away, and what lies before them."""
        pages: set[int] = set()
        for line in self.away:
            for page in self.own(line):
                pages.update(self.naive.path(page))
        return pages

    def settle(self) -> None:
        for line in list(self.away):
            if line.due <= self.clock.now:
                self.wake(line)
        while len(self.kept()) > self.num_pages // 2:
            self.wake(self.away[0])

    def hint(self, key: tuple[str, str], what: str, eta: float) -> int:
        """What a hint does, and says."""
        line = self.lines.get(key)
        if line is None:
            return 0
        self.lines.move_to_end(key)
        self.wake(line)
        own = self.own(line)
        if what == "suspend":
            line.due = self.clock.now + min(eta, 3600)
            self.away.append(line)
            self.settle()
            return len(own) if line in self.away else 0
        self.dead.update(own)
        line.left = True
        del self.lines[key]
        return len(own)

    # --- judging -----------------------------------------------------------------------------

    def begin(self, *, closing: Live | None = None) -> None:
        super().begin(closing=closing)
        self.both_settle()
        self.kept_before = self.kept()

    def snapshot(self) -> object:
        self.both_settle()
        return super().snapshot()

    def both_settle(self) -> None:
        """What time has ended is ended now, not at the next eviction or look at the statistics."""
        with self.cache.lock:
            self.cache.sessions.expire()
        self.settle()

    def end(self) -> None:
        super().end()
        self.owner = {page: who for page, who in self.owner.items() if page in self.naive.pages}
        self.dead &= self.naive.pages.keys()
        self.line_of = {live.family: self.line_of[live.family] for live in self.live}
        sessions = self.cache.sessions
        assert len(sessions.owners) == len(self.lines)
        assert sessions.num_dead == len(self.dead), "what is dead"
        assert sessions.awaited.num_pages == len(self.kept()), "what is awaited"

    def _judge_evictions(self) -> None:
        # Gone pages are still in `owner` and `dead`. What lay before one that was awaited is kept
        # no more once that has gone: so it is looked at as it was.
        gone: set[int] = set()
        for event in self.events:
            if isinstance(event, Evicted) and event.reason in {"pressure", "asked"}:
                gone.update(event.pages.tolist())
        if not gone:
            return
        left = self.evictable() - self.soft_before
        if gone & self.soft_before:
            assert not left, "a soft pin gave way before what is not pinned"
            return
        if gone - self.dead:
            assert not left & self.dead, "something living went before what is dead"
        awaited = {page for page in gone - self.dead if self.owner[page] in self.away}
        if awaited:
            assert not left - self.kept_before, "what is awaited went before what is not"
        elif self.eviction == "lru" and gone - self.dead:
            used = [self.recency[page] for page in left - self.kept_before]
            newest = max(self.recency[page] for page in gone - self.dead)
            assert newest <= min(used, default=newest), "not least recently used"


class Hints(PagedMachine):
    """Requests of sessions, and hints about them."""

    model: HintedModel
    make_model = HintedModel

    @initialize(
        page_size=st.sampled_from([2, 1, 3, 4]),
        num_pages=st.sampled_from([8, 6, 12, 16, 4]),
        eviction=st.sampled_from(["lru", "lru", *sorted(POLICIES)]),
        budget=st.integers(0, 5),
        most_live=st.sampled_from([1, 2, 3]),
    )
    def make(
        self, page_size: int, num_pages: int, eviction: str, budget: int, most_live: int
    ) -> None:
        """Pools in which there is room for something to be awaited."""
        super().make(page_size, num_pages, eviction, budget, most_live)

    @precondition(room)
    @rule(recipe=recipes(), form=FORM, namespace=NAMESPACES, session=NAMES)
    def open_in_session(self, recipe: Recipe, form: str, namespace: str, session: str) -> None:
        self.start(recipe, form, namespace, session=session)

    @precondition(room)
    @rule(talk=st.lists(st.tuples(recipes(), NAMES), min_size=1, max_size=4), to=NAMESPACES)
    def talk(self, talk: list[tuple[Recipe, str]], to: str) -> None:
        """Whole requests, one after the other: this is what fills a cache."""
        model = self.model
        for at, (recipe, session) in enumerate(talk):
            if at:
                model.end()
            running = len(model.live)
            self.start(recipe, "list", to, session=session)
            if len(model.live) > running:
                model.end()
                self.compute_and_publish(model.live[-1], 0)
                model.end()
                self.finish(model.live[-1], keep=True)

    @precondition(some_stored)
    @rule(pages=st.integers(1, 3))
    def evict(self, pages: int) -> None:
        model = self.model
        model.begin()
        gone = model.evictable()
        assert self.cache.evict(pages) == len(self.evicted()) == min(pages, len(gone))

    @precondition(lambda self: bool(self.model.lines))
    @rule(
        number=PICK,
        what=st.sampled_from(["suspend", "suspend", "suspend", "close"]),
        eta=st.sampled_from([0.5, 2, 1e9, float("inf")]),
    )
    def hint(self, number: int, what: str, eta: float) -> None:
        """About a session that is known, or one that is not."""
        keys = [*self.model.lines, *self.model.lines, ("", "stranger")]
        self.tell(keys[number % len(keys)], what, eta)

    @precondition(lambda self: bool(self.model.lines))
    @rule(skip=st.integers(0, 3), eta=st.sampled_from([1, 2, 60]))
    def all_go_away(self, skip: int, eta: float) -> None:
        """All but one."""
        keys = list(self.model.lines)
        self.model.begin()
        for key in keys[:skip] + keys[skip + 1 :]:
            self.model.end()
            self.tell(key, "suspend", eta)

    def tell(self, key: tuple[str, str], what: str, eta: float) -> None:
        model = self.model
        model.begin()
        handle = self.cache.session(key[1], key[0])
        assert handle.known == (key in model.lines)
        own = model.own(model.lines[key]) if key in model.lines else set()
        assert handle.num_pages == len(own)
        expected = model.hint(key, what, eta)
        found = handle.suspend(eta) if what == "suspend" else getattr(handle, what)()
        assert found == expected

    @rule(name=st.sampled_from(["", "x" * 257, 7, None, b"a"]))
    def mistake(self, name: object) -> None:
        before = self.model.snapshot()
        self.model.begin()
        with pytest.raises(InvalidValue):
            self.cache.session(name)  # type: ignore[arg-type]
        with pytest.raises(InvalidValue):
            self.cache.open([1], session=name or 1)  # type: ignore[arg-type]
        with pytest.raises(InvalidValue):
            self.cache.session("a").suspend(-1)
        self.nothing_happened(before)


class HintedRadixMachine(Hints):
    prefix = "radix"


class HintedChainMachine(Hints):
    prefix = "chain"
