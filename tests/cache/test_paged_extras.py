"""Prompts with bytes at token positions: shared as far as tokens and bytes are the same."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvkeep import InvalidValue, OutOfPages, PagedCache
from kvkeep.core.events import Stored
from kvkeep.core.extras import as_extras, signed
from kvkeep.core.prefix.marks import Marks
from kvkeep.core.tokens import as_tokens
from naive_cache import NaiveCache

if TYPE_CHECKING:
    from kvkeep import Sequence

SIZE = 4
PROMPT = list(range(30))
CAT, DOG = b"a cat", b"a dog"

both = pytest.mark.parametrize("prefix", ["radix", "chain"])


def cached(prefix: str = "radix", **options: Any) -> PagedCache:
    return PagedCache(64, SIZE, prefix=prefix, **options)


def keep(cache: PagedCache, tokens: list[int], **how: Any) -> None:
    with cache.open(tokens, **how) as sequence:
        sequence.copies()
        sequence.publish()


@both
def test_other_bytes_share_only_what_lies_before(prefix: str) -> None:
    cache = cached(prefix)
    keep(cache, PROMPT, extra=[(13, CAT)])
    before = 13 if prefix == "radix" else 12
    assert cache.match(PROMPT, extra=[(13, CAT)]).num_tokens == 28
    for other in (
        None, [(13, DOG)], [(13, CAT), (13, CAT)], [(13, CAT), (14, CAT)], [(12, CAT)],
    ):  # fmt: skip
        found = cache.match(PROMPT, extra=other).num_tokens
        assert found == min(before, 12 if other and other[0][0] == 12 else before) or (
            other == [(13, CAT), (14, CAT)] and found == (14 if prefix == "radix" else 12)
        )
    with cache.open(PROMPT, extra=[(13, DOG)]) as sequence:
        assert sequence.num_cached == before
    with cache.open(PROMPT, extra=[(13, CAT)]) as sequence:
        assert sequence.num_cached == 28
    cache.check()


@both
def test_tokens_are_shown_as_they_were_given(prefix: str) -> None:
    cache = cached(prefix)
    stored: list[Stored] = []
    cache.subscribe(lambda event: stored.append(event) if isinstance(event, Stored) else None)
    sequence = cache.open(PROMPT[:6], extra=[(5, CAT)])
    sequence.append(PROMPT[6:], extra=[(1, DOG)])
    sequence.append(PROMPT[0], extra=[(0, CAT)])
    fork = sequence.fork()
    digests = as_extras([(5, CAT), (7, DOG), (30, CAT)], 31)
    for one in (sequence, fork):
        assert one.tokens.tolist() == [*PROMPT, 0]
        assert one.extras == digests
    fork.truncate(7)
    fork.append(PROMPT[7:])
    assert fork.extras == digests[:1]
    sequence.publish()
    sequence.close()
    assert (sequence.tokens.tolist(), sequence.extras) == ([*PROMPT, 0], digests)
    fork.copies()
    fork.publish()
    assert fork.num_published == 28
    fork.close()
    first, second = stored
    assert first.tokens.tolist() == PROMPT[:28]
    assert first.extras == digests[:2]
    assert (second.tokens.tolist(), second.extras) == (PROMPT[4:28], as_extras([(1, CAT)], 2))
    assert cache.match(PROMPT, extra=[(5, CAT), (7, DOG)]).num_tokens == 28
    assert cache.match(PROMPT, extra=[(5, CAT)]).num_tokens == 28
    cache.check()


def test_no_reader_of_the_tree_sees_anything_but_tokens() -> None:
    cache = cached()
    keep(cache, PROMPT, extra=[(13, CAT)])
    keep(cache, PROMPT, extra=[(13, DOG)])
    extras = [run.extras for run in cache.runs()]
    assert sorted(len(some) for some in extras) == [0, 1, 1], "a shared run and two ends"
    assert all((run.tokens >= 0).all() for run in cache.runs() if run.tokens is not None)
    top, *nodes = cache.map().nodes
    assert top.namespace is not None
    seen_extras: list[bytes] = []
    for node in nodes:
        assert node.head is not None
        view = cache.node(node.id)
        assert view.tokens is not None
        assert (node.head >= 0).all()
        assert (view.tokens >= 0).all()
        seen_extras += [one.digest for one in view.extras]
    both = as_extras([(0, CAT), (0, DOG)], 1)
    assert sorted(seen_extras) == sorted(one.digest for one in both)
    assert "-" not in "".join(str(run.tokens) for run in cache.runs())


def test_a_refused_request_leaves_no_mark() -> None:
    cache = PagedCache(4, SIZE)
    with pytest.raises(OutOfPages):
        cache.open(PROMPT, extra=[(1, CAT)])
    with cache.open(PROMPT[:12]) as sequence, pytest.raises(OutOfPages):
        sequence.append(PROMPT, extra=[(1, CAT)])
    cache.match(PROMPT, extra=[(1, CAT)])
    assert not cache.tree.marks.living


@both
@pytest.mark.parametrize("wrap", [list, np.array, lambda row: np.array(row, np.int32)])
def test_negative_tokens_of_callers_are_refused_whatever_is_stored(prefix: str, wrap: Any) -> None:
    cache = cached(prefix)
    keep(cache, PROMPT, extra=[(13, CAT)])
    (mark,) = cache.tree.marks.living
    forged = wrap([*PROMPT[:13], mark, *PROMPT[14:]])
    for call in (cache.open, cache.match, cache.pin):
        with pytest.raises(InvalidValue, match="position 13"):
            call(forged)
    with cache.open(PROMPT[:13]) as sequence, pytest.raises(InvalidValue):
        sequence.append(wrap([mark]))
    cache.check()


@both
def test_wrong_extras_change_nothing(prefix: str) -> None:
    cache = cached(prefix)
    sequence = cache.open(PROMPT)
    for call in (
        lambda: cache.open(PROMPT, extra=[(30, CAT)]),
        lambda: cache.match(PROMPT, extra=[(1, "text")]),
        lambda: cache.pin(PROMPT, extra=[(-1, CAT)]),
        lambda: sequence.append(1, extra=[(1, CAT)]),
        lambda: sequence.append([], extra=[(0, CAT)]),
    ):
        with pytest.raises(InvalidValue):
            call()
    assert sequence.num_tokens == 30
    cache.check()


@both
def test_policies_and_curves_tell_bytes_apart(prefix: str) -> None:
    """A hit that only tokens would make is none; one that bytes make is one, also when marks
    are given out anew.
    """
    cache = PagedCache(16, SIZE, prefix=prefix, eviction="returns", what_if=1.0)
    for number in range(40):
        with cache.open(PROMPT, extra=[(0, b"%d" % number)]) as sequence:
            assert sequence.num_cached == 0
            sequence.copies()
            sequence.publish()
    assert all(point.hit_rate == 0 for point in cache.what_if())
    cache.check()
    again = PagedCache(8, SIZE, prefix=prefix, what_if=1.0)
    for number in range(40):  # two by turns, and room for one
        keep(again, PROMPT, extra=[(0, b"%d" % (number % 2))])
    (point,) = again.what_if([16])
    assert point.hit_rate > 0.8
    again.check()


def test_ids_of_marks_begin_anew_and_pass_over_those_in_use() -> None:
    marks = Marks()
    row = as_tokens([7, 8])
    first = marks.marked(row, as_extras([(0, CAT)], 2))
    assert first.tolist() == [-1, 8]
    marks._next = -(2**31)
    second = marks.marked(row, as_extras([(0, DOG), (1, CAT)], 2))
    assert second.tolist() == [-(2**31), -2], "-1 still stands for the other"
    assert marks.plain(second)[0].tolist() == [7, 8]


# --- the machine -----------------------------------------------------------------------------

SYMBOLS = st.lists(st.integers(0, 5), max_size=14)
"""0 and 1 are tokens; 2 … 5 are token 0 or 1 with the one or the other bytes."""
PICK = st.integers(0, 7)


def spoken(symbols: list[int]) -> tuple[list[int], list[tuple[int, bytes]]]:
    tokens = [symbol % 2 for symbol in symbols]
    extra = [(at, b"%d" % (symbol // 2)) for at, symbol in enumerate(symbols) if symbol > 1]
    return tokens, extra[::-1]


def seen(symbols: list[int]) -> list[int]:
    """As the naive model has them."""
    tokens, extra = spoken(symbols)
    found: list[int] = signed(as_tokens(tokens), as_extras(extra, len(tokens))).tolist()
    return found


class ExtrasMachine(RuleBasedStateMachine):
    """Against whole lists of (token, bytes): reuse is their longest common prefix."""

    prefix = "radix"

    @initialize(
        size=st.sampled_from([1, 2, 3, 4]), pages=st.sampled_from([6, 8, 12]),
        eviction=st.sampled_from(["lru", "priority", "returns"]),
    )  # fmt: skip
    def make(self, size: int, pages: int, eviction: str) -> None:
        self.cache = PagedCache(pages, size, prefix=self.prefix, eviction=eviction)
        self.naive = NaiveCache(size, exact=self.prefix == "radix")
        self.cache.subscribe(self.naive)
        self.live: list[tuple[Sequence, list[int]]] = []
        self.prompts: list[list[int]] = [[0]]

    def prompt(self, base: int, cut: int, more: list[int]) -> list[int]:
        known = self.prompts[base % len(self.prompts)]
        prompt = (known[: cut % (len(known) + 1)] + more)[:20] or [2]
        self.prompts = [*self.prompts[-8:], prompt]
        return prompt

    @precondition(lambda self: len(self.live) < 4)
    @rule(base=PICK, cut=st.integers(0, 31), more=SYMBOLS)
    def open(self, base: int, cut: int, more: list[int]) -> None:
        prompt = self.prompt(base, cut, more)
        tokens, extra = spoken(prompt)
        match = self.naive.match(seen(prompt)[:-1])
        full = len(match.pages) * self.cache.page_size
        found = self.cache.match(tokens, extra=extra)
        whole = self.naive.match(seen(prompt))
        assert found.pages.tolist() == whole.pages
        assert found.partial_tokens == whole.partial_tokens
        try:
            sequence = self.cache.open(tokens, extra=extra)
        except OutOfPages:
            return
        given_up = sequence.num_cached == full
        assert sequence.num_cached == full + match.partial_tokens or given_up
        self.live.append((sequence, prompt))

    @precondition(lambda self: self.live)
    @rule(pick=PICK, more=SYMBOLS)
    def append(self, pick: int, more: list[int]) -> None:
        sequence, row = self.live[pick % len(self.live)]
        tokens, extra = spoken(more)
        try:
            if len(more) == 1:
                sequence.append(tokens[0], extra=extra)
            else:
                sequence.append(tokens, extra=extra or None)
        except OutOfPages:
            return
        row += more

    @precondition(lambda self: self.live)
    @rule(pick=PICK, length=st.integers(0, 31))
    def truncate(self, pick: int, length: int) -> None:
        sequence, row = self.live[pick % len(self.live)]
        length %= len(row) + 1
        sequence.truncate(length)
        del row[length:]

    @precondition(lambda self: 0 < len(self.live) < 4)
    @rule(pick=PICK)
    def fork(self, pick: int) -> None:
        sequence, row = self.live[pick % len(self.live)]
        self.live.append((sequence.fork(), row.copy()))

    @precondition(lambda self: self.live)
    @rule(pick=PICK, missing=st.sampled_from([0, 0, 1, 5]))
    def publish(self, pick: int, missing: int) -> None:
        sequence, row = self.live[pick % len(self.live)]
        sequence.copies()
        sequence.publish(max(0, len(row) - missing))
        full = sequence.num_published // self.cache.page_size
        assert len(self.naive.match(seen(row)).pages) >= full

    @precondition(lambda self: self.live)
    @rule(pick=PICK, keep=st.booleans())
    def close(self, pick: int, keep: bool) -> None:
        sequence, _ = self.live.pop(pick % len(self.live))
        sequence.close(keep=keep)

    @rule(pages=st.integers(0, 4))
    def evict(self, pages: int) -> None:
        self.cache.evict(pages)

    @rule(base=PICK)
    def pin_and_unpin(self, base: int) -> None:
        tokens, extra = spoken(self.prompts[base % len(self.prompts)])
        if self.cache.match(tokens, extra=extra).pages.size:
            self.cache.unpin(self.cache.pin(tokens, extra=extra))

    @invariant()
    def everything_agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        for sequence, row in self.live:
            tokens, extra = spoken(row)
            assert sequence.tokens.tolist() == tokens
            assert sequence.extras == as_extras(extra, len(tokens))
        for run in self.cache.runs():
            if run.tokens is None:
                continue
            last = self.naive.pages[int(run.pages[-1])].prefix
            own = last[run.start * self.cache.page_size :]
            assert signed(run.tokens, run.extras).tolist() == list(own)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for sequence, _ in self.live:
                sequence.close()
            self.cache.clear()
            self.cache.check()
            assert not self.cache.tree.marks.living
            assert self.cache.stats().pages_free == self.cache.num_pages


class ChainExtrasMachine(ExtrasMachine):
    prefix = "chain"


TestExtras = ExtrasMachine.TestCase
TestChainExtras = ChainExtrasMachine.TestCase
for case in (TestExtras, TestChainExtras):
    case.settings = settings(
        max_examples=80 * (20 if os.environ.get("KVKEEP_FUZZ") == "long" else 1),
        stateful_step_count=40,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
del case  # it would be collected once more
