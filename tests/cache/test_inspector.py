"""Maps of a cache: what is shown and what is summed up; pins, eviction and search by number."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import InvalidValue, NotCached, OutOfPages, PagedCache
from kvkeep.core.cache import inspector

PAGE = 2


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def store(cache, tokens, namespace="", **options):
    with cache.open(tokens, namespace, **options) as sequence:
        sequence.copies()
        sequence.publish()


asked = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=14), st.sampled_from("ab")),
    min_size=1, max_size=12,
)  # fmt: skip


@given(asked, st.integers(1, 9), st.sampled_from(["radix", "chain"]), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_a_map_leaves_nothing_out(prompts, nodes, prefix, evicted):
    cache = PagedCache(200, PAGE, prefix=prefix)
    for tokens, namespace in prompts:
        store(cache, tokens, namespace)
    cache.evict(evicted)
    for space in (None, "a", "b"):
        spaces = cache.namespaces() if space is None else [space]
        pages = sum(len(run.pages) for one in spaces for run in cache.runs(one))
        runs = sum(1 for one in spaces for _ in cache.runs(one))
        made = cache.map(space, nodes=nodes)
        assert (made.pages, made.runs) == (pages, runs)
        assert sum(node.pages for node in made.nodes) == pages
        assert sum(node.below_runs for node in made.nodes if node.parent is None) == runs
        known = {node.id: node for node in made.nodes}
        assert len(known) == len(made.nodes)
        assert sum(not node.hidden for node in made.nodes) <= nodes
        assert len([node for node in made.nodes if node.hidden]) <= nodes + 1
        below = Counter()
        for node in made.nodes:
            assert node.parent is None or not known[node.parent].hidden
            below[node.parent] += node.below_pages
            assert (node.namespace is not None) == (node.id < 0 and not node.hidden)
            assert (node.count > 0) == node.hidden
        for node in made.nodes:
            if not node.hidden:
                assert node.below_pages == node.pages + below[node.id]
    cache.check()


def test_the_whole_of_a_small_tree_is_shown():
    cache = PagedCache(100, PAGE)
    store(cache, [1, 1, 2, 2, 2, 2, 0])
    store(cache, [1, 1, 3, 3, 0])
    made = cache.map()
    assert [node.hidden for node in made.nodes] == [False] * 4
    (space, head, long, short) = made.nodes
    assert space.namespace is not None
    assert (space.namespace.tenant, space.parent, space.below_runs) == ("", None, 3)
    assert (head.parent, head.pages, head.below_pages) == (space.id, 1, 4)
    assert (long.head.tolist(), short.head.tolist()) == ([2, 2, 2, 2], [3, 3])
    assert (long.parent, short.parent) == (head.id, head.id)
    hidden = cache.map("", nodes=1).nodes[1]
    assert (hidden.count, hidden.pages, hidden.below_runs, hidden.parent) == (2, 3, 2, head.id)
    assert hidden.id < -(2**52)
    assert hidden.head is None


def test_the_chain_index_shows_keys():
    cache = PagedCache(100, PAGE, prefix="chain")
    store(cache, [1, 1, 2, 2, 0])
    run = cache.map("").nodes[0]
    assert (run.head, len(run.key)) == (None, 4)
    view = cache.node(run.id)
    assert (view.tokens, view.page_ids.tolist()) == (None, [0, 1])


def test_a_cache_without_anything():
    cache = PagedCache(10, PAGE)
    for made in (cache.map(), cache.map("x")):
        assert (made.pages, made.runs, made.nodes) == (0, 0, ())
    for number in (1, -1, 0, 2**53):
        with pytest.raises(NotCached, match=f"node {number} is not"):
            cache.node(number)
        with pytest.raises(NotCached):
            cache.map(root=number)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, 10**9])
def test_how_many_are_shown_is_checked(wrong):
    with pytest.raises(InvalidValue, match="nodes"):
        PagedCache(10, PAGE).map(nodes=wrong)


# --- by number -----------------------------------------------------------------------------------


@pytest.fixture
def cache():
    """A shared head, two ends, and something of another."""
    cache = PagedCache(100, PAGE)
    store(cache, [1, 1, 2, 2, 0])
    store(cache, [1, 1, 3, 3, 0])
    store(cache, [5, 5, 0], "other")
    return cache


def ids(cache, namespace=""):
    return {tuple(node.head.tolist()): node.id for node in cache.map(namespace).nodes}


def test_one_run(cache):
    numbers = ids(cache)
    view = cache.node(numbers[3, 3])
    assert (view.start, view.children, view.tokens.tolist()) == (1, 0, [3, 3])
    assert view.path[1:] == (numbers[1, 1],)
    assert view.node.parent == numbers[1, 1]
    space = cache.node(view.path[0])
    assert (space.namespace.tenant, space.node.below_pages, space.children) == ("", 3, 1)
    head = cache.node(numbers[1, 1])
    assert (head.node.below_pages, head.node.below_runs, head.children) == (3, 3, 2)


@given(asked)
@settings(max_examples=100, deadline=None)
def test_a_number_is_never_given_again(prompts):
    cache = PagedCache(200, PAGE)
    before: dict[int, tuple[int, ...]] = {}  # numbers, and the paths to what ends there
    ever = 0
    for tokens, _ in prompts:
        store(cache, tokens)
        shown = cache.map("").nodes
        now = {node.id: tuple(cache.node(node.id).page_ids.tolist()) for node in shown}
        assert all(number in before or number > ever for number in now)
        for number in now.keys() & before.keys():  # cut in two, or grown; it is the same run
            assert set(now[number]) & set(before[number])
        before, ever = now, max(now, default=ever)
        if len(now) > 4:
            cache.evict(1)


def test_uses_are_of_both_halves_and_outlive_what_was_used():
    cache = PagedCache(100, PAGE)
    for _ in range(4):
        store(cache, [1, 1, 2, 2, 3, 3, 0])
    store(cache, [1, 1, 2, 2, 4, 4, 0])

    def hits():
        return {tuple(node.head.tolist()): node.hits for node in cache.map("").nodes}

    assert hits() == {(1, 1, 2, 2): 4, (3, 3): 3, (4, 4): 0}
    cache.evict(2)
    assert hits() == {(1, 1, 2, 2): 4}


# --- changes --------------------------------------------------------------------------------------


@given(asked, st.integers(1, 4), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12))))
@settings(max_examples=150, deadline=None)
def test_changes_between_steps_leave_sums_that_fit_together(prompts, step, changes):
    """Runs are evicted, stored, cut in two and joined again while a map is made."""
    cache = PagedCache(200, PAGE)
    for tokens, namespace in prompts:
        store(cache, tokens, namespace)
    # A request that goes on in the middle of a run cuts it in two.
    held = [cache.open([*tokens[:4], 9], space) for tokens, space in prompts[:4]]
    coming = iter(changes)

    def change(_seconds):
        evicted, length = next(coming, (0, 0))
        cache.evict(evicted)
        store(cache, [length % 3, *range(length)], "a")
        if held:
            held.pop().close(keep=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspector, "_STEP", step)
        patch.setattr(inspector.time, "sleep", change)
        made = cache.map(nodes=9)
    shown = {node.id for node in made.nodes if not node.hidden} | {None}
    assert all(node.parent in shown for node in made.nodes)
    assert sum(node.pages for node in made.nodes) == made.pages
    assert sum(node.below_pages for node in made.nodes if node.parent is None) == made.pages
    assert all(node.below_pages >= node.pages >= 0 for node in made.nodes)
    for sequence in held:
        sequence.close()
    pages = sum(len(run.pages) for space in cache.namespaces() for run in cache.runs(space))
    assert cache.map().pages == pages
    cache.check()


def test_a_front_that_is_joined_again_counts_once(monkeypatch):
    for step in (1, 2, 3):
        cache = PagedCache(100, PAGE)
        store(cache, [1, 1, 2, 2, 3, 3, 0])
        held = [cache.open([1, 1, 9])]
        assert len(list(cache.runs())) == 2
        monkeypatch.setattr(inspector, "_STEP", step)
        monkeypatch.setattr(inspector.time, "sleep", lambda _s, h=held: h and h.pop().close())
        made = cache.map()
        assert made.pages == sum(node.pages for node in made.nodes) == 3


def test_maps_are_made_while_requests_come_and_go(monkeypatch):
    """Steps of two runs, no rest: everything changes under the walks; nothing breaks."""
    monkeypatch.setattr(inspector, "_STEP", 2)
    monkeypatch.setattr(inspector, "_PAUSE_S", 0.0)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    cache = PagedCache(64, PAGE)
    stop = threading.Event()
    errors: list[BaseException] = []
    done: Counter[str] = Counter()

    def until_stopped(name, act):
        def run():
            rng = np.random.default_rng(hash(name) % 1000)
            try:
                while not stop.is_set():
                    try:
                        act(rng)
                        done[name] += 1
                    except (OutOfPages, NotCached):
                        done[f"{name} refused"] += 1
            except BaseException as error:  # noqa: BLE001 - the test raises it again
                errors.append(error)
                stop.set()

        return threading.Thread(target=run, daemon=True)

    def request(rng):
        store(cache, rng.integers(0, 2, rng.integers(1, 20)), "ab"[int(rng.integers(2))])

    def look(rng):
        made = cache.map(nodes=int(rng.integers(1, 20)))
        assert sum(node.pages for node in made.nodes) == made.pages
        if made.nodes:
            number = made.nodes[int(rng.integers(len(made.nodes)))].id
            if rng.random() < 0.5:
                cache.map(root=number, nodes=3)
            view = cache.node(number)
            assert view.tokens is not None
            assert len(view.tokens) == PAGE * len(view.page_ids)

    def change(rng):
        cache.map("a", nodes=int(rng.integers(1, 9)))
        cache.remove(rng.integers(0, 2, rng.integers(1, 9)).tolist(), "a")

    threads = [
        until_stopped(name, act)
        for name, act in (
            ("request 1", request), ("request 2", request), ("look", look), ("change", change),
        )
    ]  # fmt: skip
    try:
        for thread in threads:
            thread.start()
        time.sleep(2)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    assert all(done[name] > 5 for name in ("request 1", "look")), done
    assert done["change"] + done["change refused"] > 5
    cache.check()
    pages = sum(len(run.pages) for space in cache.namespaces() for run in cache.runs(space))
    assert cache.map().pages == pages <= 64
    cache.clear()
    assert cache.map("zzz").nodes == ()
