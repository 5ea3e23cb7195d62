"""The contents of a wheel and of a source distribution, held against the files of a checkout."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from email.message import Message
    from pathlib import Path

__all__ = ["description", "faults_of", "listed", "metadata", "sdist_files", "wheel_files"]

MOST_BYTES = 10 * 2**20  # a wheel has 6 MiB, nearly all of it the tiny model
_RELATIVE = re.compile(r"\]\((?!https?://|#)[^)]*\)")
_CHECKOUT = ("constraints.txt", "in this folder", "Until there is a release")


def faults_of(wheel: Path, sdist: Path, root: Path, files: list[str]) -> list[str]:
    """Return what is wrong with the two files, one line each; none if they can be released.

    ``root`` is the checkout that they were built from, and ``files`` those that belong to it.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    return [
        *_wheel_faults(wheel, project, files),
        *_sdist_faults(sdist, project, files),
        *_index_page_faults(wheel, project),
    ]


def listed(root: Path, *, new: bool = False) -> list[str]:
    """Return the files of a checkout that Git tracks; ``new``: also those it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", *(["--others", "--exclude-standard"] * new)]
    found = subprocess.run(command, cwd=root, capture_output=True, check=True)
    return found.stdout.decode().rstrip("\0").split("\0")


def wheel_files(wheel: Path) -> dict[str, int]:
    """Return the files of a wheel, each with its bytes when unpacked."""
    with zipfile.ZipFile(wheel) as opened:
        return {one.filename: one.file_size for one in opened.infolist()}


def sdist_files(sdist: Path) -> set[str]:
    """Return the files of a source distribution, without its top folder."""
    with tarfile.open(sdist) as opened:
        return {one.name.partition("/")[2] for one in opened if one.isfile()}


def metadata(wheel: Path) -> Message:
    """Return the metadata of a wheel; the payload is its description."""
    with zipfile.ZipFile(wheel) as opened:
        [name] = [one for one in opened.namelist() if one.endswith(".dist-info/METADATA")]
        return message_from_bytes(opened.read(name))


def description(wheel: Path) -> str:
    """Return what a package index shows of a wheel: Markdown."""
    payload = metadata(wheel).get_payload(decode=True)
    assert isinstance(payload, bytes)
    return payload.decode("utf-8")


def _wheel_faults(wheel: Path, project: dict[str, Any], files: list[str]) -> Iterator[str]:
    found = wheel_files(wheel)
    info = f"{wheel.name.split('-py3', maxsplit=1)[0]}.dist-info"
    licences = [
        name
        for pattern in project["project"]["license-files"]
        for name in fnmatch.filter(files, pattern)
    ]
    wanted = {name.removeprefix("src/") for name in files if name.startswith("src/kvkeep/")}
    wanted |= {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    wanted |= {f"{info}/licenses/{name}" for name in licences}
    yield from _differences("wheel", set(found), wanted)
    for folder in sorted({"/".join(name.split("/")[:-1]) for name in files if _foreign(name)}):
        if not any(name.startswith(f"{folder}/") for name in licences):
            yield f"wheel: no file of license-files is about {folder}"
    if sum(found.values()) > MOST_BYTES:
        yield f"wheel: {sum(found.values())} bytes unpacked; at most {MOST_BYTES} are meant to be"


def _foreign(name: str) -> bool:
    """Whether a file was not written for kvkeep, so that it has a licence of its own."""
    return name.startswith(("src/kvkeep/vendor/", "src/kvkeep/serve/models/")) and not (
        name.endswith(".py")
    )


def _sdist_faults(sdist: Path, project: dict[str, Any], files: list[str]) -> Iterator[str]:
    include = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    wanted = {
        name
        for name in files
        for pattern in include
        if name.startswith(f"{pattern}/") or fnmatch.fnmatch(name, pattern)
    }
    # The build backend adds its own metadata, the build file, and what Git ignores.
    yield from _differences(
        "sdist", sdist_files(sdist), wanted | {"PKG-INFO", "pyproject.toml", ".gitignore"}
    )


def _differences(where: str, found: set[str], wanted: set[str]) -> Iterator[str]:
    for name in sorted(wanted - found):
        yield f"{where}: {name} is missing"
    for name in sorted(found - wanted):
        yield f"{where}: {name} is too much, or not in Git"


def _index_page_faults(wheel: Path, project: dict[str, Any]) -> Iterator[str]:
    shown = description(wheel)
    for link in _RELATIVE.findall(shown):
        yield f"index page: the link {link} leads nowhere outside the repository"
    for words in _CHECKOUT:
        if words in shown:
            yield f"index page: {words!r} is about a checkout"
    version = project["project"]["version"]
    for tag in set(re.findall(r"/kvkeep/kvkeep/(?:blob/)?(v[\d.]+)/", shown)) - {f"v{version}"}:
        yield f"index page: links lead to {tag}, the version is {version}"
