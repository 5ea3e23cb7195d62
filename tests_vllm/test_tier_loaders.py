"""Threads that load: those that wait for a slow tier delay no load from another."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from engines import Engine, engine, prompt
from hybrids import each
from tiered import tiered
from vllm import SamplingParams

from kvkeep.store.backends.disk import DiskBackend

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

LONG_S = 60.0


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
