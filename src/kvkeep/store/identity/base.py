"""`model_identity`: the ``revision`` under which KV of a model is kept."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from kvkeep.core.errors import InvalidValue, told
from kvkeep.store.identity.modules import lines_of
from kvkeep.store.identity.weights import find_files, weights_digest

if TYPE_CHECKING:
    ModelLike = torch.nn.Module | str | os.PathLike[str]

__all__ = ["is_loaded", "model_identity"]

_MAGIC: Final = b"kvkeep model 1\n"
_LOADED: Final = "loaded-"
_FILES: Final = "files-"
_DIGITS: Final = 40
_FORM: Final = re.compile(rf"{_LOADED}[0-9a-f]{{{_DIGITS}}}")
_FILES_MAGIC: Final = b"kvkeep model files 1\n"
_DECIDING: Final = {".json", ".py", ".yaml", ".yml"}
_NEUTRAL: Final = {
    "added_tokens.json", "chat_template.json", "generation_config.json", "special_tokens_map.json",
    "tokenizer.json", "tokenizer_config.json", "vocab.json",
}  # fmt: skip
_CHUNK: Final = 1 << 20


def model_identity(source: ModelLike, *, full: bool = False) -> str:
    """Return the identity of the KV that ``source`` computes: the ``revision`` of a namespace.

    Of a ``torch.nn.Module``: everything that was really loaded. That is every byte of its
    parameters and buffers, its classes, their attributes, hooks and adapters, its resolved
    configuration, and the version of Transformers (`kvkeep.store.identity.modules` lists them,
    docs/keys.md explains them). Call it before the module is changed for speed. The text is
    ``loaded-`` and 40 hexadecimal digits, equal in every process and on every device.

    Of a path: the files there. That is the weights (`kvkeep.store.weights_digest`; ``full`` reads
    every byte, not samples), configuration files, code, and adapters beside them. The text is
    ``files-`` and 40 hexadecimal digits. It cannot describe a module that was loaded before the
    files changed, or with arguments that the files do not hold, so prefer the module. The two forms
    are never equal.

    Cost of a module: about 0.15 s a GiB and thread on a CPU, at most 8 threads; on a GPU the
    bandwidth to the host, in pieces of 16 MiB; and about 10 µs a submodule. Of a path: as
    `kvkeep.store.weights_digest`. Thread safety: any; the module must not change during the call.

    Raises:
        InvalidValue: the bytes of a tensor are not in memory, or the files do not identify the
            weights.
    """
    if isinstance(source, torch.nn.Module):
        digest = hashlib.sha256(_MAGIC)
        for line in lines_of(source):
            digest.update(line.encode("utf-8", "surrogatepass") + b"\n")
        return _LOADED + digest.hexdigest()[:_DIGITS]
    if isinstance(source, str | os.PathLike):
        return _FILES + files_identity(Path(source), full=full)[:_DIGITS]
    raise InvalidValue(
        f"a model is a torch.nn.Module or a path, got {type(source).__name__}: {told(source)}"
    )


def is_loaded(revision: object) -> bool:
    """Return whether ``revision`` has the form of the identity of a loaded module."""
    return isinstance(revision, str) and _FORM.fullmatch(revision) is not None


def files_identity(path: Path, *, full: bool) -> str:
    """Return a digest of ``path``, a model directory or one safetensors file: 64 hex digits.

    Raises:
        InvalidValue: as `kvkeep.store.weights_digest`; or a file cannot be read.
    """
    whole = hashlib.sha256(_FILES_MAGIC + weights_digest(path, full=full).encode() + b"\n")
    if path.is_dir():
        own = {file.name for file in find_files(path)}
        for file in sorted(_beside(path, own)):
            content = weights_digest(file, full=full) if _is_weights(file) else _content(file)
            whole.update(f"{len(file.name)}:{file.name}={content}\n".encode(errors="surrogatepass"))
    return whole.hexdigest()


def _beside(folder: Path, own: set[str]) -> list[Path]:
    return [
        file
        for file in folder.iterdir()
        if file.is_file()
        and file.name not in own
        and (
            _is_weights(file)
            or (
                file.suffix in _DECIDING
                and file.name not in _NEUTRAL
                and not file.name.endswith(".index.json")
            )
        )
    ]


def _is_weights(file: Path) -> bool:
    return file.suffix == ".safetensors"


def _content(file: Path) -> str:
    digest = hashlib.sha256()
    try:
        with file.open("rb") as opened:
            while piece := opened.read(_CHUNK):
                digest.update(piece)
    except OSError as error:
        raise InvalidValue(f"cannot read {file}: {error.strerror or error}") from error
    return digest.hexdigest()
