"""What `make bench-peers` measures of vLLM runs on this version of it; tiny sizes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

pytest.importorskip("vllm.v1.kv_offload.tiering.fs.manager")

from peers import vllm_blocks, vllm_offload
from peers.work import QUICK
from peers.worker import Setting, Worker


@pytest.mark.parametrize("module", [vllm_blocks, vllm_offload])
def test_every_case_runs(module: object, tmp_path: Path) -> None:
    worker = Worker(module.CASES, Setting(QUICK, "", tmp_path))  # type: ignore[attr-defined]
    for case in module.CASES:  # type: ignore[attr-defined]
        assert all(worker.seconds(case, "cpu", 2) > 0 for _ in range(2))  # checks results
    worker.forget()
