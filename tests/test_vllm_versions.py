"""The table of versions in the page on vLLM is what the last run wrote."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

HOME = Path(__file__).parents[1]
PAGE = (HOME / "docs" / "vllm.md").read_text()


def script() -> Any:
    spec = importlib.util.spec_from_file_location("versions", HOME / "scripts/vllm_versions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_of_the_last_run() -> None:
    run = script()
    record = json.loads(run.RECORD.read_text())
    assert f"{run.BEGIN}\n{run.table(record)}\n{run.END}" in PAGE
    versions = re.search(r"^VLLM_VERSIONS := (.*)$", (HOME / "Makefile").read_text(), re.MULTILINE)
    assert versions is not None
    assert list(record["versions"]) == versions[1].split()
    assert all(run.totals(each)[1] == 0 for each in record["versions"].values())


def test_counts_of_a_report() -> None:
    run = script()
    report = run.ET.fromstring(
        '<testsuite><testcase classname="tests_vllm.test_a"/>'
        '<testcase classname="tests_vllm.test_a"><failure/></testcase>'
        '<testcase classname="tests_vllm.test_b"><error/></testcase>'
        '<testcase classname="tests_vllm.test_b"><skipped message="no"/></testcase></testsuite>'
    )
    counts = run.counted(report)
    assert counts == {
        "test_a": {"passed": 1, "failed": 1, "skipped": []},
        "test_b": {"passed": 0, "failed": 1, "skipped": ["no"]},
    }
    assert run.totals({"files": counts}) == (1, 2, ["no"])


def test_versions_run_what_depends_on_them() -> None:
    run = script()
    every = {file.name for file in run.TESTS.glob("test_*.py")}
    assert set(run.files_of(run.NEWEST)) == every
    assert every - set(run.files_of("0.31")) == run.ONCE


def test_the_table_has_a_row_for_each_version(monkeypatch: Any, tmp_path: Path) -> None:
    run = script()
    page = tmp_path / "page.md"
    page.write_text(f"before\n{run.BEGIN}\nstale\n{run.END}\nafter\n")
    monkeypatch.setattr(run, "PAGE", page)
    files = {"a": {"passed": 1, "failed": 0, "skipped": []},
             "b": {"passed": 2, "failed": 0, "skipped": []}}  # fmt: skip
    row = {"vllm": "1.2.0", "torch": "2", "operators": "its own", "files": files}
    run.write_table({"versions": {"1.2": row}})
    text = page.read_text()
    assert "| 1.2.0 | its own | 2 | 2 | 3 | 0 | none |" in text
    assert "stale" not in text
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert sys.modules.get("versions") is None
