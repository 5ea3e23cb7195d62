"""Threads that load: those that wait for a slow tier delay no load from another."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from engines import Engine, engine, prompt
from hybrids import each
from tiered import tiered
from vllm import SamplingParams

from kvkeep.integrations.vllm.loaders import Loaders
from kvkeep.store.backends.disk import DiskBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

LONG_S = 60.0


@pytest.fixture
def loaders() -> Iterator[Loaders]:
    one = Loaders()
    yield one
    one.close(wait=True)


def never() -> bool:
    return False


def test_loads_that_wait_delay_no_others(loaders: Loaders) -> None:
    go_on, until = threading.Event(), time.monotonic() + LONG_S
    waiting = [
        loaders.submit(lambda _: bool(go_on.wait(LONG_S)) or None, until=until, cancelled=never)
        for _ in range(16)
    ]
    loaders.submit(lambda _: None, until=until, cancelled=never).result(LONG_S)
    assert not any(one.done() for one in waiting)
    go_on.set()


def test_four_go_on_at_a_time_in_order(loaders: Loaders) -> None:
    lock, going, most = threading.Lock(), 0, 0
    begun: list[int] = []

    def load(number: int, went_on: Callable[[], None]) -> None:
        nonlocal going, most
        with lock:
            begun.append(number)
            going += 1
            most = max(most, going)
        for _ in range(20):
            time.sleep(0.002)
            went_on()
        with lock:
            going -= 1

    until = time.monotonic() + LONG_S
    loads = [
        loaders.submit(partial(load, number), until=until, cancelled=never) for number in range(40)
    ]
    for one in loads:
        one.result(LONG_S)
    assert all(abs(number - at) < 8 for at, number in enumerate(begun))
    assert most < 12, "a thread that got no processor for a moment looks as if it waits"


def test_a_deadline_and_a_cancellation_end_the_wait(loaders: Loaders) -> None:
    stop, ended = threading.Event(), threading.Event()

    def busy(went_on: Callable[[], None]) -> None:
        while not ended.wait(0.001):
            went_on()

    until = time.monotonic() + LONG_S
    for _ in range(4):
        loaders.submit(busy, until=until, cancelled=never)
    soon = time.monotonic() + 0.2
    loaders.submit(lambda _: None, until=soon, cancelled=never).result(LONG_S)
    assert time.monotonic() >= soon
    told = loaders.submit(lambda _: None, until=until, cancelled=stop.is_set)
    stop.set()
    loaders.wake()
    told.result(LONG_S)
    assert time.monotonic() < until
    ended.set()


@pytest.mark.parametrize("adapter", ["tier", "connector"])
def test_a_slow_tier_beside_a_healthy_one(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: str
) -> None:
    """Requests from a healthy tier are answered while more than four wait for a slow one."""
    places = [f"file://{tmp_path}/{name}?size=64MiB" for name in ("slow", "healthy")]
    prompts = [[prompt(100, seed=first + at) for at in range(6)] for first in (70, 80)]

    def begin(*tiers: str, **options: float) -> AbstractContextManager[Engine]:
        if adapter == "tier":
            return tiered(llama, *tiers, options=options)
        return engine(llama, list(tiers), extra=options)

    for place, some in zip(places, prompts, strict=True):
        with begin(place) as one:
            each(one, some)
    get, go_on = DiskBackend.get, threading.Event()

    def slow(self: DiskBackend, block: bytes, room: Any) -> Any:
        if f"{tmp_path}/slow" in self.describe():
            assert go_on.wait(LONG_S)
        return get(self, block, room)

    monkeypatch.setattr(DiskBackend, "get", slow)
    with begin(*places, load_timeout=LONG_S / 2) as one:
        running = one.llm.llm_engine
        cached: dict[int, int] = {}
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        for at, tokens in enumerate(prompts[0] + prompts[1]):
            running.add_request(str(at), {"prompt_token_ids": tokens}, sampling)
        while running.has_unfinished_requests():
            ended = [said for said in running.step() if said.finished]
            cached |= {int(said.request_id): said.num_cached_tokens for said in ended}
            if len(cached) == 6:
                go_on.set()
        assert set(list(cached)[:6]) == {6, 7, 8, 9, 10, 11}
        assert set(cached.values()) == {96}
