"""Environments with kvkeep, some extras and nothing else, made of what is installed here."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sysconfig
import tomllib
import venv
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["EXTRAS", "ROOT", "brought_by", "make", "packages", "said_in"]

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def brought_by(extras: list[str]) -> set[str]:
    """The distributions that pip would install with kvkeep and ``extras``."""
    given = [*PROJECT["dependencies"], *(one for extra in extras for one in EXTRAS[extra])]
    waiting = [Requirement(one) for one in given]
    seen: set[tuple[str, str]] = set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        for extra in {"", *wanted.extras} - {extra for one, extra in seen if one == name}:
            seen.add((name, extra))
            waiting += map(Requirement, _requirements(name, extra))
    return {name for name, _ in seen} - {"kvkeep"}


def _requirements(name: str, extra: str) -> list[str]:
    """What a distribution with ``extra`` needs; nothing of one that is not installed here."""
    if name == "kvkeep":
        return EXTRAS.get(extra, [])
    with suppress(importlib.metadata.PackageNotFoundError):
        needed = [(text, Requirement(text)) for text in importlib.metadata.requires(name) or []]
        return [
            text for text, it in needed if it.marker is None or it.marker.evaluate({"extra": extra})
        ]
    return []


@cache
def packages(name: str) -> set[str]:
    """The files and folders that a distribution has in `site-packages`; none if not installed."""
    try:
        files = importlib.metadata.distribution(name).files or []
    except importlib.metadata.PackageNotFoundError:
        return set()
    return {file.parts[0] for file in files} - {"..", "__pycache__"}


def make(folder: Path, extras: list[str]) -> Path:
    """Make an environment in ``folder`` with links to what ``extras`` bring; return its Python."""
    venv.create(folder, symlinks=True, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (site / "kvkeep").symlink_to(ROOT / "src" / "kvkeep")
    ours = importlib.metadata.distribution("kvkeep")
    for file in ours.files or []:
        if file.name == "METADATA":
            (site / file.parent.name).symlink_to(Path(str(ours.locate_file(file))).parent)
    brought = brought_by(extras)
    shared = Counter(top for name in brought for top in packages(name))
    for name in brought:
        for top in packages(name):
            if not top.endswith(".pth"):
                _link(name, top, site, alone=shared[top] == 1)
    return folder / "bin" / "python"


def _link(name: str, top: str, site: Path, *, alone: bool) -> None:
    """Link what is called ``top``; file by file where other distributions have files in it."""
    distribution = importlib.metadata.distribution(name)
    inside = [file for file in distribution.files or [] if file.parts[0] == top]
    for file in [Path(top)] if alone else inside:
        there = site / file
        if not there.exists():  # several may have the same file
            there.parent.mkdir(parents=True, exist_ok=True)
            there.symlink_to(Path(str(distribution.locate_file(file))))


def said_in(python: Path, programs: list[str]) -> list[str | None]:
    """What each of ``programs`` raises in an environment, one process for all; None: nothing."""
    done = subprocess.run(
        [python, "-I", Path(__file__).with_name("programs.py"), *programs],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[str | None] = json.loads(done.stdout)
    return found
