"""Run inside an environment where kvkeep was installed: what works there, as JSON on stdout.

Imports every package of kvkeep. One that needs what is not installed has to say so by the name of
an extra, in one line. This file needs the standard library alone.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import pkgutil
import sys


def rooms() -> dict[str, str | None]:
    """Import each package of kvkeep; return what each raised, or None."""
    import kvkeep  # noqa: PLC0415 - a failure here is reported by the traceback

    found: dict[str, str | None] = {"kvkeep": None}
    for info in pkgutil.walk_packages(kvkeep.__path__, "kvkeep.", onerror=lambda _: None):
        if info.ispkg:
            try:
                importlib.import_module(info.name)
            except ImportError as error:
                found[info.name] = f"{type(error).__name__}: {error}"
            else:
                found[info.name] = None
    return found


def main() -> None:
    """Print where kvkeep was imported from, its extras, and what its packages say."""
    said = rooms()
    extras = importlib.metadata.metadata("kvkeep").get_all("Provides-Extra") or []
    where = sys.modules["kvkeep"].__file__
    json.dump({"file": where, "extras": extras, "rooms": said}, sys.stdout)


if __name__ == "__main__":
    main()
