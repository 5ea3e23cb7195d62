"""A load that does not pay is not made, and one that becomes slow is given up."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given as examples
from hypothesis import strategies as st
from snapshot_kv import open_snapshots, snapshot
from store_kv import GQA, get, open_store, put, quiet

from faults import FaultyBackend
from kvkeep.core.cost import CostModel, PrefillCost, TransferCost
from kvkeep.core.errors import InvalidValue
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.kv.paying import LoadPiece, choose_load
from kvkeep.store.tiers import PassThrough

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvkeep.store import KVStore

TOKENS = list(range(100, 142))  # ten blocks of four tokens, and two more
TOKEN = GQA.bytes_per_token


def model(token_s: float, byte_s: float | None, **more: float) -> CostModel:
    """Computing a token takes ``token_s``, reading a byte from "faulty" ``byte_s``."""
    reads = {} if byte_s is None else {"faulty": TransferCost(seconds_per_byte=byte_s, **more)}
    return CostModel(PrefillCost(seconds_per_token=token_s), reads=reads)


@contextmanager
def behind(cost: CostModel, keep: int = 0) -> Iterator[tuple[KVStore, FaultyBackend]]:
    """A store with the blocks of TOKENS in a tier; memory has the first ``keep`` of them."""
    faulty = FaultyBackend(MemoryBackend(64 << 20))
    with open_store("memory://4MiB", faulty, policy=PassThrough(), cost=cost) as store:
        put(store, TOKENS, wait=True)
        quiet(store)
        row = np.array(TOKENS, np.int32)
        store._tiered.memory.remove(store._names.of(None).full(row)[keep:])
        try:
            yield store, faulty
        finally:
            faulty.heal()
        quiet(store)
        store.check()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_what_is_faster_to_compute_is_not_loaded() -> None:
    with behind(model(1e-3, 1e-3 / TOKEN * 4)) as (store, _faulty):
        choice = store.worth_loading(TOKENS)
        assert not choice.pays
        assert (choice.start, choice.found, choice.tokens) == (0, 40, 0)
        assert choice.seconds == choice.compute_s == pytest.approx(0.042)
        loaded = store.get(TOKENS, pays=True)
        assert loaded == (None, 0)
        miss = loaded.miss
        assert miss is not None
        assert (miss.start, miss.stop, miss.tier, miss.what) == (0, 40, "faulty", "slower")
        assert miss.detail == "expected: loading would have taken 162 ms, computing 42 ms"
        assert [(one.load_s, one.compute_s) for one in choice.misses] == [
            (pytest.approx(0.162), pytest.approx(0.042))
        ]
        assert get(store, TOKENS) == 40, "without `pays`, all is loaded"


def test_what_is_faster_to_load_is_loaded() -> None:
    with behind(model(1.0, 1e-2 / TOKEN)) as (store, _faulty):
        choice = store.worth_loading(TOKENS, 3)
        assert (choice.start, choice.found, choice.tokens) == (3, 40, 40)
        assert choice.load_s == pytest.approx(0.37)
        assert choice.seconds == pytest.approx(0.37 + 2)
        assert choice.misses == ()
        assert get(store, TOKENS, 3, pays=True) == 37


def test_all_is_loaded_as_long_as_computing_is_unknown() -> None:
    with behind(CostModel()) as (store, _):
        choice = store.worth_loading(TOKENS)
        assert choice.pays
        assert choice.tokens == 40
        assert choice.patience_s is None
        assert get(store, TOKENS, pays=True) == 40


def test_an_unknown_tier_is_tried() -> None:
    with behind(model(1.0, None)) as (store, _):
        assert get(store, TOKENS, pays=True) == 40
        quiet(store)
        assert store.cost.reading("faulty").known


def test_a_prefix_in_memory_is_loaded_and_the_rest_is_not() -> None:
    with behind(model(1.0, 1.0), keep=5) as (store, _):
        choice = store.worth_loading(TOKENS)
        assert (choice.tokens, choice.found) == (20, 40)
        _, tokens = loaded = store.get(TOKENS, pays=True)
        assert tokens == 20
        assert loaded.miss is not None
        assert (loaded.miss.start, loaded.miss.stop, loaded.miss.tier) == (20, 40, "faulty")


def test_a_load_that_becomes_slow_is_given_up() -> None:
    """It is expected to take a microsecond, and hangs; computing takes 40 ms."""
    with behind(model(1e-3, 1e-9 / TOKEN)) as (store, faulty):
        faulty.hang("get")
        loaded = store.get(TOKENS, pays=True)
        assert loaded == (None, 0)
        miss = loaded.miss
        assert miss is not None
        assert (miss.start, miss.stop, miss.tier, miss.what) == (0, 40, "faulty", "slower")
        assert miss.detail.startswith("overtaken: ")


def test_reads_that_wait_come_first() -> None:
    with behind(model(1e-3, 0.6e-3 / TOKEN)) as (store, faulty):
        assert store.worth_loading(TOKENS).tokens == 40
        faulty.hang("get")
        reading = threading.Thread(target=get, args=(store, TOKENS))
        reading.start()
        reads = store.cost.reading("faulty")
        until(lambda: reads.queued == 40 * TOKEN)
        assert store.worth_loading(TOKENS).tokens == 0
        faulty.heal()
        reading.join(10)


def test_a_tier_that_was_slow_is_tried_again_in_the_background() -> None:
    # Computing takes 40 s: a read is faster than that on a busy machine, too.
    with behind(model(1.0, 1.0)) as (store, faulty):
        assert store.get(TOKENS, pays=True)[1] == 0
        until(lambda: store.cost.reading("faulty").observations > 0)
        quiet(store)
        assert 1 <= faulty.calls["get"] <= 4, "a few blocks"
        assert store.worth_loading(TOKENS).tokens == 40, "it is fast now"


def test_a_longer_prompt_pays_sooner() -> None:
    """Attention to a loaded prefix is computed all the same; what is behind it tells nothing."""
    with behind(model(1e-3, 0.5e-3 / TOKEN, seconds_fixed=0.03)) as (store, _):
        assert store.worth_loading(TOKENS[:20]).tokens == 0
        assert store.worth_loading(TOKENS[:20], length=4000).tokens == 0
        assert store.worth_loading(TOKENS + [1] * 400).tokens == 0
        assert store.worth_loading(TOKENS, 0, length=42).seconds == pytest.approx(0.042)
        with pytest.raises(InvalidValue, match="length"):
            store.worth_loading(TOKENS, length=3)


@pytest.mark.parametrize("byte_s", [1e-12, 10.0])
def test_a_snapshot_is_loaded_whole_or_not_at_all(byte_s: float) -> None:
    faulty = FaultyBackend(MemoryBackend(64 << 20))
    with open_snapshots(
        "state", "memory://4MiB", faulty, policy=PassThrough(), cost=model(1.0, byte_s)
    ) as store:
        store.put_snapshot(TOKENS, snapshot(store, TOKENS[:8]), wait=True)
        memory = store._tiered.memory
        memory.remove(list(memory.catalogue.blocks()))
        choice = store.worth_loading(TOKENS[:12])
        found = store.get_snapshot(TOKENS[:12], pays=True)
        if byte_s < 1:
            assert choice.tokens == 8
            assert found is not None
        else:
            assert choice.tokens == 0
            assert found is None
            assert [(one.start, one.stop, one.tier) for one in choice.misses] == [(0, 8, "faulty")]
        for tier in store._tiered.tiers:
            tier.reading.wait(10)


@examples(
    st.lists(
        st.tuples(st.integers(1, 50), st.sampled_from(["a", "b"]), st.integers(0, 10_000)),
        max_size=5,
    ),
    st.integers(0, 20),
    st.integers(1, 50),
    st.floats(1e-6, 1e-1),
)
def test_no_choice_is_better(
    parts: list[tuple[int, str, int]], start: int, behind_it: int, token_s: float
) -> None:
    """Of all prefixes that can be loaded, none at all among them."""
    reads = {"a": TransferCost(seconds_per_byte=1e-4), "b": TransferCost(seconds_per_byte=1e-6)}
    cost = CostModel(PrefillCost(seconds_per_token=token_s), reads=reads)
    pieces, stop = [], start
    for tokens, tier, size in parts:
        stop += tokens
        pieces.append(LoadPiece(stop, tier, {tier: size}))
    length = stop + behind_it
    choice = choose_load(cost, start, length, pieces)
    options: dict[int, float] = {start: cost.prefill.prefill_s(start, length)}
    loading = 0.0
    for piece in pieces:
        loading += cost.load_s(piece.tier_bytes)
        options[piece.stop] = loading + cost.prefill.prefill_s(piece.stop, length)
    assert choice.seconds <= min(options.values()) + 0.03 * options[start] + 1e-9
    assert options[choice.tokens] == pytest.approx(choice.seconds)
    assert choice.compute_s == pytest.approx(options[start])
    assert sum(one.stop - one.start for one in choice.misses) == choice.found - choice.tokens
    assert choice.patience_s is not None
    assert choice.patience_s >= choice.load_s - 1e-9
