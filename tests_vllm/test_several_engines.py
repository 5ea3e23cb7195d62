"""What one engine stored is found by the next: after a restart, on another machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engines import LENGTHS, PROMPTS, Answer, engine, found, prompt, same
from models import make_llama

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Server


def test_storing_changes_nothing(llama: str, cold: list[Answer]) -> None:
    with engine(llama, ["memory://64MiB"]) as one:
        same(cold, one.ask(PROMPTS))
        # Blocks that answers completed are there, too.
        full = sum((length + 5) // 32 for length in LENGTHS)
        assert one["saved_tokens"] == full * 32
        assert one["dropped_tokens"] == 0


def test_after_a_restart(llama: str, cold: list[Answer], tmp_path: Path) -> None:
    tiers = ["memory://8MiB", f"file://{tmp_path}/kv?size=256MiB"]
    with engine(llama, tiers) as one:
        one.ask(PROMPTS)
    with engine(llama, tiers) as one:
        warm = one.ask(PROMPTS)
        same(cold, warm)
        assert sum(answer.cached for answer in warm) == sum(map(found, LENGTHS))
        assert one["hits file"] > 0


def test_a_second_engine_reads_from_a_server(
    llama: str, cold: list[Answer], server: Server
) -> None:
    tiers = ["memory://16MiB", server.url()]
    with engine(llama, tiers) as one:
        one.ask(PROMPTS)
    with engine(llama, tiers) as two:
        warm = two.ask(PROMPTS)
        same(cold, warm)
        assert sum(answer.cached for answer in warm) == sum(map(found, LENGTHS))
        assert two["hits valkey"] > 0


def test_vllm_without_a_prefix_cache_of_its_own(llama: str, cold: list[Answer]) -> None:
    with engine(llama, ["memory://64MiB"], enable_prefix_caching=False) as one:
        one.ask(PROMPTS)
        warm = one.ask(PROMPTS)
        same(cold, warm)
        assert one["loaded_tokens"] > 0


def test_a_prompt_longer_than_the_tiers(llama: str, cold: list[Answer]) -> None:
    with engine(llama, ["memory://512KiB"]) as one:
        same(cold, one.ask(PROMPTS))
        assert one["dropped_tokens"] + one.store.stats()[0].counters["evictions"] > 0
        one.forget()
        same(cold, one.ask(PROMPTS))


def test_a_second_engine_in_the_process_is_not_taken_for_the_first(
    llama: str, tmp_path: Path
) -> None:
    """vLLM has one worker's connector in a process: it would name one model's KV as another's."""
    tiers = [f"file://{tmp_path}/kv?size=64MiB"]
    mine = [prompt(200, seed=30)]
    with engine(llama, tiers) as one:
        first = one.ask(mine)
        other = make_llama(tmp_path / "other", seed=1)
        with (
            pytest.raises(Exception, match="a second engine in this process"),
            engine(other, tiers),
        ):
            pass
    with engine(llama, tiers) as one:
        same(first, one.ask(mine))
