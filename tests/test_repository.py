"""What the repository keeps: sources, and nothing that a command makes; and programs that begin."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1]


@pytest.mark.skipif(
    not (HOME / ".git").exists() or shutil.which("git") is None, reason="this is no git checkout"
)
def test_nothing_that_is_ignored_is_kept() -> None:
    """An environment that was added before `.gitignore` named it stays in every checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--ignored", "--exclude-standard"]
    found = subprocess.run(command, cwd=HOME, capture_output=True, text=True, check=True)
    kept = found.stdout.split("\0")[:-1]
    assert not kept, f"{len(kept)} files, the first is {kept[0]}"


def test_the_soak_lowers_bounds_that_exist() -> None:
    """It names them by text, and it runs only before a release."""
    code = "import soak; soak.remember_little()"
    found = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        cwd=HOME / "scripts",
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
