"""Part "tests": the tests that need a CUDA device, by pytest.

A collection error, such as of a file whose imports are missing here, is a failure.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from gpu_parts.figures import Row, Skipped, needs

if TYPE_CHECKING:
    from gpu_parts.figures import Report, Setting

__all__ = ["files_with_cuda", "run"]

_SPARE_S = 8.0  # of the part's deadline: to end, and to write
_HOME = Path(__file__).parents[2]
_MARKED = re.compile(r"^@pytest\.mark\.cuda|marks=pytest\.mark\.cuda", re.MULTILINE)


def files_with_cuda() -> list[Path]:
    """Return the files of tests that have a test or a variant marked ``cuda``."""
    files = sorted((_HOME / "tests").rglob("test_*.py"))
    return [file for file in files if _MARKED.search(file.read_text("utf-8"))]


def run(report: Report, setting: Setting) -> None:
    """Run the marked tests of all files.

    On a GPU each file has a process of its own: after an illegal access, nothing else in the same
    process can use the device.
    """
    needs(pytest="every test", hypothesis="the tests' conftest")
    if setting.size == "smallest":
        raise Skipped("the smallest size runs no tests: it is run by one")
    files = files_with_cuda()
    if not setting.on_gpu:
        report.note("The device is a CPU, so pytest collects the tests, and skips them.")
    try:
        needs(transformers="the conftest of tests/engine")
    except Skipped as reason:
        report.skip(str(reason))
        files = [file for file in files if file.parent.name != "engine"]
    ends = monotonic() + float(os.environ.get("KVKEEP_PROOF_DEADLINE", "600")) - _SPARE_S
    groups = [[file] for file in files] if setting.on_gpu else [files]
    for number, some in enumerate(groups):
        left = ends - monotonic()
        # One that hangs leaves half of the time to the others.
        _run(report, setting, some, left if number + 1 == len(groups) else left / 2)


def _run(report: Report, setting: Setting, files: list[Path], limit: float) -> None:
    """Run the tests of some files in a process, and add a row for each."""
    names = [str(file.relative_to(_HOME)) for file in files]
    result = setting.folder / "tests.xml"
    result.unlink(missing_ok=True)
    log = setting.folder / "tests.log"  # no pipe: what a killed process started may hold it open
    # The project's own options need plug-ins that may be missing here.
    command = [
        sys.executable, "-m", "pytest", *names, "-m", "cuda", "-q", "-p", "no:cacheprovider",
        "-o", "addopts=", "-o", "filterwarnings=default", f"--junitxml={result}",
    ]  # fmt: skip
    with log.open("wb") as said:
        try:
            code = subprocess.run(
                command, cwd=_HOME, env=_environment(), stdout=said, stderr=said, check=False,
                timeout=max(1.0, limit),
            ).returncode  # fmt: skip
            ended = f"exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"not done after {limit:.0f} s"
    if not result.exists():
        last = " ".join(log.read_text("utf-8", errors="replace").strip().splitlines()[-1:])
        report.add(Row("pytest", ", ".join(names), right=False, note=f"{ended}: {last[-200:]}"))
        return
    cases = list(ET.parse(result).getroot().iter("testcase"))
    for name in names:
        module = name.removesuffix(".py").replace("/", ".")
        # A file that cannot be imported is a case without a class.
        mine = [
            one for one in cases
            if f"{one.get('classname') or one.get('name')}.".startswith(f"{module}.")
        ]  # fmt: skip
        report.add(_row(name, mine))


def _environment() -> dict[str, str]:
    """Return that of a process that finds kvkeep in this repository, installed or not."""
    paths = [str(_HOME / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"OMP_NUM_THREADS": "4", "PYTHONPATH": os.pathsep.join(paths)}


def _row(name: str, cases: list[ET.Element]) -> Row:
    """Return the row of a file: how its tests ended."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failed, reasons = [], set()
    for case in cases:
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
    return Row("pytest", name, right=right, note="; ".join([text or "none collected", *failed[:5]]))
