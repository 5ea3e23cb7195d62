"""The ledger of tenants against what the cache itself says."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from kvkeep.core.cache import PagedCache
from kvkeep.core.errors import InvalidValue, OutOfPages
from kvkeep.core.keys import Namespace
from kvkeep.observe.usage import (
    LoadReport,
    PromptComputed,
    PromptStored,
    RequestAdmitted,
    RequestEnded,
    RequestLoaded,
    RequestOrigin,
    RequestRecord,
    TenantLedger,
)
from kvkeep.observe.usage.pages import PageOwners

PAGE = 4


def record(tenant, tokens=10):
    origin = RequestOrigin("id")
    return RequestRecord(origin, np.zeros(tokens, np.int32), Namespace(tenant=tenant))


def lines(ledger):
    return {line.tenant: line for line in ledger.report()}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("most", [4, 100])
def test_what_is_kept_is_what_the_cache_holds(seed, most):
    """After each step the cache itself says how many pages each tenant has."""
    draw = random.Random(seed)
    cache, owners = PagedCache(40, PAGE), PageOwners(40)
    cache.subscribe(owners.see)
    ledger = TenantLedger(PAGE, most=most, named=["t1"])
    owners.changed = ledger.pages_changed
    stored: Counter[str] = Counter()
    for _ in range(300):
        tenant = f"t{draw.randrange(12)}"
        step = draw.random()
        if step < 0.8:
            begin = draw.randrange(5) * 1000
            tokens = np.arange(begin, begin + draw.randrange(4, 60), dtype=np.int32)
            try:
                with cache.open(tokens, Namespace(tenant=tenant)) as sequence:
                    sequence.copies()
                    before = cache.stats().stored_pages
                    sequence.publish()
                    stored[tenant] += cache.stats().stored_pages - before
            except OutOfPages:
                continue
            ledger.see(RequestAdmitted(record(tenant, len(tokens)), 0, 0))
        elif step < 0.9:
            cache.evict(draw.randrange(1, 10))
        else:
            cache.clear(Namespace(tenant=tenant))
        held = Counter({space.tenant: pages for space, pages in cache.namespaces().items()})
        report = ledger.report()
        assert report[-1].tenant is None
        assert len(report) <= most + 2
        assert sum(line.pool_tokens for line in report) == sum(held.values()) * PAGE
        for line in report[:-1]:
            assert line.pool_tokens == held[line.tenant] * PAGE
    found = lines(ledger)
    written = sum(line.counts.written_tokens for line in found.values())
    assert written == sum(stored.values()) * PAGE
    if most == 100:
        for tenant, pages in stored.items():
            assert found[tenant].counts.written_tokens == pages * PAGE


def test_requests_count_for_their_tenant():
    ledger = TenantLedger(PAGE)
    one = record("a", 100)
    ledger.see(RequestAdmitted(one, 0, 30))
    ledger.see(RequestLoaded(one, LoadReport(50, ((30, 70, "disk"),))))
    ledger.see(PromptComputed(one, 20, 0.1))
    ledger.see(PromptComputed(one, 10, 0.1))
    ledger.see(PromptStored(one, 64, 0.1))
    ledger.see(RequestEnded(one, "done", 7, 0.1, 0.2))
    ledger.see(RequestAdmitted(record("", 5), 0, 0))
    found = lines(ledger)
    counts = found["a"].counts
    assert (counts.requests, counts.prompt_tokens) == (1, 100)
    assert (counts.read_tokens, counts.loaded_tokens, counts.computed_tokens) == (70, 40, 30)
    assert (counts.generated_tokens, counts.stored_tokens) == (7, 64)
    assert found[""].counts.prompt_tokens == 5
    assert found[None].counts.requests == 0


def test_what_tiers_keep_is_that_of_the_last_look():
    ledger = TenantLedger(PAGE)
    ledger.see(RequestAdmitted(record("a"), 0, 0))
    ledger.tiers_keep({"a": 100.0}, 7.0)
    ledger.tiers_keep({"a": 50.0, "unknown": 3.0})
    found = lines(ledger)
    assert (found["a"].tier_tokens, found[None].tier_tokens) == (50, 3)


def test_no_series_of_metrics_ever_falls_and_none_changes_its_name():
    draw = random.Random(3)
    ledger = TenantLedger(PAGE, most=30, named=["named"])
    before: dict[str | None, object] = {}
    for step in range(3000):
        few = draw.random() < 0.5
        tenant = f"t{draw.randrange(4)}" if few else f"made up {draw.randrange(500)}"
        ledger.see(RequestAdmitted(record(tenant, draw.randrange(1, 100)), 0, 1))
        ledger.pages_changed(tenant, 1)
        if step == 1500:
            ledger.see(RequestAdmitted(record("named", 1), 0, 0))
        if step % 10:
            continue
        series = ledger.series(5)
        now = dict(series)
        assert len(series) == len(now) <= 6
        assert before.keys() <= now.keys()
        for tenant, counts in now.items():
            if tenant in before:
                for name in ("requests", "prompt_tokens", "read_tokens", "written_tokens"):
                    assert getattr(counts, name) >= getattr(before[tenant], name)
        whole = sum(line.counts.prompt_tokens for line in ledger.report())
        assert sum(counts.prompt_tokens for counts in now.values()) == whole
        before = now
    assert len(before) == 6
    assert len(ledger.tenants) <= 31


def test_it_takes_two_rows_at_least():
    with pytest.raises(InvalidValue, match="most is 1"):
        TenantLedger(PAGE, most=1)
