"""Whether files are those that an engine loaded, asked after it loaded them.

An engine makes its connector when the model is loaded. A digest of the files is taken then, so a
file that was replaced in between would give its name to KV that other weights compute. The engine's
process is older than its model: what did not change since the process began is what was loaded.

Of the hub a commit never changes, but a branch moves: the file that says at which commit it is must
be as old as that.

A change shows in the change time (ctime) of a file, a link or a directory, which nobody can set
back. Clocks are compared with `SLACK_S` seconds of tolerance. Not seen: a directory above the
model's that is renamed, and a file server whose clock is behind this machine's by more than that.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import InvalidValue
from kvkeep.store.identity import model_identity

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SLACK_S", "changed_since", "hub_identity", "identity_since", "process_began"]

SLACK_S: Final = 2.0
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


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


def hub_identity(name: str, revision: str | None, cache_dir: str | None, began: float) -> str:
    """Return the identity of a model of the hub, if its branch is where it was at ``began``.

    That of its files, where they are on this machine and can be read; else its commit.

    Raises:
        InvalidValue: it is not known which commit was loaded.
    """
    snapshot = _snapshot(name, revision, cache_dir)
    if snapshot is None:
        if revision is not None and _COMMIT.fullmatch(revision):
            return f"commit {revision}"
        raise InvalidValue(
            f"{name} is in no directory of this machine, and {revision or 'main'} may be other "
            "weights tomorrow"
        )
    branch = snapshot.parents[1] / "refs" / (revision or "main")
    if branch.is_file() and changed_since(branch, began) is not None:
        raise InvalidValue(f"the branch {branch.name} of {name} moved after this process began")
    try:
        return model_identity(snapshot)
    except InvalidValue:  # pickled weights
        return f"commit {snapshot.name}"


def _snapshot(name: str, revision: str | None, cache_dir: str | None) -> Path | None:
    """The directory of a model that the hub downloaded, named by its commit."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - engines bring it

    try:
        found = snapshot_download(
            name, revision=revision, cache_dir=cache_dir, local_files_only=True
        )
    except (OSError, ValueError):  # no such name, or nothing of it is here
        return None
    return Path(found)


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
