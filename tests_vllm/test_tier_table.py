"""The table of faults below vLLM's offloading: each cell is held by the test that it names."""

from __future__ import annotations

import ast
from pathlib import Path

from tiers import FS, OBJ, OURS, PAGE, table

FILES = ("faults", "faults_restart", "faults_servers", "kill")


def test_each_cell_is_held_by_a_test() -> None:
    tests: dict[str, str] = {}
    for name in FILES:
        source = (Path(__file__).parent / f"test_tier_{name}.py").read_text()
        for found in ast.walk(ast.parse(source)):
            if isinstance(found, ast.FunctionDef) and found.name.startswith("test_"):
                tests[found.name] = ast.get_source_segment(source, found) or ""
    cells = table()
    for (fault, system), (_, test) in cells.items():
        assert test in tests, f"{PAGE.name}: no {test}"
        assert f'"{fault}"' in tests[test], f"{test} does not look at {fault} of {system}"
    assert {test for _, test in cells.values()} <= set(tests)


def test_vllm_and_kvkeep_are_side_by_side() -> None:
    """Each fault is seen in kvkeep and in a tier of vLLM; in kvkeep no token is wrong."""
    cells = table()
    for fault in {fault for fault, _ in cells}:
        assert (fault, OURS) in cells, fault
        assert (fault, FS) in cells or (fault, OBJ) in cells, fault
        assert "wrong tokens" not in cells[fault, OURS][0]
