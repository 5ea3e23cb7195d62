"""The benchmark beside other systems: its workers, its tables, and the page that has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from peers.table import BEGIN, END, TITLES, Measured, notes, rows_of, table, write
from peers.work import CASES, FULL, OURS, QUICK, SYSTEMS, System, cases
from peers.workers import Peer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"


def tables_of_the_page() -> list[list[list[str]]]:
    """The tables between the marks of the page, as cells."""
    _, begin, rest = PAGE.read_text("utf-8").partition(BEGIN)
    written, end, _ = rest.partition(END)
    assert begin
    assert end
    blocks = [block.splitlines() for block in written.split("\n\n")]
    return [rows_of(block) for block in blocks if block and block[0].startswith("|")]


def test_the_page_has_a_line_for_each_case_and_a_column_for_each_system() -> None:
    found = tables_of_the_page()
    assert len(found) == len(TITLES)
    for (part, unit), (header, *rows) in zip(TITLES.items(), found, strict=True):
        assert header == [unit, *(one.name for one in SYSTEMS if one.part == part)]
        assert [row[0] for row in rows] == [case.title for case in CASES if case.part == part]
        assert all(len(row) == len(header) for row in rows)
        assert all(row[1][0].isdigit() for row in rows), "kvkeep was measured in every line"


def test_the_names_of_cases_do_not_depend_on_their_sizes() -> None:
    assert [one.name for one in cases(QUICK)] == [one.name for one in CASES]
    assert len({one.name for one in CASES}) == len(CASES)
    assert len({one.title for one in CASES}) == len(CASES)


def test_all_of_kvkeep_in_one_run(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/beside_peers.py", "--quick", "--rounds", "1",
               "--only", OURS, "--json", "--dir", str(tmp_path)]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["failed"]
    assert not found["missing"]
    assert list(found["versions"]) == [OURS]
    for case in CASES:
        (seconds,) = found["seconds"][case.name][OURS]
        assert seconds > 0
    assert not list(tmp_path.iterdir()), "it left files"


def test_a_system_that_is_not_installed_says_so(tmp_path: Path) -> None:
    nowhere = System("nobody", "tiers", ".venv-nobody", "kvkeep_store")
    with (tmp_path / "log").open("w") as log:
        peer = Peer(nowhere, QUICK, 0, tmp_path / "work", log)
        peer.begin()
        assert peer.missing == ".venv-nobody is not set up"
        assert peer.seconds(CASES[0]) == peer.missing
        peer.close()
        # In this environment there is no LMCache.
        other = System("LMCache", "tiers", Path(sys.prefix).name, "lmcache_engine")
        peer = Peer(other, QUICK, min(os.sched_getaffinity(0)), tmp_path / "other", log)
        peer.begin()
        assert "lmcache" in peer.missing
        peer.close()


def test_a_worker_that_ends_is_a_failure_and_not_a_wait(tmp_path: Path) -> None:
    ours = next(one for one in SYSTEMS if one.name == OURS and one.part == "prefixes")
    with (tmp_path / "log").open("w") as log:
        peer = Peer(ours, QUICK, min(os.sched_getaffinity(0)), tmp_path / "work", log)
        peer.begin()
        assert CASES[0].name in peer.cases
        assert isinstance(peer.seconds(CASES[0]), float)
        assert peer._process is not None
        peer._process.kill()
        assert peer.seconds(CASES[0]) == "its worker ended"
        assert peer.seconds(CASES[0]) == "its worker ended"
        peer.close()


def test_ratios_are_of_rounds() -> None:
    measured = Measured(FULL)
    case = CASES[0]
    for ours, theirs in ((1e-5, 2e-5), (2e-5, 8e-5), (4e-5, 4e-5)):
        measured.add(case, OURS, ours)
        measured.add(case, "vLLM", theirs)
    assert measured.cell(case, OURS) == "20.0"
    assert measured.cell(case, "vLLM") == "40.0: 2.00× (1.00 … 4.00)"
    assert measured.cell(case, "SGLang, Rust") == "–"
    measured.add(case, "SGLang, Rust", "IndexError: of it")
    assert measured.cell(case, "SGLang, Rust") == "failed"
    header, *rows = rows_of(table(measured, "prefixes"))
    assert header[:3] == ["µs", OURS, "vLLM"]
    assert rows[0][:3] == [case.title, "20.0", "40.0: 2.00× (1.00 … 4.00)"]


def test_what_is_said_of_a_run() -> None:
    measured = Measured(
        FULL, 0.25, versions={OURS: "1", "SGLang, Rust": "2", "SGLang, Python": "2"}
    )
    for ours, theirs in ((2e-5, 1e-5), (3e-5, 2e-5)):
        measured.add(CASES[0], OURS, ours)
        measured.add(CASES[0], "vLLM", theirs)
        measured.add(CASES[1], OURS, ours)
        measured.add(CASES[1], "vLLM", 2.5e-5)
    first, *more = notes(measured)
    assert first.startswith("Medians of 2 rounds; when they began, 0.2 other processes")
    assert first.endswith("Versions: kvkeep 1, SGLang 2.")
    assert more == ["", "Faster than kvkeep in all rounds:", "", f"- {CASES[0].title}: vLLM"]
    measured.missing["LMCache"] = "no wheel"
    measured.add(CASES[2], "vLLM", "KeyError: 7")
    assert notes(measured)[-2:] == [
        "- LMCache was not measured: no wheel.",
        f"- vLLM failed at “{CASES[2].title}”: KeyError: 7.",
    ]
    again = Measured.read(json.dumps(asdict(measured)))
    assert again == measured


def test_only_what_is_between_the_marks_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}\n\nold\n\n{END}\n\nafter\n")
    write(page, ["| new |"])
    assert page.read_text() == f"before\n\n{BEGIN}\n\n| new |\n\n{END}\n\nafter\n"
    write(page, ["| new |"])
    assert page.read_text() == f"before\n\n{BEGIN}\n\n| new |\n\n{END}\n\nafter\n"
    page.write_text(f"before {END}")
    with pytest.raises(ValueError, match="peers"):
        write(page, [])
