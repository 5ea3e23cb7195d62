"""The ledger of tenants against an oracle that replays the events and integrates by hand."""

from __future__ import annotations

import csv
import io
import random
from collections import Counter, defaultdict

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
from kvkeep.observe.usage.sheet import as_csv

PAGE = 4


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def record(tenant, tokens=10):
    origin = RequestOrigin("id")
    return RequestRecord(origin, np.zeros(tokens, np.int32), Namespace(tenant=tenant))


def lines(ledger):
    return {line.tenant: line for line in ledger.report()}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("most", [4, 100])
def test_what_is_kept_is_the_integral_of_what_the_cache_holds(seed, most):
    """After each step the cache itself says how many pages each tenant has."""
    draw, clock = random.Random(seed), Clock()
    cache, owners = PagedCache(40, PAGE, clock=clock), PageOwners(40)
    cache.subscribe(owners.see)
    ledger = TenantLedger(PAGE, most=most, named=["t1"], clock=clock)
    owners.changed = ledger.pages_changed
    integral: dict[str, float] = defaultdict(float)
    held: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    for _ in range(300):
        passed = draw.choice([0.0, 0.5, 3.0])
        for tenant, pages in held.items():
            integral[tenant] += pages * PAGE * passed
        clock.now += passed
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
    whole = sum(line.counts.pool_token_seconds for line in found.values())
    assert whole == pytest.approx(sum(integral.values()))
    written = sum(line.counts.written_tokens for line in found.values())
    assert written == sum(stored.values()) * PAGE
    assert found["t1"].counts.pool_token_seconds == pytest.approx(integral["t1"])
    if most == 100:
        for tenant, seconds in integral.items():
            assert found[tenant].counts.pool_token_seconds == pytest.approx(seconds)
            assert found[tenant].counts.written_tokens == stored[tenant] * PAGE


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


def test_what_tiers_keep_counts_from_one_look_to_the_next():
    clock = Clock()
    ledger = TenantLedger(PAGE, clock=clock)
    ledger.see(RequestAdmitted(record("a"), 0, 0))
    ledger.tiers_keep({"a": 100.0}, 7.0)
    clock.now += 10
    ledger.tiers_keep({"a": 50.0, "unknown": 3.0})
    clock.now += 2
    found = lines(ledger)
    assert found["a"].counts.tier_token_seconds == 1100
    assert found[None].counts.tier_token_seconds == 76
    assert (found["a"].tier_tokens, found[None].tier_tokens) == (50, 3)


def test_no_series_of_metrics_ever_falls_and_none_changes_its_name():
    draw, clock = random.Random(3), Clock()
    ledger = TenantLedger(PAGE, most=30, named=["named"], clock=clock)
    before: dict[str | None, object] = {}
    for step in range(3000):
        clock.now += draw.random() / 7
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
                for name in ("requests", "prompt_tokens", "read_tokens", "pool_token_seconds"):
                    assert getattr(counts, name) >= getattr(before[tenant], name)
        whole = sum(line.counts.prompt_tokens for line in ledger.report())
        assert sum(counts.prompt_tokens for counts in now.values()) == whole
        before = now
    assert len(before) == 6
    assert len(ledger.tenants) <= 31


def test_a_sheet_that_a_spreadsheet_cannot_run():
    salts = ["=1+1", "plain", 'a "quote", and\nlines', "-x", "@x", "ü", "\t=1"]
    rows = [{"cache_salt": salt, "tokens": 1.23456, "none": None, "flag": True} for salt in salts]
    read = list(csv.DictReader(io.StringIO(as_csv(rows), newline="")))
    assert [row["cache_salt"] for row in read] == [
        "'=1+1", "plain", 'a "quote", and\nlines', "'-x", "'@x", "ü", "'\t=1",
    ]  # fmt: skip
    assert (read[0]["tokens"], read[0]["none"], read[0]["flag"]) == ("1.235", "", "True")
    assert as_csv([]) == ""


def test_it_takes_two_rows_at_least():
    with pytest.raises(InvalidValue, match="most is 1"):
        TenantLedger(PAGE, most=1)
