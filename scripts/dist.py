"""Build the wheel and the source distribution, and check them as a user gets them.

    python scripts/dist.py [--out dist]

1. Both are built, the wheel from the source distribution, as the tools of a user do.
2. ``twine check --strict``: a package index takes the metadata and shows the description.
3. Contents: exactly what Git tracks, the licences of vendored parts, no link that leads nowhere.
4. For each Python of this machine, an environment with the wheel and NumPy alone: every package
   imports or names its extra, and the README's example prints what it says, in an empty directory.
   Then with all extras that do not bring torch.

A Python of the classifiers that is not on this machine is named as skipped. Needs `build` and
`twine` (requirements-dev.txt), Git, and a package index. The exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from dist_checks.bare import checked, pythons
from dist_checks.contents import faults_of, listed, sdist_files, wheel_files

ROOT = Path(__file__).parent.parent
_CLASSIFIER = "Programming Language :: Python :: 3."


def main() -> int:
    """Build and check; print what was found."""
    parser = argparse.ArgumentParser(description="Build a release and check it.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="a folder; it is emptied")
    out: Path = parser.parse_args().out
    wheel, sdist = _built(out)
    subprocess.run(
        [sys.executable, "-m", "twine", "--no-color", "check", "--strict", wheel, sdist], check=True
    )
    faults = faults_of(wheel, sdist, ROOT, listed(ROOT))
    for one, count in ((wheel, len(wheel_files(wheel))), (sdist, len(sdist_files(sdist)))):
        print(f"{one.name}: {count} files, {one.stat().st_size / 2**20:.1f} MiB")
    faults += _by_python(wheel)
    for fault in faults:
        print(f"wrong: {fault}")
    print(f"{out}: {len(faults)} faults" if faults else f"{out}: ready to be released")
    return 1 if faults else 0


def _built(out: Path) -> tuple[Path, Path]:
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", out, ROOT], check=True)
    [wheel], [sdist] = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def _by_python(wheel: Path) -> list[str]:
    """Check the wheel with each Python there is; return the faults, one line each."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found = pythons()
    promised = {
        int(one.removeprefix(_CLASSIFIER))
        for one in project["classifiers"]
        if one.startswith(_CLASSIFIER)
    }
    faults: list[str] = []
    for minor in sorted(promised | found.keys()):
        if minor not in found:
            print(f"Python 3.{minor}: skipped: neither on the PATH nor in pyenv")
            continue
        result = checked(found[minor], wheel)
        if result.skipped:
            state = f"skipped: {result.skipped}"
        elif result.faults:
            state = f"{len(result.faults)} faults"
        else:
            state = "a bare environment, the README's example, and extras without torch are right"
        print(f"Python {result.version}: {state}", flush=True)
        faults += [f"Python {result.version}: {fault}" for fault in result.faults]
    return faults


if __name__ == "__main__":
    sys.exit(main())
