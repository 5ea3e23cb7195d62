"""What the documents show works as it stands: every Python block is run, every command exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import warm
from waiting_loads import LOADING
from warm import PYTHON

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[tuple[str, str]]:
    found = []
    for document in DOCUMENTS:
        for kind, code in _FENCE.findall(document.read_text(encoding="utf-8")):
            if kind == language:
                found.append((f"{document.name}:{len(found) + 1}", code))
    return found


@pytest.mark.parametrize(("where", "code"), blocks("python"), ids=lambda value: value[:24])
def test_python_blocks_run_as_pasted(where: str, code: str, tmp_path: Path) -> None:
    loads = "KVStore(" in code and "Engine(" in code
    done = warm.run(
        [*PYTHON, "-c", LOADING + code if loads else code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{where} fails:\n{done.stderr}"
    shown = [line.split("# prints ", 1)[1] for line in code.splitlines() if "# prints " in line]
    assert done.stdout.splitlines() == shown, f"{where} does not print what it says"


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    done = warm.run(
        [*PYTHON, str(example)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_there_are_blocks_to_run() -> None:
    assert any(where.startswith("README") for where, _ in blocks("python"))


def test_make_targets_in_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"`make ([a-z-]+)", document.read_text(encoding="utf-8")):
            assert target in targets, f"{document.name} names `make {target}`"


def test_links_between_documents_lead_somewhere() -> None:
    for document in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_changelog_tells_each_change_once() -> None:
    changes = re.split(r"^(?=- |#)", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)
    told = [change.strip() for change in changes if change.startswith("- ")]
    assert len(told) > 20
    assert sorted(told) == sorted(set(told))
