"""A failing place below vLLM's offloading costs time, never a token; no request waits for ever."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from engines import BLOCK, LENGTHS, PROMPTS, Answer, apart, prompt, same
from test_failures import records
from tiered import tiered

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


def test_a_full_disk(
    llama: str, cold: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with tiered(llama, f"file://{tmp_path}/kv?size=256MiB", options={"buffer": "1MiB"}) as one:
        for _ in range(2):
            same(cold, one.ask(PROMPTS))
            one.forget_all()
        one.store.check()
    assert not records(tmp_path / "kv")


def test_a_disk_that_hangs_while_it_is_read(
    llama: str, cold: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty requests wait for the same hanging disk, and none longer than its deadline."""
    limits = {"load_timeout": 0.5, "buffer": "1MiB"}
    go_on = threading.Event()
    get = DiskBackend.get

    def hangs(self: DiskBackend, block: bytes, room: Any) -> Any:
        assert go_on.wait(120)
        return get(self, block, room)

    with tiered(llama, f"file://{tmp_path}/kv?timeout=60s&size=256MiB", options=limits) as one:
        began = time.monotonic()
        one.ask(PROMPTS)
        computed = time.monotonic() - began
        assert one.store.flush(60)
        others = [os.urandom(32) for _ in range(40)]
        one.store.put(others, [bytes(1 << 16)] * 40)  # what vLLM asks for is on the disk alone
        assert one.store.flush(60)
        one.forget_all()
        monkeypatch.setattr(DiskBackend, "get", hangs)
        began = time.monotonic()
        same(cold, one.ask(PROMPTS))
        assert time.monotonic() - began < 2 * computed + 30
        assert one["late_tokens"] > 0
        # A record that arrives now is nobody's: the rows are those of others by now.
        go_on.set()
        one.forget()
        same(cold, one.ask(PROMPTS))
        one.forget_all()
        same(cold, one.ask(PROMPTS))


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
        from vllm import SamplingParams

        engine.add_request("gone", {"prompt_token_ids": PROMPTS[-1]}, SamplingParams(max_tokens=4))
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


def store_and_exit(path: str, disk: str) -> None:
    """In a process of its own: answer, and end at once, with writes in the queue."""
    put = DiskBackend.put

    def slow(self: DiskBackend, block: bytes, record: memoryview) -> None:
        time.sleep(0.02)
        put(self, block, record)

    DiskBackend.put = slow  # type: ignore[method-assign]
    with tiered(path, disk) as one:
        one.ask([prompt(700)])


def test_shutdown_writes_what_is_queued(llama: str, cold: list[Answer], tmp_path: Path) -> None:
    disk = f"file://{tmp_path}/kv?size=256MiB"
    apart("test_tier_failures:store_and_exit", llama, disk)
    assert len(records(tmp_path / "kv")) == 700 // BLOCK
    with tiered(llama, disk) as one:
        (warm,) = one.ask([prompt(700)])
        same([cold[-1]], [warm])
        assert warm.cached == 700 // BLOCK * BLOCK
