"""Which blocks of a store end in which runs of a map, and what changes while that is found out."""

from __future__ import annotations

import hashlib
import itertools
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import NotCached, OutOfPages, PagedCache
from kvkeep.core.cache import BlockNames, inspector

PAGE = 2


def root_of(namespace):
    """Sixteen bytes that all names there begin with, and a key."""
    key = hashlib.sha256(b"root of " + namespace.tenant.encode()).digest()
    return b"space " + namespace.tenant.encode().ljust(10) + key


def names_of(namespace, tokens, size):
    """The names of the full blocks of a prompt, told without kvkeep."""
    root = root_of(namespace)
    space, key, names = root[:16], root[16:], []
    for start in range(0, len(tokens) - size + 1, size):
        block = np.asarray(tokens[start : start + size], "<i4").tobytes()
        key = hashlib.sha256(key + block).digest()
        names.append(space + key)
    return names


def store(cache, tokens, namespace=""):
    with cache.open(tokens, namespace) as sequence:
        sequence.copies()
        sequence.publish()


asked = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=14), st.sampled_from("ab")),
    min_size=1, max_size=12,
)  # fmt: skip


@given(asked, st.integers(1, 9), st.integers(1, 20), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_every_run_has_the_blocks_that_end_in_it(prompts, size, nodes, evicted):
    cache = PagedCache(200, PAGE)
    names = BlockNames(size, root_of)
    for tokens, namespace in prompts:
        store(cache, tokens, namespace)
    cache.evict(evicted)
    whole = cache.map(nodes=nodes, blocks=names)
    maps = [whole, cache.map("a", nodes=nodes, blocks=names)]
    maps += [cache.map(root=n.id, nodes=nodes, blocks=names) for n in whole.nodes if not n.hidden]
    for node in itertools.chain.from_iterable(made.nodes for made in maps):
        if node.hidden:
            assert node.blocks is None
            continue
        view = cache.node(node.id)
        start = view.start * PAGE
        path = [cache.node(above).tokens for above in view.path if above > 0]
        tokens = np.concatenate([*path, view.tokens])
        assert node.blocks.before == start % size
        assert [*node.blocks.names] == names_of(view.namespace, tokens, size)[start // size :]


def test_nothing_is_told_that_was_not_asked_or_cannot_be_known():
    chain, radix = PagedCache(9, PAGE, prefix="chain"), PagedCache(9, PAGE)
    names = BlockNames(2, root_of)
    for cache in (chain, radix):
        store(cache, [1, 1, 2, 2, 0])
    assert {node.blocks for node in chain.map(blocks=names).nodes} == {None}
    assert {node.blocks for node in radix.map().nodes} == {None}
    _, run = radix.map(blocks=names).nodes
    assert len(run.blocks.names) == 2


@pytest.mark.parametrize("moment", range(1, 12))
def test_a_run_that_is_split_meanwhile(monkeypatch, moment):
    """Between any two steps: no name is wrong, and what is not known is not told."""
    cache = PagedCache(100, PAGE)
    long = [1] * 8
    store(cache, [*long, 2, 2, 0])
    store(cache, [*long, 3, 3, 0])
    head = cache.map("").nodes[0].id
    rests = 0

    def split(seconds):
        nonlocal rests
        rests += 1
        if rests == moment:
            store(cache, [1, 1, 1, 1, 4, 4, 0])

    monkeypatch.setattr(inspector, "_STEP", 1)
    monkeypatch.setattr(inspector.time, "sleep", split)
    (space,) = cache.namespaces()
    right = {
        name
        for prompt in ([*long, 2, 2], [*long, 3, 3], [1, 1, 1, 1, 4, 4])
        for name in names_of(space, prompt, 2)
    }
    for root in (None, head):
        made = cache.map("" if root is None else None, root=root, blocks=BlockNames(2, root_of))
        told = [name for node in made.nodes if node.blocks for name in node.blocks.names]
        assert {*told} <= right
        assert len({*told}) == len(told)


def test_names_while_requests_come_and_go(monkeypatch):
    """Every name that is told is one of a prompt that there was, and where that block ends."""
    monkeypatch.setattr(inspector, "_STEP", 2)
    monkeypatch.setattr(inspector, "_PAUSE_S", 0.0)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    size = 3
    cache = PagedCache(48, PAGE)
    names = BlockNames(size, root_of)
    spaces = [cache.open([0, 0, 0], tenant) for tenant in "ab"]
    levels = {
        names_of(sequence.namespace, tokens, size)[-1]: count
        for sequence in spaces
        for count in (1, 2, 3)
        for tokens in itertools.product((0, 1), repeat=size * count)
    }
    for sequence in spaces:
        sequence.close()
    stop = threading.Event()
    errors: list[BaseException] = []
    told = 0

    def requests(seed):
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            try:
                store(cache, rng.integers(0, 2, rng.integers(1, 11)), "ab"[int(rng.integers(2))])
            except OutOfPages:
                continue

    def look():
        nonlocal told
        rng = np.random.default_rng(0)
        while not stop.is_set():
            made = cache.map(nodes=int(rng.integers(1, 20)), blocks=names)
            stops = {None: 0}
            for node in made.nodes:
                stops[node.id] = stops[node.parent] + node.pages * PAGE
                if node.blocks is None:
                    continue
                start = stops[node.parent]
                found = [levels[name] for name in node.blocks.names]
                assert found == [*range(start // size + 1, start // size + 1 + len(found))]
                told += len(found)
            if made.nodes:
                try:
                    some = made.nodes[int(rng.integers(len(made.nodes)))].id
                    for node in cache.map(root=some, nodes=5, blocks=names).nodes:
                        assert node.blocks is None or {*node.blocks.names} <= {*levels}
                except NotCached:
                    continue

    def watched(act, *given):
        def run():
            try:
                act(*given)
            except BaseException as error:  # noqa: BLE001 - the test raises it again
                errors.append(error)
                stop.set()

        return threading.Thread(target=run, daemon=True)

    threads = [watched(requests, 1), watched(requests, 2), watched(look)]
    try:
        for thread in threads:
            thread.start()
        end = time.monotonic() + 60
        time.sleep(2)
        while told <= 100 and not stop.is_set() and time.monotonic() < end:
            time.sleep(0.05)  # a busy machine takes longer to tell as many
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]
    assert told > 100
    cache.check()
