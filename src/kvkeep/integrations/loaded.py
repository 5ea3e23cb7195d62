"""Whether files are those that an engine loaded, asked after it loaded them.

An engine makes its connector when the model is loaded. A digest of the files is taken then, so a
file that was replaced in between would give its name to KV that other weights compute. The engine's
process is older than its model: what did not change since the process began is what was loaded.

A change shows in the change time (ctime) of a file, a link or a directory, which nobody can set
back. Clocks are compared with `SLACK_S` seconds of tolerance. Not seen: a directory above the
model's that is renamed, and a file server whose clock is behind this machine's by more than that.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvkeep.errors import InvalidValue
from kvkeep.store.identity import model_identity

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SLACK_S", "changed_since", "identity_since", "process_began"]

SLACK_S: Final = 2.0


def process_began() -> float:
    """When this process began, as `time.time` counts, `SLACK_S` early."""
    psutil = importlib.import_module("psutil")  # vLLM and SGLang bring it
    began: float = psutil.Process().create_time()
    return began - SLACK_S


def identity_since(directory: str, began: float) -> str:
    """Return the identity of the files in ``directory``, if they are as they were at ``began``.

    Cost: as `kvkeep.store.model_identity` of a path.

    Raises:
        InvalidValue: one of them changed since; or the files cannot be told apart.
    """
    identity = model_identity(directory)
    changed = changed_since(Path(directory), began)
    if changed is not None:
        raise InvalidValue(
            f"{changed} was written or replaced after this process began, so it may not be what "
            "was loaded"
        )
    return identity


def changed_since(path: Path, began: float) -> Path | None:
    """The first file, link or directory of the model at ``path`` that changed after ``began``."""
    try:
        return next((each for each in _parts(path) if _changed(each) >= began), None)
    except OSError:  # it went away while it was looked at
        return path


def _parts(path: Path) -> Iterator[Path]:
    """Links on the way to ``path``, the directory, and what is in it."""
    way = path.absolute()
    for _ in range(40):  # as many links as the system follows
        links = [each for each in (way, *way.parents) if each.is_symlink()]
        yield from links
        if not links:
            break
        first = links[-1]
        way = Path(os.path.normpath(first.parent / first.readlink())) / way.relative_to(first)
    yield path
    if path.is_dir():
        yield from path.iterdir()


def _changed(path: Path) -> float:
    """When ``path``, or what it links to, changed last."""
    return max(path.lstat().st_ctime, path.stat().st_ctime)
