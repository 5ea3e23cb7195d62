"""The wheel in an environment of its own, for each Python of this machine.

First with NumPy alone, then with all extras that do not bring torch, which is gigabytes on some
machines.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from dist_checks.contents import description, metadata

__all__ = ["Checked", "checked", "pythons"]

OLDEST, NEWEST = 11, 20  # minor versions of Python 3 that are looked for
_FENCE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_MISSING = re.compile(
    r"MissingExtra: [\w.]+ is needed here; install it with: pip install 'kvkeep\[(\w+)\]'"
)
_EXTRA = re.compile(r"extra == ['\"](\w+)['\"]")
_LONGEST_S = 300


class Checked(NamedTuple):
    """What was found with one Python; ``skipped`` says why nothing was."""

    version: str
    faults: list[str]
    skipped: str = ""


def pythons() -> dict[int, Path]:
    """Return the newest Python 3.N of this machine for each N of at least 11, by N.

    Looked for on the PATH, and among the versions of pyenv.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found: dict[int, tuple[tuple[int, ...], Path]] = {}
    for minor in range(OLDEST, NEWEST):
        on_path = shutil.which(f"python3.{minor}")
        candidates = [Path(on_path)] if on_path else []
        candidates += sorted(pyenv.glob(f"versions/3.{minor}.*/bin/python"))
        for candidate in candidates:
            version = _version(candidate)
            if version[:2] == (3, minor) and version > found.get(minor, ((), candidate))[0]:
                found[minor] = version, candidate
    return {minor: path for minor, (_, path) in found.items()}


def checked(python: Path, wheel: Path) -> Checked:
    """Install ``wheel`` for ``python`` in a new environment and use it in an empty directory.

    Needs a package index, for NumPy and for the extras without torch. Takes about a minute.
    """
    version = ".".join(str(part) for part in _version(python))
    with tempfile.TemporaryDirectory(prefix="kvkeep-dist-") as made:
        folder = Path(made)
        empty = folder / "empty"
        empty.mkdir()
        created = _run([python, "-m", "venv", folder / "env"], folder)
        if created.returncode:
            return Checked(version, [], f"no virtual environment: {_last(created)}")
        inside = folder / "env" / "bin"
        faults = _installed(inside, folder, f"kvkeep @ {wheel.as_uri()}")
        faults = faults or [*_rooms(inside, empty, set()), *_shown(inside, empty, wheel)]
        if not faults:
            extras = light_extras(wheel)
            named = f"kvkeep[{','.join(sorted(extras))}] @ {wheel.as_uri()}"
            faults = _installed(inside, folder, named) or _rooms(inside, empty, extras)
        return Checked(version, faults)


def light_extras(wheel: Path) -> set[str]:
    """Return the extras of ``wheel`` that do not bring torch."""
    said = metadata(wheel)
    needs = said.get_all("Requires-Dist", [])
    heavy = {_EXTRA.search(one)[1] for one in needs if one.startswith("torch")}  # type: ignore[index]
    return set(said.get_all("Provides-Extra", [])) - heavy


def _installed(inside: Path, folder: Path, what: str) -> list[str]:
    for command in (["install", "--quiet", "--no-compile", what], ["check"]):
        done = _run([inside / "python", "-m", "pip", *command], folder)
        if done.returncode:
            return [f"pip {command[0]} {what}: {_last(done)}"]
    return []


def _rooms(inside: Path, empty: Path, extras: set[str]) -> list[str]:
    """Import all packages; each works, or names an extra that is not among the installed."""
    done = _run([inside / "python", Path(__file__).with_name("inside.py")], empty)
    if done.returncode:
        return [f"imports: {_last(done)}"]
    found = json.loads(done.stdout)
    faults = []
    if not Path(found["file"]).is_relative_to(inside.parent):
        faults.append(f"imports: kvkeep came from {found['file']}")
    for room, said in found["rooms"].items():
        if said is not None:
            named = _MISSING.fullmatch(said)
            if named is None or named[1] not in set(found["extras"]) - extras:
                faults.append(f"import {room}: {said}")
    return faults


def _shown(inside: Path, empty: Path, wheel: Path) -> list[str]:
    """Run what the index page shows, and the command."""
    faults = []
    version = wheel.name.split("-")[1]
    for command in ([inside / "kvkeep"], [inside / "python", "-m", "kvkeep"]):
        done = _run([*command, "--version"], empty)
        if done.stdout != f"kvkeep {version}\n":
            faults.append(f"{' '.join(map(str, command))} --version: {done.stdout}{_last(done)}")
    blocks = _FENCE.findall(description(wheel))
    if not blocks:
        faults.append("README: no block of Python")
    for code in blocks:
        done = _run([inside / "python", "-W", "error", "-c", code], empty)
        wanted = [
            line.split("# prints ", 1)[1] for line in code.splitlines() if "# prints " in line
        ]
        if done.returncode or done.stdout.splitlines() != wanted:
            faults.append(f"README: printed {done.stdout!r}, not {wanted}; {_last(done)}")
    return faults


def _version(python: Path) -> tuple[int, ...]:
    program = "import sys; print(*sys.version_info[:3])"
    done = _run([python, "-c", program], Path.cwd())
    return () if done.returncode else tuple(int(part) for part in done.stdout.split())


def _run(command: list[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run in ``folder``, without this checkout on the path of Python."""
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in hidden},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LONGEST_S,
        check=False,
    )


def _last(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"
