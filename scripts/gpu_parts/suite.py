"""Part "tests": the tests that need a CUDA device, by pytest."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_parts.figures import Row, Skipped, needs

if TYPE_CHECKING:
    from gpu_parts.figures import Report, Setting

__all__ = ["files_with_cuda", "run"]

_HOME = Path(__file__).parents[2]


def files_with_cuda() -> list[Path]:
    """Return the files of tests that have a test or a variant marked ``cuda``."""
    files = sorted((_HOME / "tests").rglob("test_*.py"))
    return [file for file in files if "mark.cuda" in file.read_text("utf-8")]


def run(report: Report, setting: Setting) -> None:
    """Run the marked tests of each file; each file has a process of its own."""
    needs(pytest="every test", hypothesis="the tests' conftest")
    if setting.size == "smallest":
        raise Skipped("the smallest size runs no tests: it is run by one")
    if not setting.on_gpu:
        report.note("The device is a CPU, so pytest collects the tests, and skips them.")
    for file in files_with_cuda():
        _run(report, setting, file)


def _run(report: Report, setting: Setting, file: Path) -> None:
    """Run the tests of a file, and add a row with their number."""
    name = str(file.relative_to(_HOME))
    result = setting.folder / f"{file.stem}.xml"
    # The project's own options need plug-ins that may be missing here.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", name, "-m", "cuda", "-q", "-p", "no:cacheprovider",
         "-o", "addopts=", "-o", "filterwarnings=default", f"--junitxml={result}"],
        cwd=_HOME, env=os.environ | {"OMP_NUM_THREADS": "4"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if not result.exists():
        last = " ".join((done.stdout + done.stderr).strip().splitlines()[-1:])
        note = f"exit code {done.returncode}: {last}"
        report.add(Row("pytest", name, right=False, note=note))
        return
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failed, reasons = [], set()
    for case in ET.parse(result).getroot().iter("testcase"):
        tags = {part.tag: part.get("message", "") for part in case}
        if {"failure", "error"} & tags.keys():
            counts["failed"] += 1
            said = (tags.get("failure") or tags.get("error") or "").splitlines()[:1]
            failed.append(f"{case.get('name')}: {' '.join(said)[:160]}")
        elif "skipped" in tags:
            counts["skipped"] += 1
            reasons.add(tags["skipped"])
        else:
            counts["passed"] += 1
    text = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    if reasons:
        text += f" ({'; '.join(sorted(reasons))})"
    ran = counts["passed"] + counts["failed"]
    right = None if not ran else not counts["failed"]
    note = "; ".join([text or "none collected", *failed[:5]])
    report.add(Row("pytest", name, right=right, note=note))
