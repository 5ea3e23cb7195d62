"""Several tiers of kvkeep in one engine, and requests that wait for one another's loads."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from engines import BLOCK, LENGTHS, PROMPTS, Answer, same
from tiered import TieredEngine, engine, kvkeep_tier, offloading, tiered

from kvkeep.store.backends.disk import DiskBackend

if TYPE_CHECKING:
    from pathlib import Path

WHOLE = [length // BLOCK * BLOCK for length in LENGTHS]


@pytest.mark.parametrize("full", [0, 1])
def test_either_of_two_tiers_is_read(
    llama: str, cold: list[Answer], tmp_path: Path, full: int
) -> None:
    places = [f"file://{tmp_path}/{at}?size=256MiB" for at in range(2)]
    with tiered(llama, places[full]) as one:
        one.ask(PROMPTS)
    tiers = [kvkeep_tier(place) for place in places]
    with engine(llama, kv_transfer_config=offloading(tiers)) as both:
        warm = both.ask(PROMPTS)
        same(cold, warm)
        assert [answer.cached for answer in warm] == WHOLE


def test_what_one_of_two_tiers_cannot_load_comes_from_the_other(
    llama: str, cold: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [f"file://{tmp_path}/{at}?size=256MiB" for at in range(2)]
    tiers = [kvkeep_tier(place) for place in places]
    with engine(llama, kv_transfer_config=offloading(tiers)) as both:
        both.ask(PROMPTS)
    get, tried = DiskBackend.get, 0

    def fails(self: DiskBackend, block: bytes, room: Any) -> Any:
        nonlocal tried
        if f"{tmp_path}/0" in self.describe():
            tried += 1
            time.sleep(0.3)  # later than the load's deadline, and no fault of the place
        return get(self, block, room)

    monkeypatch.setattr(DiskBackend, "get", fails)
    tiers = [kvkeep_tier(places[0], load_timeout=0.2), kvkeep_tier(places[1], load_timeout=60.0)]
    with engine(llama, kv_transfer_config=offloading(tiers)) as both:
        (warm,) = both.ask(PROMPTS[-1:])
        same(cold[-1:], [warm])
        assert warm.cached == WHOLE[-1]
    assert tried


def test_a_request_that_ends_takes_no_hit_from_others(
    llama: str, cold: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests want the same chunks; the one that loads them is aborted meanwhile."""
    from vllm import SamplingParams

    disk = f"file://{tmp_path}/kv?size=256MiB"
    with tiered(llama, disk) as one:
        one.ask(PROMPTS[-1:])
    get, reading, go_on = DiskBackend.get, threading.Event(), threading.Event()

    def slow(self: DiskBackend, block: bytes, room: Any) -> Any:
        reading.set()
        assert go_on.wait(60)
        return get(self, block, room)

    monkeypatch.setattr(DiskBackend, "get", slow)
    with tiered(llama, disk, options={"load_timeout": 30.0}) as one:
        running = one.llm.llm_engine
        sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        for name in ("gone", "stays"):
            running.add_request(name, {"prompt_token_ids": PROMPTS[-1]}, sampling)
        while not reading.is_set():
            running.step()
        running.step()
        running.abort_request(["gone"])
        running.step()
        go_on.set()
        ended = _answer(one)
        assert tuple(ended.outputs[0].token_ids) == cold[-1].tokens
        assert ended.num_cached_tokens == WHOLE[-1]


def _answer(one: TieredEngine) -> Any:
    """Return what the engine says in the end."""
    until = time.monotonic() + 60
    while True:
        assert time.monotonic() < until
        for output in one.llm.llm_engine.step():
            if output.finished:
                return output
