"""What `make bench-peers` measures of SGLang runs; tiny sizes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from peers import hicache_file, sglang_trees
from peers.work import QUICK
from peers.worker import Setting, Worker


@pytest.mark.parametrize(
    ("module", "variant"),
    [
        (sglang_trees, "rust"),
        (sglang_trees, "python"),
        (sglang_trees, "legacy"),
        (hicache_file, ""),
    ],
)
def test_every_case_runs(module: object, variant: str, tmp_path: Path) -> None:
    worker = Worker(module.CASES, Setting(QUICK, variant, tmp_path))  # type: ignore[attr-defined]
    for case in module.CASES:  # type: ignore[attr-defined]
        assert all(worker.seconds(case, "cpu", 2) > 0 for _ in range(2))  # checks results
    worker.forget()
