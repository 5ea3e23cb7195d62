"""Flush and close: what they promise, how long they take, and that nothing is left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tier_bench import get, name, put, settle, threads_of

if TYPE_CHECKING:
    from tier_bench import Bench


def test_no_thread_outlives_the_close_of_healthy_tiers(bench: Bench) -> None:
    for _ in range(5):
        places = [bench.memory(64), bench.disk()]
        store = bench.store(16, *places)
        put(store, range(12))
        settle(store)
        store.front.remove([name(number) for number in range(12)])
        for place in places:
            place.slow(0.03, "get", "sizes")
        handle = store.prefetch(lambda: ([name(n) for n in range(30)], [3968] * 30))
        get(store, range(12), deadline=0.01)
        names = [tier.name for tier in store.tiers]
        assert threads_of(*names)
        assert store.close()
        assert threads_of(*names, "prefetch") == []
        assert handle.done
