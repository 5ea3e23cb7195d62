"""Run the tests of the vLLM connector beside every version, and write the table of the page.

    python scripts/vllm_versions.py 0.30 0.31 0.32 0.33 [--tests test_multi.py …]

runs ``tests_vllm`` in the environments ``.venv-vllm-VERSION`` (``make test-versions`` makes them),
then upgrades: KV that one version stored, found by another. It writes ``tests_vllm/versions.json``
and the table in ``docs/vllm.md``. With ``--table`` it only writes the table from that file.
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
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

HOME = Path(__file__).parents[1]
RECORD = HOME / "tests_vllm" / "versions.json"
PAGE = HOME / "docs" / "vllm.md"
BEGIN, END = "<!-- versions: begin -->", "<!-- versions: end -->"
NEWEST = "0.32"  # of the CPU builds: its environment is .venv-vllm


def main() -> int:
    """Run what the arguments say; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--tests", nargs="+", default=[""], help="files; default: all of them")
    parser.add_argument("--table", action="store_true", help="write the table, run nothing")
    args = parser.parse_args()
    if args.table:
        write_table(json.loads(RECORD.read_text()))
        return 0
    record: dict[str, Any] = {"versions": {}, "upgrades": {}}
    for version in args.versions:
        print(f"== beside vLLM {version}", flush=True)
        record["versions"][version] = tested(version, args.tests)
    record["upgrades"] = upgrades(args.versions)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    write_table(record)
    failed = sum(each["failed"] for each in record["versions"].values())
    return 1 if failed else 0


def python(version: str) -> str:
    """Return the interpreter of a version's environment."""
    name = ".venv-vllm" if version == NEWEST else f".venv-vllm-{version}"
    return str(HOME / name / "bin" / "python")


def tested(version: str, tests: list[str]) -> dict[str, Any]:
    """Run tests beside a version; return its full number, and counts."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        files = [str(Path("tests_vllm", name)) for name in tests]
        subprocess.run(
            [python(version), "-m", "pytest", *files, "-q", "-n", "2", "--dist", "loadfile",
             "--no-loadscope-reorder", f"--junitxml={report}"],
            cwd=HOME, env=environment(), check=False,
        )  # fmt: skip
        counts = counted(ET.parse(report).getroot())
    full = ran(version, "import vllm, torch; print(vllm.__version__, torch.__version__)").split()
    return {"vllm": full[0], "torch": full[1], "operators": operators(version), **counts}


def counted(report: ET.Element) -> dict[str, Any]:
    """Return how many tests passed and failed, and why others were skipped."""
    cases = list(report.iter("testcase"))
    failed = [case for case in cases if {"failure", "error"} & {part.tag for part in case}]
    skipped = [part for case in cases for part in case if part.tag == "skipped"]
    modules = {case.get("classname", "").rpartition(".")[2] for case in cases}
    return {
        "files": sorted(modules),
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": sorted({part.get("message", "") for part in skipped}),
    }


def operators(version: str) -> str:
    """Return whose compiled operators a version has: 0.33's Python has those of another one."""
    code = "import vllm, pathlib; print(*pathlib.Path(vllm.__file__).parent.glob('_C*.so'))"
    linked = [Path(file).is_symlink() for file in ran(version, code).split()]
    return f"those of {NEWEST}" if any(linked) else "its own"


def upgrades(versions: list[str]) -> dict[str, str]:
    """Store with one version, and ask the next one; return "warm", or why it is cold."""
    found = {}
    for older, newer in pairwise(versions):
        with tempfile.TemporaryDirectory() as directory:
            model, disk = f"{directory}/model", f"file://{directory}/kv?size=64MiB"
            said = [ran(each, UPGRADE, model, disk) for each in (older, newer)]
        found[f"{older} → {newer}"] = said[1]
        print(f"== {older} to {newer}: {said[1]}", flush=True)
    return found


UPGRADE = """
import conftest, logging, sys
from pathlib import Path
from engines import engine, prompt
from models import make_llama
model, tier = sys.argv[1:]
cold = not Path(model).exists()
if cold:
    make_llama(Path(model))
class Said(logging.Handler):
    def emit(self, record):
        text = record.getMessage()
        if "is cold after an upgrade: " in text:
            said.append(text.partition("is cold after an upgrade: ")[2])
said = []
log = logging.getLogger("kvkeep.vllm"); log.addHandler(Said()); log.setLevel("INFO")
with engine(model, ["memory://16MiB", tier], dtype="bfloat16") as one:
    (answer,) = one.ask([prompt(300)])
    if cold:
        Path(model + ".said").write_text(str(answer.tokens))
    assert Path(model + ".said").read_text() == str(answer.tokens)
print("warm" if answer.cached == 288 else "cold: " + ", ".join(said))
"""


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
        skipped = "; ".join(each["skipped"]) or "none"
        lines.append(
            f"| {each['vllm']} | {each['operators']} | {each['torch']} | "
            f"{len(each['files'])} | {each['passed']} | {each['failed']} | {skipped} |"
        )
    lines += ["", "| upgrade | KV of the older version |", "|---|---|"]
    lines += [f"| {name} | {said} |" for name, said in record["upgrades"].items()]
    return "\n".join(lines)


def write_table(record: Mapping[str, Any]) -> None:
    """Put the table between its marks in the page."""
    page = PAGE.read_text()
    marked = f"{BEGIN}\n{table(record)}\n{END}"
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: marked, page, flags=re.DOTALL))


if __name__ == "__main__":
    sys.exit(main())
