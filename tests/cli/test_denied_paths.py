"""Paths that the user must not reach: one line that names them, and exit code 2."""

from __future__ import annotations

import os
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
    "codec fit": ["codec", "fit", "--out", "{}"],
    "codec measure": ["codec", "measure", "--out", "{}"],
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
