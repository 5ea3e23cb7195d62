"""Run the tests beside every version of vLLM, and write the table of the page.

    python scripts/vllm_versions.py 0.31 0.32 0.33 [--tests test_multi.py …]

runs ``tests_vllm`` in the environments ``.venv-vllm-VERSION`` (``make test-versions`` makes them),
and writes ``tests_vllm/versions.json`` and the table in ``docs/vllm.md``. Beside all versions but
one, tests that say nothing of the version are left out. With ``--tests`` the counts of these files
are replaced, and others stay; with ``--table`` only the table is written, from the record.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

HOME = Path(__file__).parents[1]
TESTS = HOME / "tests_vllm"
RECORD = TESTS / "versions.json"
PAGE = HOME / "docs" / "vllm.md"
BEGIN, END = "<!-- versions: begin -->", "<!-- versions: end -->"
NEWEST = "0.32"  # of the CPU builds: its environment is .venv-vllm
# Run beside the newest alone: what places do when they fail, and kvkeep's own parts and servers.
ONCE = {
    "test_one_memory.py", "test_parts.py", "test_router_vllm.py",
    "test_tier_faults.py", "test_tier_faults_restart.py", "test_tier_faults_servers.py",
    "test_tier_kill.py", "test_tier_table.py",
}  # fmt: skip


def main() -> int:
    """Run what the arguments say; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--tests", nargs="*", help="files; default: all that a version needs")
    parser.add_argument("--table", action="store_true", help="write the table, run nothing")
    args = parser.parse_args()
    record: dict[str, Any] = json.loads(RECORD.read_text())
    if not args.table:
        for version in args.versions:
            print(f"== beside vLLM {version}", flush=True)
            before = record["versions"].get(version) if args.tests is not None else None
            names = files_of(version) if args.tests is None else args.tests
            record["versions"][version] = tested(version, names, before)
            write(record)
    write_table(record)
    return 1 if sum(totals(each)[1] for each in record["versions"].values()) else 0


def files_of(version: str) -> list[str]:
    """Return the files of tests that are run beside a version."""
    every = sorted(file.name for file in TESTS.glob("test_*.py"))
    return [name for name in every if version == NEWEST or name not in ONCE]


def write(record: dict[str, Any]) -> None:
    """Write the record."""
    for part, found in record.items():
        record[part] = {name: found[name] for name in sorted(found)}
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def python(version: str) -> str:
    """Return the interpreter of a version's environment."""
    name = ".venv-vllm" if version == NEWEST else f".venv-vllm-{version}"
    return str(HOME / name / "bin" / "python")


def tested(version: str, names: list[str], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Run files of tests beside a version; return its full number, and counts for each file.

    Counts of other files are those of ``before``.
    """
    files = dict(before["files"]) if before else {}
    if names:
        with tempfile.TemporaryDirectory() as directory:
            report = Path(directory) / "report.xml"
            subprocess.run(
                [python(version), "-m", "pytest", *(f"tests_vllm/{name}" for name in names), "-q",
                 "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder",
                 f"--junitxml={report}"],
                cwd=HOME, env=environment(), check=False,
            )  # fmt: skip
            files |= counted(ET.parse(report).getroot())
    full = ran(version, "import vllm, torch; print(vllm.__version__, torch.__version__)").split()
    return {
        "vllm": full[0], "torch": full[1], "operators": operators(version),
        "files": {name: files[name] for name in sorted(files)},
    }  # fmt: skip


def counted(report: ET.Element) -> dict[str, Any]:
    """Return for each file how many tests passed and failed, and why others were skipped."""
    found: dict[str, Any] = {}
    for case in report.iter("testcase"):
        module = case.get("classname", "").rpartition(".")[2]
        counts = found.setdefault(module, {"passed": 0, "failed": 0, "skipped": []})
        skipped = [part.get("message", "") for part in case if part.tag == "skipped"]
        if {"failure", "error"} & {part.tag for part in case}:
            counts["failed"] += 1
        elif skipped:
            counts["skipped"] = sorted({*counts["skipped"], *skipped})
        else:
            counts["passed"] += 1
    return found


def totals(version: Mapping[str, Any]) -> tuple[int, int, list[str]]:
    """Return how many tests of a version passed, how many failed, and why others were skipped."""
    counts = version["files"].values()
    return (
        sum(each["passed"] for each in counts),
        sum(each["failed"] for each in counts),
        sorted({reason for each in counts for reason in each["skipped"]}),
    )


def operators(version: str) -> str:
    """Return whose compiled operators a version has: 0.33's Python has those of another one."""
    code = "import vllm, pathlib; print(*pathlib.Path(vllm.__file__).parent.glob('_C*.so'))"
    linked = [Path(file).is_symlink() for file in ran(version, code).split()]
    return f"those of {NEWEST}" if any(linked) else "its own"


def ran(version: str, code: str, *args: str) -> str:
    """Return the last line that a program prints in a version's environment."""
    said = subprocess.run(
        [python(version), "-c", code, *args],
        cwd=HOME / "tests_vllm", env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if said.returncode:
        sys.exit(said.stdout + said.stderr)
    return said.stdout.splitlines()[-1]


def environment() -> Mapping[str, str]:
    """Return the environment of the tests."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HOME / "src")}


def table(record: Mapping[str, Any]) -> str:
    """Return the table of a record, in Markdown."""
    lines = [
        "| vLLM | operators | torch | test files | passed | failed | skipped |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in record["versions"].values():
        passed, failed, skipped = totals(each)
        lines.append(
            f"| {each['vllm']} | {each['operators']} | {each['torch']} | "
            f"{len(each['files'])} | {passed} | {failed} | {'; '.join(skipped) or 'none'} |"
        )
    return "\n".join(lines)


def write_table(record: Mapping[str, Any]) -> None:
    """Put the table between its marks in the page."""
    page = PAGE.read_text()
    marked = f"{BEGIN}\n{table(record)}\n{END}"
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: marked, page, flags=re.DOTALL))


if __name__ == "__main__":
    sys.exit(main())
