"""On the shared traces, `valued` finds as much as `inclusive` and writes half of it, or less."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep.bench.replay import Workload, simulate_tiers
from kvkeep.bench.replay.tiered import Requests
from kvkeep.bench.replay.tiers import Level, TierSimulator
from kvkeep.bench.traces import generate, open_trace
from kvkeep.store.backends import WriteBudget
from kvkeep.store.tiers import tiering

TRACES = Path(__file__).parents[3] / "shared" / "traces"


def found(work: Workload, name: str, sizes: tuple[int, int], count: int) -> tuple[int, int]:
    """Blocks found and written in the first ``count`` requests."""
    now = [0.0]
    levels = [Level("memory", sizes[0]), Level("disk", sizes[1])]
    simulator = TierSimulator(levels, tiering(name, lambda: now[0]), lambda: now[0])
    requests, hits = Requests(work, simulator, whole_answers=False), 0
    for number in range(count):
        now[0] = float(work.times[number])
        blocks = sum(requests.find(number))
        hits += blocks
        requests.keep(number, blocks)
    return hits, simulator.stats()[1].writes


@pytest.mark.parametrize(
    ("trace", "sizes", "count"),
    [("mooncake_conversation", (600, 2400), 4000), ("agent_sessions", (2000, 3000), 1000)],
)
def test_it_finds_as_much_and_writes_half(trace: str, sizes: tuple[int, int], count: int) -> None:
    path = TRACES / f"{trace}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no {path}")
    work = Workload.read(open_trace(path))
    hits, writes = found(work, "inclusive", sizes, count)
    ours, written = found(work, "valued", sizes, count)
    assert ours >= 0.95 * hits
    assert written <= 0.5 * writes


def test_a_replay_has_write_budgets_in_tokens() -> None:
    work = Workload.read(generate("chat", seed=1, requests=400, unit_tokens=128))
    unit, sizes = work.unit_tokens, [100 * 128, 4000 * 128]
    free = simulate_tiers(work, sizes).tiers[1]
    days = work.span_s / 86_400
    assert free["written_tokens_a_day"] == pytest.approx(free["writes"] * unit / days)
    assert free["over_budget"] == 0
    budget = WriteBudget(free["writes"] * unit // 2, int(work.span_s) + 1)
    short = simulate_tiers(work, sizes, writes=[None, budget]).tiers[1]
    assert free["writes"] / 4 < short["writes"] <= budget.amount // unit
    assert short["over_budget"] > 0
