"""The life of a request, as rules: what engines do with a sequence."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from paged_base import NAMESPACES, PICK, PagedBase, some_live
from paged_model import Live

from kvkeep import OutOfPages
from prompt_recipes import FORMS, Recipe, recipes

FORM = st.sampled_from(sorted(FORMS))
TOKENS = st.lists(st.integers(0, 2), max_size=5)
LENGTH = st.integers(0, 63)
KEEP = st.sampled_from([True, True, False])


def room(self: PagedBase) -> bool:
    return len(self.model.live) < self.most_live


class Requests(PagedBase):
    @precondition(room)
    @rule(recipe=recipes(), form=FORM, namespace=NAMESPACES, priority=st.integers(0, 2))
    def open(self, recipe: Recipe, form: str, namespace: str, priority: int) -> None:
        self.start(recipe, form, namespace, priority=priority)

    def start(self, recipe: Recipe, form: str, namespace: str, **how: Any) -> None:
        """``how``: what else is said to `PagedCache.open`."""
        model, size = self.model, self.page_size
        prompt = self.prompt(recipe)
        match = model.naive.match(prompt[:-1], namespace)
        found = self.cache.match(prompt[:-1], namespace)
        full, partly = len(match.pages), match.partial_tokens
        needed = -(-len(prompt) // size) - full
        others = model.evictable() - set(match.pages)
        free, available = model.free, model.free + len(others)
        if needed > available:
            before = model.unchanged()
            model.begin()
            with pytest.raises(OutOfPages) as short:
                self.cache.open(FORMS[form](prompt), namespace, **how)
            self.refused(short.value, needed, available, before)
            return
        given_up = partly > 0 and needed > free + len(others - {found.partial_page})
        if given_up and needed > free:
            partly = 0

        model.begin()
        model.opening(match.pages, namespace, how.get("session"))
        seq = self.cache.open(FORMS[form](prompt), namespace, **how)
        model.opened(seq)
        assert seq.num_cached == full * size + partly
        assert seq.pages[:full].tolist() == match.pages
        live = Live(seq, namespace, prompt.copy(), seq.num_cached, seq.id)
        fresh = live.table[full:]
        assert len(fresh) == needed
        assert live.waiting() == ([(found.partial_page, fresh[0], partly)] if partly else [])
        assert len(self.evicted()) == max(0, needed - free), "evicts what is needed and no more"
        model.memory.scribble(fresh)
        model.live.append(live)
        model.touch(match.pages)
        model.expect["opened"] += 1
        model.expect["prompt_tokens"] += len(prompt)
        model.expect["hit_tokens"] += seq.num_cached
        model.expect["partial_hits"] += partly > 0
        model.expect["partial_hits_given_up"] += given_up
        model.expect["copies"] += partly > 0

    @precondition(some_live)
    @rule(number=PICK, tokens=TOKENS, form=FORM, single=st.booleans())
    def append(self, number: int, tokens: list[int], form: str, single: bool) -> None:
        live = self.pick(number)
        if single:
            tokens = [*tokens, 1][:1]
            self.add(live, tokens, tokens[0])
        else:
            self.add(live, tokens, FORMS[form](tokens))

    @precondition(some_live)
    @rule(number=PICK, length=LENGTH)
    def truncate(self, number: int, length: int) -> None:
        self.cut(self.pick(number), length)

    @precondition(some_live)
    @rule(number=PICK, length=LENGTH, tokens=TOKENS)
    def go_another_way(self, number: int, length: int, tokens: list[int]) -> None:
        """Back to an earlier point, and on from there with other tokens."""
        live = self.pick(number)
        self.cut(live, length)
        self.model.end()
        self.add(live, tokens, tokens)

    @precondition(some_live)
    @rule(number=PICK, late=st.booleans())
    def copies(self, number: int, late: bool) -> None:
        self.hand_over(self.pick(number), late=late)

    @precondition(some_live)
    @rule(number=PICK, length=LENGTH)
    def compute(self, number: int, length: int) -> None:
        live = self.pick(number)
        self.take_copies(live)
        self.model.begin()
        self.model.compute(live, min(live.computed + length, len(live.tokens)))

    @precondition(some_live)
    @rule(number=PICK, missing=st.sampled_from([0, 0, 0, 1, 2, 5]), default=st.booleans())
    def publish(self, number: int, missing: int, default: bool) -> None:
        self.compute_and_publish(self.pick(number), missing, default=default)

    @precondition(some_live)
    @rule(number=PICK, keep=KEEP, early=st.sampled_from([False, False, False, True]))
    def close(self, number: int, keep: bool, early: bool) -> None:
        """Most requests end when all is computed and published, some ``early``."""
        live = self.pick(number)
        if not early:
            self.compute_and_publish(live, 0)
            self.model.end()
        self.finish(live, keep=keep)

    @precondition(lambda self: some_live(self) and room(self))
    @rule(number=PICK, again=st.booleans())
    def fork(self, number: int, again: bool) -> None:
        """``again``: the fork's engine computes anew what was not cached when it was opened."""
        model = self.model
        live = self.pick(number)
        waiting = live.waiting()
        model.begin()
        seq = live.seq.fork()
        assert seq.num_cached == max(live.seq.num_cached, live.seq.num_published)
        assert seq.num_cached <= live.computed
        assert seq.pages.tolist() == live.table
        computed = seq.num_cached if again else live.computed
        other = Live(seq, live.namespace, live.tokens.copy(), computed, live.family)
        assert other.waiting() == waiting
        model.live.append(other)
        model.expect["forked"] += 1

    # --- what rules are made of --------------------------------------------------------------

    def add(self, live: Live, tokens: list[int], given: object) -> None:
        model = self.model
        at, offset = divmod(len(live.tokens), self.page_size)
        table = live.table
        copied = bool(offset and tokens and model.needed_by_others(live, table[at], offset))
        needed = at - (-(offset + len(tokens)) // self.page_size) - len(table) + copied
        free, available = model.free, model.free + len(model.evictable())
        if needed > available:
            before = model.unchanged()
            model.begin()
            with pytest.raises(OutOfPages) as short:
                live.seq.append(given)
            self.refused(short.value, needed, available, before)
            return
        model.begin()
        live.seq.append(given)
        live.tokens += tokens
        fresh = live.table[len(table) :]
        if copied:
            fresh.append(live.table[at])
            assert live.waiting()[-1] == (table[at], live.table[at], offset)
            table[at] = live.table[at]
        assert live.table[: len(table)] == table
        assert len(fresh) == needed
        assert len(self.evicted()) == max(0, needed - free), "evicts what is needed and no more"
        model.memory.scribble(fresh)
        model.expect["copies"] += copied
        live.own &= set(live.table)

    def cut(self, live: Live, length: int) -> None:
        model = self.model
        length %= len(live.tokens) + 1
        model.make_copies(live)
        cached, table = live.seq.num_cached, live.table
        model.begin()
        live.seq.truncate(length)
        assert live.table == table[: -(-length // self.page_size)]
        assert live.seq.num_cached == min(cached, length)
        del live.tokens[length:]
        live.computed = min(live.computed, length)
        live.own &= set(live.table)

    def take_copies(self, live: Live) -> None:
        if live.copying:
            self.hand_over(live, late=False)
            self.model.end()

    def hand_over(self, live: Live, *, late: bool) -> None:
        """``late``: the engine makes the copies as late as it may."""
        model = self.model
        model.make_copies(live)
        model.begin()
        waiting = live.waiting()
        live.made = live.seq.copies()
        assert live.made == waiting
        assert not live.copying
        others = [other.waiting() for other in model.live]
        assert not set(live.made) & set(chain.from_iterable(others)), "handed over twice"
        model.late += [(live, page_copy) for page_copy in live.made]
        if not late:
            model.make_copies(live)

    def compute_and_publish(self, live: Live, missing: int, *, default: bool = True) -> None:
        model, size = self.model, self.page_size
        self.take_copies(live)
        computed = max(live.computed, len(live.tokens) - missing)
        model.compute(live, computed)
        everything = default and computed == len(live.tokens)
        table = live.table
        start, stop = -(-live.seq.num_published // size), computed // size
        prefixes = {page.prefix for page in model.naive.of(live.namespace)}
        duplicates = sum(tuple(live.tokens[: at * size]) in prefixes
                         for at in range(start + 1, stop + 1))  # fmt: skip
        family = [other for other in model.family(live) if other is not live]
        sharing = {other: _sharing(other.table, table, start, stop) for other in family}

        model.begin()
        published = live.seq.publish(None if everything else computed)
        live.made = []
        assert published == live.seq.num_published
        assert published == min(max(start, stop) * size, len(live.tokens))
        now = live.table
        assert now[:start] == table[:start]
        assert now[start + duplicates :] == table[start + duplicates :]
        for at in range(stop):
            prefix = model.naive.pages[now[at]].prefix
            assert prefix == tuple(live.tokens[: (at + 1) * size])
        for other, same in sharing.items():
            assert other.table[start : start + same] == now[start : start + same]
            other.computed = max(other.computed, other.seq.num_published)
            if same:
                other.own.clear()
        model.published(live, now[:stop], start, duplicates)
        new = set(now[start + duplicates : stop])
        if duplicates:  # another's pages come after what it stored itself: that is needed now
            live.own.clear()
        live.own |= new
        model.expect["stored_pages"] += len(new)
        model.expect["duplicate_pages"] += duplicates

    def finish(self, live: Live, *, keep: bool) -> None:
        model = self.model
        model.make_copies(live)
        stored = [page for page in live.table if page in model.naive.pages]
        gone = [] if keep else model.forgotten(live, stored)
        model.begin(closing=live)
        live.seq.close(keep=keep)
        model.live.remove(live)
        model.closed.append(live)
        assert sorted(self.evicted()) == sorted(gone)
        event = model.closed_event()
        assert (event.sequence, event.tokens) == (live.seq.id, len(live.tokens))
        assert event.stored_pages == len(stored) - len(gone)
        model.touch(stored)
        model.expect["closed"] += 1


def _sharing(table: list[int], own: list[int], start: int, stop: int) -> int:
    """How many pages from ``start`` on two tables have in common."""
    same = 0
    while start + same < min(stop, len(table)) and table[start + same] == own[start + same]:
        same += 1
    return same
