"""A failing place below vLLM's offloading costs time, never a token; no request waits for ever."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from engines import BLOCK, LENGTHS, PROMPTS, Answer, same
from test_failures import records
from tiered import TieredEngine, tiered
from vllm import SamplingParams

from kvkeep.store.backends.disk import DiskBackend

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


ALL = sum(length // BLOCK * BLOCK for length in LENGTHS)


def test_damaged_missing_and_half_written_files(
    llama: str, cold: list[Answer], tmp_path: Path
) -> None:
    disk = tmp_path / "kv"
    with tiered(llama, f"file://{disk}?size=256MiB") as one:
        one.ask(PROMPTS)
    files = records(disk)
    assert len(files) > 60
    for at, file in enumerate(files[::10]):
        raw = bytearray(file.read_bytes())
        if at % 3 == 0:
            raw[len(raw) // 2] ^= 1
            file.write_bytes(raw)
        elif at % 3 == 1:
            file.write_bytes(raw[: len(raw) // 2])
        else:
            file.unlink()
    with tiered(llama, f"file://{disk}?size=256MiB") as one:
        for file in files[6::20]:  # while it runs, behind its back
            file.unlink()
        same(cold, one.ask(PROMPTS))
        assert 0 < one["failed_tokens"] < ALL
        assert 0 < one["loaded_tokens"] < ALL
        one.forget_all()
        same(cold, one.ask(PROMPTS))
    with tiered(llama, f"file://{disk}?size=256MiB") as one:  # what was computed was stored again
        warm = one.ask(PROMPTS)
        same(cold, warm)
        assert [answer.cached for answer in warm] == [n // BLOCK * BLOCK for n in LENGTHS]


def test_aborted_while_it_loads(
    llama: str, cold: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, reading, go_on = DiskBackend.get, threading.Event(), threading.Event()

    def slow(self: DiskBackend, block: bytes, room: Any) -> Any:
        reading.set()
        assert go_on.wait(60)
        return get(self, block, room)

    disk = f"file://{tmp_path}/kv?size=256MiB"
    with tiered(llama, disk) as one:
        one.ask(PROMPTS)
    with tiered(llama, disk, options={"load_timeout": 1.0}) as one:
        monkeypatch.setattr(DiskBackend, "get", slow)
        engine = one.llm.llm_engine
        sampling = SamplingParams(max_tokens=4)
        engine.add_request("gone", {"prompt_token_ids": PROMPTS[-1]}, sampling)
        while not reading.is_set():
            engine.step()
        engine.abort_request(["gone"])
        go_on.set()
        monkeypatch.setattr(DiskBackend, "get", get)
        until = time.monotonic() + 60
        while one.tier.has_pending_work():  # one result for each job, although nobody waits
            engine.step()
            assert time.monotonic() < until
        assert not one.tier._live
        same(cold, one.ask(PROMPTS))


def test_a_request_that_ends_takes_no_hit_from_others(
    llama: str, cold: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests want the same chunks; the one that loads them is aborted meanwhile."""
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
        assert ended.num_cached_tokens == LENGTHS[-1] // BLOCK * BLOCK


def _answer(one: TieredEngine) -> Any:
    """Return what the engine says in the end."""
    until = time.monotonic() + 60
    while True:
        assert time.monotonic() < until
        for output in one.llm.llm_engine.step():
            if output.finished:
                return output
