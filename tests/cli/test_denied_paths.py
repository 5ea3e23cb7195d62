"""Paths that the user must not reach: one line that names them, and exit code 2."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvkeep.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator

TRACE = str(Path(__file__).parent.parent / "formats" / "0.1.0" / "trace.jsonl")
NOBODY = 65534
OUT = {
    "replay": ["replay", TRACE, "--capacity", "64", "--out", "{}"],
    "store": ["store", "ls", "file://{}"],
    "trace": ["trace", "convert", TRACE, "{}"],
}


@contextmanager
def denied(folder: Path) -> Iterator[None]:
    """Nobody reaches ``folder``; root, who would, is another user meanwhile."""
    root = os.geteuid() == 0
    folder.chmod(0)
    try:
        if root:
            os.seteuid(NOBODY)
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o700)


@pytest.mark.parametrize("command", OUT)
def test_a_path_that_is_denied_is_named_in_one_line(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "denied"
    folder.mkdir()
    for path in (folder / "no" / "r.txt", folder / "below" / "r.html"):
        words = [word.format(path) for word in OUT[command]]
        if path.suffix == ".txt":  # imports what the command needs, while it can be read
            main(words)
            capsys.readouterr()
            continue
        with denied(folder):
            code = main(words)
        said = capsys.readouterr().err
        assert code != 0
        assert said.count("\n") == 1
        assert said.startswith("kvkeep: error: ")
        assert str(folder) in said
        assert "ermission denied" in said


@pytest.fixture
def unreadable() -> Iterator[Path]:
    """A tier whose owner, in whose name the test goes on, may not read its records."""
    root = os.geteuid() == 0
    # Not below `tmp_path`, which root alone may enter.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        place = Path(made) / "tier"
        shutil.copytree(Path(TRACE).parent / "store", place)
        Path(made).chmod(0o755)
        assert main(["store", "verify", f"file://{place}"]) == 0  # imports what it needs
        for path in (place, *place.rglob("*")):
            if root:
                os.chown(path, NOBODY, NOBODY)
            if path.is_file() and len(path.parent.name) == 32:
                path.chmod(0)
        try:
            if root:
                os.seteuid(NOBODY)
            yield place
        finally:
            if root:
                os.seteuid(0)


def test_commands_that_look_leave_unreadable_records_where_they_are(
    unreadable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def files() -> list[Path]:
        return sorted(path for path in unreadable.rglob("*") if path.is_file())

    before, url = files(), f"file://{unreadable}"
    capsys.readouterr()
    for command, code in (("ls", 0), ("verify", 1)):
        assert main(["store", command, url, "--json"]) == code
        (tier,) = json.loads(capsys.readouterr().out)["tiers"]
        assert files() == before
    assert (tier["sound"], tier["gone"], tier["bad"]) == (0, 0, tier["blocks"])
    assert all("Permission denied" in one["why"] for one in tier["found"])

    assert main(["store", "verify", url, "--repair"]) == 1
    assert len(files()) == len(before)
    assert not [path for path in files() if len(path.parent.name) == 32]
