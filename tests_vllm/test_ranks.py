"""Engines with 1, 2 and 4 ranks below vLLM's offloading use each other's KV."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from engines import apart, same
from models import make_gemma, make_llama
from ranks import LENGTHS, answers_of

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Server


def run(model: str, tier: str, ranks: str, directory: Path) -> dict[int, Any]:
    """What engines with so many ranks each ("1 2 4") tell; see `ranks`."""
    apart("ranks:together", model, tier, str(directory), ranks)
    return {
        each: json.loads((directory / f"{each}.json").read_text())
        for each in map(int, ranks.split())
    }


def check(told: dict[int, Any], block: int = 32) -> None:
    """All read what each has written, and say what it said."""
    whole = [length // block * block for length in LENGTHS]
    for reader, read in told.items():
        assert read["failed"] == 0
        for writer, wrote in told.items():
            cold, warm = answers_of(wrote["cold"]), answers_of(read[f"of {writer}"])
            assert [answer.cached for answer in cold] == [0] * len(LENGTHS)
            assert [answer.cached for answer in warm] == whole, f"{writer} wrote, {reader} read"
            same(cold, warm, 1e-3)
        same(answers_of(told[1]["at once"]), answers_of(read["at once"]), 1e-3)
        again = answers_of(read["after it"])
        assert [answer.cached for answer in again] == whole
        same(answers_of(told[1]["at once"]), again, 1e-3)
    assert len({read["namespace"] for read in told.values()}) == 1


def test_written_with_1_2_and_4_ranks_read_with_each(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "llama", num_key_value_heads=4, num_hidden_layers=2)
    check(run(model, f"file://{tmp_path}/kv?size=256MiB", "1 2 4", tmp_path))


def test_four_ranks_for_two_heads_and_layers_with_windows(tmp_path: Path, server: Server) -> None:
    """Ranks with the same heads take turns; groups share pages."""
    model = make_gemma(tmp_path / "gemma")
    check(run(model, server.url(), "1 4", tmp_path))
