"""Tests marked ``cuda`` on an emulated GPU: they find mixed devices where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import emulated_gpu

HOME = Path(__file__).parents[1]
sys.path.insert(0, str(HOME / "scripts"))

from gpu_parts.suite import files_with_cuda  # noqa: E402 - behind its folder

FILES = [
    "engine/test_devices.py", "engine/test_flash.py", "engine/test_sampling.py",
    "groups/test_group_tensors.py", "pages/test_prepared.py", "pages/test_tensors.py",
]  # fmt: skip

NEW = "not (cuda-qwen3] or cuda-gemma2])"
"""These families take the ways of llama's and gemma3's tensors through kvkeep."""

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(emulated_gpu.MISSING, reason="this torch takes no backend in Python"),
]


def ran(tmp_path: Path, *files: str) -> dict[str, list[str]]:
    """The names of tests by how they ended, in a process to which the device was added."""
    report = tmp_path / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "emulated_gpu", "-q", "-m", "cuda", "-k", NEW,
         "-c", str(HOME / "pyproject.toml"), f"--rootdir={HOME}",
         "-p", "no:cacheprovider", f"--junitxml={report}", *files],
        cwd=HOME, capture_output=True, text=True, timeout=500, check=False,
        env=os.environ | {"PYTHONPATH": f"{HOME / 'src'}:{HOME / 'tests'}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert report.exists(), done.stdout + done.stderr
    found: dict[str, list[str]] = {"passed": [], "failure": [], "error": [], "skipped": []}
    for case in ET.parse(report).getroot().iter("testcase"):
        ends = [part.tag for part in case if part.tag in found] or ["passed"]
        found[ends[0]].append(case.get("name", ""))
    return found


def test_all_files_take_part():
    """But for tokens, which NumPy reads from CUDA's own arrays, and kept models.

    These keep tensors of inference mode, which a wrapper cannot hold.
    """
    apart = {"test_tokens.py", "integrations/test_transformers_devices.py"}
    assert {HOME / "tests" / file for file in {*FILES, *apart}} == set(files_with_cuda())


MISTAKES = """
import pytest, torch
pytestmark = pytest.mark.cuda
DEVICE = pytest.mark.parametrize("device", ["cuda"])

@DEVICE
def test_two_devices(device):
    torch.ones(3, device=device) + torch.ones(3)

@DEVICE
def test_numpy(device):
    torch.ones(3, device=device).numpy()

@DEVICE
def test_an_index_of_the_device(device):
    torch.ones(3)[torch.tensor([1, 2], device=device)]

@DEVICE
def test_a_misaligned_mask(device):
    query = torch.ones(1, 1, 2, 8, device=device)
    mask = torch.zeros(2, 32, device=device)[:, 3:5]
    torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)

@DEVICE
def test_a_copy(device):
    there = torch.zeros(3, device=device)
    there.copy_(torch.ones(3))
    there[[0, 2]] = 5
    there += 1
    assert there.device.type != "cpu"
    assert there.cpu().tolist() == there.tolist() == [6, 2, 6]
"""


def test_what_a_gpu_would_run_and_would_not(tmp_path):
    """In one process, which takes seconds to start."""
    mistakes = tmp_path / "test_mistakes.py"
    mistakes.write_text(MISTAKES)
    found = ran(tmp_path, *(f"tests/{file}" for file in FILES), str(mistakes))
    names = [
        "test_two_devices",
        "test_numpy",
        "test_an_index_of_the_device",
        "test_a_misaligned_mask",
    ]
    assert [name.partition("[")[0] for name in found["failure"]] == names
    assert found["error"] == []
    assert "test_a_copy[cuda]" in found["passed"]
    assert len(found["passed"]) > 200
    assert all("kernel_of_this_machine" in name for name in found["skipped"])
