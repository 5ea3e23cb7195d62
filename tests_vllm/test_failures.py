"""A store that fails costs time, never a token: files, servers, processes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from engines import LENGTHS, PROMPTS, Answer, beside, engine, found, prompt, same

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from conftest import Server

ALL = sum(min(found(length), length - 1) if found(length) else 0 for length in LENGTHS)


def records(disk: Path) -> list[Path]:
    return sorted(disk.glob("?" * 32 + "/" + "?" * 64))


def test_damaged_missing_and_half_written_files(
    llama: str, cold: list[Answer], tmp_path: Path
) -> None:
    disk = tmp_path / "kv"
    tiers = ["memory://64MiB", f"file://{disk}?size=256MiB"]
    with engine(llama, tiers) as one:
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
    with engine(llama, tiers) as one:
        for file in files[6::20]:  # while it runs, behind its back
            file.unlink()
        same(cold, one.ask(PROMPTS))
        assert 0 < one["failed_tokens"] < ALL
        assert 0 < one["loaded_tokens"] < ALL
        assert one["loaded_tokens"] + one["failed_tokens"] == one["hit_tokens"]
        # What was computed instead was saved again. Behind a gap nobody looked: the next one does.
        for _ in range(8):
            one.forget()
            failed = one["failed_tokens"]
            warm = one.ask(PROMPTS)
            same(cold, warm)
            if one["failed_tokens"] == failed:
                break
        assert [answer.cached for answer in warm] == [found(length) for length in LENGTHS]


def test_a_server_that_hangs_while_blocks_are_on_their_way(
    llama: str, cold: list[Answer], server: Server
) -> None:
    tiers = ["memory://1MiB", server.url(timeout="60s")]
    with engine(llama, tiers, extra={"load_timeout": 0.5}) as one:
        one.ask(PROMPTS)
        assert one.store.flush(60)
        others = [random.randbytes(32) for _ in range(40)]
        one.store.put(others, [bytes(1 << 16)] * 40)  # what vLLM asks for is on the server alone
        assert one.store.flush(60)
        one.forget()
        scheduler = one.core.scheduler.connector._scheduler
        allocated = scheduler.allocated

        def hang_then(request: object, blocks: object, external: int) -> None:
            if external:  # the question was answered
                server.hang()
            allocated(request, blocks, external)

        scheduler.allocated = hang_then
        same(cold, one.ask(PROMPTS))
        assert one["failed_tokens"] > 0
        assert one["late_tokens"] > 0
        server.go_on()


def test_no_server_at_the_start(llama: str, cold: list[Answer]) -> None:
    with engine(llama, ["memory://16MiB", "valkey://127.0.0.1:9?timeout=1s"]) as one:
        same(cold, one.ask(PROMPTS))
        one.forget()
        same(cold, one.ask(PROMPTS))
        assert one["loaded_tokens"] > 0  # from memory


def test_prompts_longer_than_all_tiers(llama: str, cold: list[Answer], tmp_path: Path) -> None:
    """The same tokens, and what there is no room for is counted."""
    with engine(llama, ["memory://256KiB", f"file://{tmp_path}/kv?size=512KiB"]) as one:
        for _ in range(3):
            same(cold, one.ask(PROMPTS))
            one.forget()
        assert one["dropped_tokens"] > one["saved_tokens"] > 0
        assert one["loaded_tokens"] + one["failed_tokens"] == one["hit_tokens"]


def save_for_ever(says: Connection, model: str, tier: str) -> None:
    """Save one prompt after another, and say the number of each."""
    with engine(model, ["memory://64MiB", tier]) as one:
        for seed in range(10_000):
            one.ask([prompt(600 if seed else 700, seed=seed)], max_tokens=2)
            says.send(seed)


@pytest.mark.parametrize("rounds", [2])
def test_killed_while_it_saves(llama: str, cold: list[Answer], tmp_path: Path, rounds: int) -> None:
    tier = f"file://{tmp_path}/kv?size=256MiB"
    child, says = beside("test_failures:save_for_ever", llama, tier)
    try:
        while says.recv() < rounds:
            pass
    finally:
        child.kill()
        child.join()
        says.close()
    with engine(llama, ["memory://64MiB", tier]) as one:
        assert records(tmp_path / "kv"), "nothing was written before it was killed"
        same(cold, one.ask(PROMPTS))
        assert one["loaded_tokens"] > 0
        assert one["failed_tokens"] == 0
        one.store.check()
