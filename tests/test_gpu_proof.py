"""The script for a GPU, proven on a CPU: its smallest run, its deadlines, its page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

HOME = Path(__file__).parents[1]
sys.path.insert(0, str(HOME / "scripts"))

import gpu_proof  # noqa: E402 - behind its folder
from gpu_parts import figures, suite  # noqa: E402
from gpu_parts.page import page, wrong  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.model
def test_the_smallest_run_holds(tmp_path, capsys):
    """With the real engine, over memory and a disk."""
    parts = ["agreement", "first_token", "passes"]
    code = gpu_proof.main(
        ["--device", "cpu", "--smallest", "--out", str(tmp_path), "--only", *parts]
    )
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "gpu-proof.json").read_text())
    assert code == 0, said
    assert list(found["parts"]) == ["machine", *parts]
    assert {part["status"] for part in found["parts"].values()} == {"done"}
    assert found["parts"]["machine"]["facts"]["torch"]
    rows = found["parts"]["first_token"]["rows"]
    assert [row["name"] for row in rows] == [
        "computed", "hit in the pool", "from memory", "from memory, all loaded", "from disk",
        "from disk, all loaded",
    ]  # fmt: skip
    assert all(row["median"] > 0 for row in rows)
    assert [row["name"] for row in rows if row["right"]] == [
        "from memory, all loaded", "from disk, all loaded"
    ]  # fmt: skip
    assert (tmp_path / "gpu-proof.md").read_text() == page(found)


def test_a_device_that_is_not_there(tmp_path, capsys):
    assert gpu_proof.main(["--device", "abacus", "--smallest", "--out", str(tmp_path)]) == 1
    assert "no torch device is named 'abacus'" in capsys.readouterr().out
    found = json.loads((tmp_path / "gpu-proof.json").read_text())
    assert list(found["parts"]) == ["machine"]
    assert found["parts"]["machine"]["status"] == "failed"


WRITES = """
import json, os, pathlib, subprocess, sys, time
row = {"case": "one", "name": "row", "values": [], "ratio": None, "right": None, "note": ""}
found = {"rows": [row], "notes": [], "skipped": [], "facts": {}}
pathlib.Path("found.json").write_text(json.dumps(found))
"""
HANGS = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("a kernel hangs here", flush=True)
pathlib.Path("pid.new").write_text(str(child.pid))
os.replace("pid.new", "pid")
time.sleep(600)
"""


def passes_once(begun: Callable[[], bool]) -> Callable[[], float]:
    """A clock that stands until ``begun()``, and is then past every deadline.

    However long a process needs to start: it stands for ten minutes at most.
    """
    start = time.monotonic()
    return lambda: 1e6 if begun() or time.monotonic() - start > 600 else 0.0


def run(folder: Path, code: str, deadline: float):
    before = Path.cwd()
    os.chdir(folder)
    try:
        return gpu_proof.run_part([sys.executable, "-c", code], folder, deadline)
    finally:
        os.chdir(before)


def test_what_a_part_found_before_it_hung_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_proof, "monotonic", passes_once((tmp_path / "pid").exists))
    part = run(tmp_path, WRITES + HANGS, 8.0)
    assert part["status"] == "too slow"
    assert [row["name"] for row in part["rows"]] == ["row"]
    assert "a kernel hangs here" in part["error"]
    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    for _ in range(200):  # what it started ended with it, once the killed process had its turn
        if not state.exists() or ") Z " in state.read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail(state.read_text())


def test_a_hang_is_told_by_its_innermost_calls(tmp_path, monkeypatch):
    hang = (
        "\nimport faulthandler\n"
        "def inner(): faulthandler.dump_traceback_later(0.1); time.sleep(600)\n"
        "def outer(depth): outer(depth - 1) if depth else inner()\n"
        "outer(40)\n"
    )
    log = tmp_path / "log"
    told = passes_once(lambda: log.exists() and log.read_text().endswith("in <module>\n"))
    monkeypatch.setattr(gpu_proof, "monotonic", told)
    part = run(tmp_path, WRITES + hang, 8.0)
    assert part["status"] == "too slow"
    assert "in inner" in part["error"]


