"""Replayed tiers follow conversations: what they keep, and what of answers they store."""

from __future__ import annotations

import pytest

from kvkeep.bench.replay import Workload, simulate_tiers
from kvkeep.bench.traces import generate


@pytest.fixture(scope="module")
def reasoning() -> Workload:
    return Workload.read(generate("reasoning", seed=3, requests=400, unit_tokens=64))


def test_reasoning_is_stored_no_longer_once_it_is_known(reasoning: Workload) -> None:
    sizes = (1 << 26, 1 << 27)
    whole = simulate_tiers(reasoning, sizes, whole_answers=True)
    learned = simulate_tiers(reasoning, sizes)
    for level, other in zip(learned.tiers, whole.tiers, strict=True):
        assert level["writes"] < 0.45 * other["writes"]
    assert learned.token_hit_rate > whole.token_hit_rate - 0.01


def test_room_for_what_is_read(reasoning: Workload) -> None:
    """In tiers that are too small for all, what is not stored leaves room."""
    sizes = (100_000, 200_000)
    whole = simulate_tiers(reasoning, sizes, whole_answers=True)
    learned = simulate_tiers(reasoning, sizes)
    assert learned.token_hit_rate > whole.token_hit_rate + 0.05


@pytest.mark.parametrize("tiering", ["inclusive", "exclusive"])
def test_tiers_that_order_by_returns(tiering: str) -> None:
    work = Workload.read(generate("agents", seed=5, requests=700, unit_tokens=512))
    sizes = (60_000, 120_000)
    lru = simulate_tiers(work, sizes, tiering)
    returns = simulate_tiers(work, sizes, tiering, "returns")
    assert returns.policy == f"returns/{tiering}"
    assert returns.token_hit_rate > lru.token_hit_rate + 0.03
