"""A tier that is slower than computing is not loaded from, and costs no request more than a part.

Each record of the disk takes as long as a test says; a prompt of 1,536 tokens, 48 blocks, takes
some tens of milliseconds to compute.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from engines import Answer, Engine, engine, prompt, same
from throttle import Disk, throttled

from kvkeep.core.errors import InvalidValue
from kvkeep.integrations.vllm.options import ConnectorOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LENGTH, BLOCKS = 1545, 48
PROMPTS = [prompt(LENGTH, seed=700 + n) for n in range(6)]
TOO_SLOW_S = 0.2  # a record
SETTINGS: dict[str, Any] = {"max_model_len": 2048, "extra": {"compare_costs": True}}


class World:
    def __init__(self, one: Engine, disk: Disk, cold: list[Answer]) -> None:
        self.engine, self.disk, self.cold = one, disk, cold
        self._turn = 0

    def next(self) -> float:
        """Ask for the prompt that was asked for longest ago; return the seconds."""
        at = self._turn % len(PROMPTS)
        self._turn += 1
        self.engine.forget_all()
        began = time.monotonic()
        same([self.cold[at]], self.engine.ask([PROMPTS[at]], max_tokens=2))
        return time.monotonic() - began

    def until(self, name: str) -> None:
        """Ask until a request has counted here, and the next one, too."""
        in_a_row, end = 0, time.monotonic() + 120
        while in_a_row < 2:
            assert time.monotonic() < end, f"{name} does not grow"
            before = self.engine[name]
            self.next()
            in_a_row = in_a_row + 1 if self.engine[name] > before else 0
            time.sleep(0.05)  # for probes, which are in the background


@pytest.fixture(scope="module")
def llama_slow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that takes some time, so that a disk which is not slowed down is faster."""
    from models import make_llama

    path = tmp_path_factory.mktemp("models") / "slow"
    return make_llama(path, hidden_size=256, intermediate_size=1024, num_hidden_layers=6)


@pytest.fixture(scope="module")
def cold_slow(llama_slow: str) -> list[Answer]:
    with engine(llama_slow) as plain:
        return [plain.ask([one], max_tokens=2)[0] for one in PROMPTS]


@pytest.fixture
def world(llama_slow: str, cold_slow: list[Answer], tmp_path: Path) -> Iterator[World]:
    """Six prompts on a disk, and memory for one of them."""
    tiers = ["memory://8MiB", f"file://{tmp_path}/kv?size=1GiB"]
    with throttled() as disk, engine(llama_slow, tiers, **SETTINGS) as one:
        made = World(one, disk, cold_slow)
        for _ in PROMPTS:
            made.next()
            assert one.store.flush(60)
        yield made
        disk.go_on()
        disk.block_s = 0.0


def test_a_fast_tier_is_loaded(world: World) -> None:
    world.until("loaded_tokens")
    slower = world.engine["slower_tokens"]
    world.next()
    assert world.engine["slower_tokens"] == slower


def test_a_slow_tier_is_not_and_is_again_once_it_is_fast(world: World) -> None:
    one = world.engine
    for _ in range(2):
        world.disk.block_s = TOO_SLOW_S
        world.until("slower_tokens")
        refused = one["slower_requests"]
        took = [world.next() for _ in range(8)]
        # What little is known may be wrong once or twice; a load ends early then.
        assert one["slower_requests"] >= refused + 5
        assert max(took) < TOO_SLOW_S * BLOCKS / 2, took
        world.disk.block_s = 0.0
        world.until("loaded_tokens")
    assert one["slower_requests"] > 0
    assert one["loaded_tokens"] + one["failed_tokens"] == one["hit_tokens"]


def test_a_disk_that_hangs_within_a_load(world: World) -> None:
    failed = world.engine["failed_tokens"]
    for _ in range(20):
        world.until("loaded_tokens")
        world.disk.hang(after=10)
        seconds = world.next()  # right tokens
        if world.engine["failed_tokens"] > failed:
            break
        world.disk.go_on()  # the request computed: what is learned on a busy machine wavers
    assert world.engine["failed_tokens"] > failed
    assert world.engine["late_tokens"] > 0
    assert seconds < 4.0, "it waited for load_timeout"
    slower = world.engine["slower_tokens"]
    world.next()  # nothing is loaded from it now, not even tried
    assert world.engine["slower_tokens"] > slower or world.engine["hit_tokens"] == 0
    world.disk.go_on()
    world.until("loaded_tokens")


def test_without_comparing_all_is_loaded(
    llama_slow: str, cold_slow: list[Answer], tmp_path: Path
) -> None:
    tiers = ["memory://8MiB", f"file://{tmp_path}/kv?size=1GiB"]
    more = {**SETTINGS, "extra": {"compare_costs": False}}
    with throttled() as disk, engine(llama_slow, tiers, **more) as one:
        world = World(one, disk, cold_slow)
        for _ in PROMPTS:
            world.next()
            assert one.store.flush(60)
        disk.block_s = 0.02
        for _ in PROMPTS:
            world.next()
        assert one["loaded_tokens"] + one["failed_tokens"] >= len(PROMPTS) * BLOCKS * 32
        assert one["loaded_tokens"] > LENGTH
        assert one["slower_tokens"] == 0


@pytest.mark.parametrize("wrong", [{"compare_costs": 1}, {"compare_costs": None}])
def test_wrong_options(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidValue, match=next(iter(wrong))):
        ConnectorOptions.parse(wrong)