@pytest.mark.parametrize(
    ("code", "status"),
    [("", "done"), ("sys.exit(3)", "skipped"), ("sys.exit('no memory')", "failed"),
     ("os.kill(os.getpid(), 11)", "failed")],
)  # fmt: skip
def test_how_a_part_ends(tmp_path, code, status):
    part = run(tmp_path, WRITES + code, 60.0)
    assert part["status"] == status
    assert len(part["rows"]) == 1
    assert bool(part["error"]) is (status == "failed")


def test_a_part_without_time_is_not_begun(tmp_path):
    part = run(tmp_path, WRITES, 0.0)
    assert (part["status"], part["rows"]) == ("too slow", [])
    assert not (tmp_path / "found.json").exists()


@pytest.mark.parametrize("option", ["--out", "--disk"])
def test_a_folder_that_cannot_be_written_does_not_cost_the_run(tmp_path, capsys, option):
    file = tmp_path / "file"
    file.touch()
    given = ["--out", str(tmp_path / "out"), option, str(file / "below")]
    assert gpu_proof.main(["--device", "cpu", "--smallest", "--only", "machine", *given]) == 0
    said = capsys.readouterr().out
    assert f"nothing can be written to {file / 'below'}; it goes to " in said
    written = Path(said.rpartition("written: ")[2].strip())
    assert "The machine" in written.read_text()
    if option == "--out":
        for name in ("gpu-proof.md", "gpu-proof.json"):
            (written.parent / name).unlink()


def test_a_run_that_is_ended_ends_its_part(tmp_path):
    script = [sys.executable, str(HOME / "scripts" / "gpu_proof.py"), "--device", "cpu"]
    run = subprocess.Popen(
        [*script, "--smallest", "--out", str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    while not (part := children.read_text().split()):
        time.sleep(0.01)
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "failed" in said
    assert "written: " in said
    assert not Path(f"/proc/{part[0]}").exists()


def test_a_package_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(figures.metadata, "version", lambda _name: "4.57.1")
    with pytest.raises(figures.Skipped, match=r"the engine needs transformers 5, not 4\.57\.1"):
        figures.needs(transformers="the engine", pytest="tests")


def test_a_file_of_tests_that_hangs_is_a_row(tmp_path, monkeypatch):
    """With what it had begun, which holds its output open."""
    hangs = tmp_path / "test_hangs.py"
    hangs.write_text(
        "import pathlib, subprocess, time\n"
        "import pytest\n"
        "@pytest.mark.cuda\n"
        "def test_it():\n"
        "    subprocess.Popen(['sleep', '60'])\n"
        "    pathlib.Path('begun').touch()\n"
        "    time.sleep(600)\n"
    )
    monkeypatch.setattr(subprocess, "_time", passes_once((tmp_path / "begun").exists))
    monkeypatch.setattr(suite, "_HOME", tmp_path)
    report = figures.Report(tmp_path / "found.json")
    setting = figures.Setting(figures.torch.device("cpu"), "small", tmp_path)
    began = time.monotonic()
    suite._run(report, setting, [hangs], 8.0)
    assert time.monotonic() - began < 50
    (row,) = report.rows
    assert row.right is False
    assert row.note.startswith("not done after 8 s")


def test_deadlines_are_within_ten_minutes():
    assert sum(part.deadline for part in gpu_proof.PARTS.values()) <= 600


def test_the_page_in_the_docs_is_of_the_last_run():
    found = json.loads((HOME / "docs" / "gpu-proof.json").read_text())
    assert (HOME / "docs" / "gpu-proof.md").read_text() == page(found)
    assert list(found["parts"]) == list(gpu_proof.PARTS)
    assert not [name for part in found["parts"].values() for name in wrong(part)]


def test_all_that_needs_a_gpu_is_marked():
    """So that the script finds it; a test that asks by itself would be left out."""
    asks = {
        file.name for file in (HOME / "tests").rglob("*.py")
        if "cuda.is_available()" in file.read_text() and file != Path(__file__)
    }  # fmt: skip
    # The last two ask for tests of machines without a GPU.
    assert asks == {"conftest.py", "test_mistakes.py", "test_tensors.py"}
