"""What the tests of tiers work on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fetch_bench import Clock
from tier_bench import Bench

from kvkeep.store.tiers import TierReturns, tiered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.end()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the conversations of stores that are opened from now on."""
    clock = Clock()
    monkeypatch.setattr(
        tiered, "TierReturns", lambda orders, **more: TierReturns(orders, clock, **more)
    )
    return clock
