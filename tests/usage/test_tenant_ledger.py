"""The ledger of tenants: its sums, and its series for metrics."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvkeep.core.errors import InvalidValue
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


def record(tenant, tokens=10):
    origin = RequestOrigin("id")
    return RequestRecord(origin, np.zeros(tokens, np.int32), Namespace(tenant=tenant))


def test_requests_count_for_their_tenant():
    ledger = TenantLedger(named=["a"])
    ledger.see(RequestAdmitted(record("a", 1), 0, 0))
    ledger.series(5)  # from here on "a" has a series
    request = record("a", 100)
    ledger.see(RequestAdmitted(request, 0, 30))
    ledger.see(RequestLoaded(request, LoadReport(((30, 70, "disk"),))))
    ledger.see(PromptComputed(request, 20, 0.1))
    ledger.see(PromptComputed(request, 10, 0.1))
    ledger.see(PromptStored(request, 64, 0.1))
    ledger.see(RequestEnded(request, "done", 7, 0.1, 0.2))
    ledger.see(RequestAdmitted(record("", 5), 0, 0))
    counted = dict(ledger.series(1))
    counts = counted["a"]
    assert counts.prompt_tokens == 100
    assert (counts.read_tokens, counts.loaded_tokens, counts.computed_tokens) == (70, 40, 30)
    assert (counts.generated_tokens, counts.stored_tokens) == (7, 64)
    assert counted[None].prompt_tokens == 6


def test_no_series_of_metrics_ever_falls_and_none_changes_its_name():
    draw = random.Random(3)
    ledger = TenantLedger(most=30, named=["named"])
    before: dict[str | None, object] = {}
    prompts = 0
    for step in range(3000):
        few = draw.random() < 0.5
        tenant = f"t{draw.randrange(4)}" if few else f"made up {draw.randrange(500)}"
        tokens = draw.randrange(1, 100)
        ledger.see(RequestAdmitted(record(tenant, tokens), 0, 1))
        prompts += tokens
        if step == 1500:
            ledger.see(RequestAdmitted(record("named", 1), 0, 0))
            prompts += 1
        if step % 10:
            continue
        series = ledger.series(5)
        now = dict(series)
        assert len(series) == len(now) <= 6
        assert before.keys() <= now.keys()
        for tenant, counts in now.items():
            if tenant in before:
                for name in ("prompt_tokens", "read_tokens"):
                    assert getattr(counts, name) >= getattr(before[tenant], name)
        assert sum(counts.prompt_tokens for counts in now.values()) == prompts
        before = now
    assert len(before) == 6


def test_the_largest_come_first():
    ledger = TenantLedger()
    for number in range(900):
        ledger.see(RequestAdmitted(record(f"t{number}", number), 0, number // 2))
    largest = ledger.largest(20)
    assert [tenant for tenant, _ in largest] == [f"t{number}" for number in range(899, 879, -1)]
    assert (largest[0][1].requests, largest[0][1].read_tokens) == (1, 449)
    assert len(ledger.largest(10_000)) == 900


def test_it_takes_two_rows_at_least():
    with pytest.raises(InvalidValue, match="most is 1"):
        TenantLedger(most=1)
