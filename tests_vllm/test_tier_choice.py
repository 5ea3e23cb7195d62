"""The rows of the table in docs/vllm-tier.md that say which plug-in to take, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engines import engine, prompt
from hybrids import each
from models import make_gemma
from tiered import tiered

if TYPE_CHECKING:
    from pathlib import Path


def test_answers_and_early_branches(tmp_path: Path) -> None:
    """The connector keeps both; the tier what vLLM offloads, which is neither if it is not told."""
    path, first = make_gemma(tmp_path / "gemma"), prompt(6 * 32 + 9, seed=51)
    branch = first[: 3 * 32 + 5] + prompt(70, seed=52)
    cached = {}
    with engine(path, [f"file://{tmp_path}/one?size=256MiB"]) as one:
        (said,) = each(one, [first], max_tokens=70)
        turn = first + list(said.tokens)
        for name, mine in (("branch", branch), ("turn", turn)):
            one.forget()
            cached["connector", name] = each(one, [mine])[0].cached
    with tiered(path, f"file://{tmp_path}/two?size=256MiB") as one:
        each(one, [first], max_tokens=70)
        for name, mine in (("branch", branch), ("turn", turn)):
            one.forget_all()
            cached["tier", name] = each(one, [mine], kvkeep={"store": False})[0].cached
    assert cached == {
        ("connector", "branch"): 3 * 32, ("connector", "turn"): 8 * 32,
        ("tier", "branch"): 0, ("tier", "turn"): 6 * 32,
    }  # fmt: skip


def test_the_tier_needs_memory_of_vllm(llama: str, tmp_path: Path) -> None:
    disk = f"file://{tmp_path}/kv?size=64MiB"
    with (
        pytest.raises(Exception, match="cpu_bytes_to_use is 0; a KVKeepTier is below"),
        tiered(llama, disk, extra={"cpu_bytes_to_use": 0}),
    ):
        pass
    with engine(llama, [disk]) as one:
        one.ask([prompt(100)])
        one.forget()
        assert one.ask([prompt(100)])[0].cached == 96
