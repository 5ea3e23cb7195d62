"""Fetch the chart library of `kvkeep replay`'s reports and the server's dashboard, and verify it.

    python scripts/vendor_charts.py            # into src/kvkeep/vendor/uplot
    python scripts/vendor_charts.py --check    # is what lies there what the registry has?

uPlot (MIT) because both have to work without a network and stay small: 51 kB minified with no
dependencies, no eval and no innerHTML, so a page can forbid all scripts but its own. Needs npm.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "uplot@1.6.32"
INTEGRITY = (  # SHA-512, in base64, as the registry gives it
    "KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw=="
)
FILES = {
    "package/dist/uPlot.iife.min.js": "uPlot.iife.min.js",
    "package/dist/uPlot.min.css": "uPlot.min.css",
    "package/LICENSE": "LICENSE",
}
VENDOR = Path(__file__).parents[1] / "src/kvkeep/vendor/uplot"


def fetch() -> dict[str, bytes]:
    """Return the files of the package; exit if its digest is not the pinned one."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True)
        (archive,) = Path(folder).glob("*.tgz")
        digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if digest != INTEGRITY:
            sys.exit(f"{PACKAGE} has the digest {digest}, not the pinned one")
        with tarfile.open(archive) as packed:
            return {name: _read(packed, inside) for inside, name in FILES.items()}


def _read(packed: tarfile.TarFile, name: str) -> bytes:
    file = packed.extractfile(name)
    assert file is not None, f"{name} is no file"
    return file.read()


def main() -> None:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, and change nothing")
    check = parser.parse_args().check
    different = []
    for name, content in fetch().items():
        path = VENDOR / name
        if check and not (path.is_file() and path.read_bytes() == content):
            different.append(str(path))
        elif not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    if different:
        sys.exit(f"not what {PACKAGE} has: {', '.join(different)}")
    print(f"{PACKAGE} in {VENDOR}")


if __name__ == "__main__":
    main()
