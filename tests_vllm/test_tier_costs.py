"""Below vLLM's own offloading: what is slower than computing is not loaded; see test_costs.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from test_costs import LENGTH, PROMPTS, TOO_SLOW_S, World, cold_slow, llama_slow
from throttle import throttled
from tiered import tiered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engines import Answer

__all__ = ["cold_slow", "llama_slow"]


@pytest.fixture
def world(llama_slow: str, cold_slow: list[Answer], tmp_path: Path) -> Iterator[World]:
    """Six prompts on a disk; vLLM's memory is emptied before each request."""
    tier = f"file://{tmp_path}/kv?size=1GiB"
    options = {"compare_costs": True, "buffer": "8MiB"}
    with throttled() as disk, tiered(llama_slow, tier, options=options) as one:
        made = World(one, disk, cold_slow)
        for _ in PROMPTS:
            made.next()
            while one.core.scheduler.connector.has_pending_push_work():
                one.core.step()
            assert one.store.flush(60)
        yield made
        disk.go_on()
        disk.block_s = 0.0


def test_the_choice_follows_the_tier(world: World) -> None:
    one = world.engine
    world.until("loaded_tokens")
    cost = one.tier._store.store.cost  # type: ignore[attr-defined]
    assert cost.prefill.largest > LENGTH / 2
    world.disk.block_s = TOO_SLOW_S
    world.until("slower_tokens")
    refused = one["slower_requests"]
    for _ in range(6):
        world.next()
    assert one["slower_requests"] >= refused + 4
    world.disk.block_s = 0.0
    world.until("loaded_tokens")
    assert one["slower_requests"] > 0


def test_a_disk_that_hangs_within_a_load(world: World) -> None:
    failed = world.engine["failed_tokens"]
    for _ in range(20):
        world.until("loaded_tokens")
        world.disk.hang(after=10)
        seconds = world.next()
        if world.engine["failed_tokens"] > failed:
            break
        world.disk.go_on()
    assert world.engine["late_tokens"] > 0
    assert seconds < 4.0, "it waited for load_timeout"
    world.disk.go_on()
