"""Why blocks of a prompt are missing: in runs, and for tiers that did not answer."""

from __future__ import annotations

import time

from faults import FaultyBackend
from kvkeep.integrations.loss_runs import LossRun, loss_runs, misses_of
from kvkeep.observe.explain.store_reasons import missing
from kvkeep.store import BlockStore, Miss
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.tiers import Loss

KEYS = [bytes([number]) * 32 for number in range(6)]


def test_a_tier_that_was_late_since_a_lookup_may_have_what_was_not_found() -> None:
    far = FaultyBackend(MemoryBackend(1 << 20))
    far.shared = True
    with BlockStore("m", tiers=["memory://1MiB", far]) as store:
        began = time.time()
        assert store.lookup(KEYS) == 0
        assert loss_runs(store, KEYS, began) == [LossRun(len(KEYS), None)]
        far.hang("sizes")
        began = time.time()
        assert store.lookup(KEYS, deadline=0.1) == 0
        ((end, loss),) = loss_runs(store, KEYS, began)
        assert (end, loss and loss[:2]) == (len(KEYS), ("faulty", "late"))
        far.heal()


def test_blocks_of_which_nothing_is_known_get_the_reason_that_is_given() -> None:
    gone = Loss("disk", "evicted", 5.0, "lru")
    runs = [LossRun(2, None), LossRun(4, gone), LossRun(6, None)]
    assert misses_of(runs, 1, 16) == [Miss(48, 80, *gone)]
    unasked = Loss("", "late", 9.0, "not asked")
    found = misses_of(runs, 1, 16, unasked)
    assert found == [Miss(16, 48, *unasked), Miss(48, 80, *gone), Miss(80, 112, *unasked)]
    assert [(one.reason, one.evidence.get("why")) for one in missing(found)] == [
        ("tier_unavailable", "not_asked"),
        ("evicted", None),
        ("tier_unavailable", "not_asked"),
    ]
