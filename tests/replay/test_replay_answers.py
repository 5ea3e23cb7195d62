"""Replayed tiers follow conversations."""

from __future__ import annotations

import pytest

from kvkeep.bench.replay import Workload, simulate_tiers
from kvkeep.bench.traces import generate


@pytest.mark.parametrize("tiering", ["inclusive", "exclusive"])
def test_tiers_that_order_by_returns(tiering: str) -> None:
    work = Workload.read(generate("agents", seed=5, requests=700, unit_tokens=512))
    sizes = (60_000, 120_000)
    lru = simulate_tiers(work, sizes, tiering)
    returns = simulate_tiers(work, sizes, tiering, "returns")
    assert returns.policy == f"returns/{tiering}"
    assert returns.token_hit_rate > lru.token_hit_rate + 0.03
