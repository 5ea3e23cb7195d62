"""What the tests of tiers work on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tier_bench import Bench

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.end()
