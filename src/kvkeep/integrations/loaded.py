"""The identity of the weights that an engine has loaded, from their files.

An engine loads the weights before it makes its connector. A digest that the connector takes of the
files is wrong if a file was replaced in between. But the engine's process began before it loaded
the weights: a file that did not change since the process began is the one that was loaded.

A model of the Hugging Face hub is named by a commit, which never changes, or by a branch, which
moves: the local file with the branch's commit must not have changed either.

Changes are recognised by the change time (ctime) of a file, link or directory, which cannot be set
back. `SLACK_S` seconds of difference between clocks are tolerated. Not noticed: renaming a
directory above the model's, and a file server whose clock is behind by more than that.
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

__all__ = ["SAFETENSORS_FORMATS", "changed_since", "loaded_identity", "process_began"]

SLACK_S: Final = 2.0
SAFETENSORS_FORMATS: Final = frozenset(
    {"auto", "safetensors", "mistral", "fastsafetensors", "runai_streamer"}
)
"""Load formats, in vLLM and SGLang, that read only the safetensors files of a model's directory.

All of these files are part of `model_identity`.
"""
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def process_began() -> float:
    """Return the time at which this process began, in Unix seconds, `SLACK_S` early."""
    psutil = importlib.import_module("psutil")  # a dependency of vLLM and SGLang
    began: float = psutil.Process().create_time()
    return began - SLACK_S


def loaded_identity(model: str, revision: str | None, cache_dir: str | None) -> str:
    """Return the identity of ``model``, a directory or a name on the hub, as it was loaded.

    ``revision`` and ``cache_dir`` are those of the hub. Cost: as `kvkeep.store.model_identity` of
    a path.

    Raises:
        InvalidValue: the loaded files cannot be identified, with the reason.
    """
    began = process_began()
    if not Path(model).is_dir():
        return _hub_identity(model, revision, cache_dir, began)
    identity = model_identity(model)
    changed = changed_since(Path(model), began)
    if changed is not None:
        raise InvalidValue(
            f"{changed} was written or replaced after this process began, so it may not be what "
            "was loaded"
        )
    return identity


def _hub_identity(name: str, revision: str | None, cache_dir: str | None, began: float) -> str:
    """Return the identity of the local files of a hub model, or its commit where it has none."""
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
    """Return the directory of a downloaded hub model, which is named by its commit."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - a dependency of the engines

    try:
        found = snapshot_download(
            name, revision=revision, cache_dir=cache_dir, local_files_only=True
        )
    except (OSError, ValueError):  # no such name, or it was not downloaded
        return None
    return Path(found)


def changed_since(path: Path, began: float) -> Path | None:
    """Return the first file, link or directory of the model at ``path`` changed after ``began``."""
    try:
        return next((each for each in _parts(path) if _changed(each) >= began), None)
    except OSError:  # deleted meanwhile
        return path


def _parts(path: Path) -> Iterator[Path]:
    """Yield the links on the way to ``path``, ``path`` itself, and the files in it."""
    way = path.absolute()
    for _ in range(40):  # as many links as Linux follows
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
    """Return the last change time of ``path`` and of the target of a link."""
    return max(path.lstat().st_ctime, path.stat().st_ctime)
