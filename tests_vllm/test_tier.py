"""kvkeep below vLLM's own offloading: what is loaded says what was computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engines import BLOCK, LENGTHS, PROMPTS, Answer, same
from tiered import tiered

if TYPE_CHECKING:
    from pathlib import Path


def test_found_after_a_reset_and_after_a_restart(
    llama: str, cold: list[Answer], tmp_path: Path
) -> None:
    disk = f"file://{tmp_path}/kv?size=256MiB"
    with tiered(llama, disk) as one:
        same(cold, one.ask(PROMPTS))
        one.forget()  # vLLM's memory has all of it
        same(cold, one.ask(PROMPTS))
        one.forget_all()
        warm = one.ask(PROMPTS)
        same(cold, warm)
        assert [answer.cached for answer in warm] == [length // BLOCK * BLOCK for length in LENGTHS]
        assert one["loaded_tokens"] > 0
        assert one["failed_tokens"] == 0
    with tiered(llama, disk) as one:
        warm = one.ask(PROMPTS)
        same(cold, warm)
        assert [answer.cached for answer in warm] == [length // BLOCK * BLOCK for length in LENGTHS]
        assert one["failed_tokens"] == 0
        assert one["saved_tokens"] == 0
