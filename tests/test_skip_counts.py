from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SUITE = """
import pytest

@pytest.mark.skipif(True, reason="no CUDA device")
def test_marked(): ...

@pytest.mark.parametrize("size", [1, 2])
def test_called(size):
    pytest.skip("no CUDA device" if size == 1 else "no Chromium is installed")

@pytest.mark.xfail(reason="is never counted")
def test_expected_to_fail():
    assert False
"""


def test_a_run_ends_with_the_count_of_skipped_tests_by_reason(tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "skip_counts", "-c", "/dev/null"]
    environment = {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [*command, "test_suite.py"], check=False, cwd=tmp_path, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 skipped, by reason" in done.stdout
    assert "    2  no CUDA device\n    1  no Chromium is installed\n" in done.stdout
    assert "never counted" not in done.stdout
