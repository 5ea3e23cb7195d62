"""The identity of a model directory, for engines that load it themselves.

    weights      `kvkeep.store.weights_digest` of the model's own safetensors files
    other files  other safetensors files (such as adapters), configuration and code, by name and
                 content

Files that change no numbers are left out: tokenizers (their results are the tokens), generation
settings, chat templates, shard indexes, pictures and texts.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import InvalidValue
from kvkeep.store.identity.weights import find_files, weights_digest

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["files_identity"]

_MAGIC: Final = b"kvkeep model files 1\n"
_DECIDING: Final = {".json", ".py", ".yaml", ".yml"}
_NEUTRAL: Final = {
    "added_tokens.json", "chat_template.json", "generation_config.json", "special_tokens_map.json",
    "tokenizer.json", "tokenizer_config.json", "vocab.json",
}  # fmt: skip
_CHUNK: Final = 1 << 20


def files_identity(path: Path, *, full: bool) -> str:
    """Return a digest of ``path``, a model directory or one safetensors file: 64 hex digits.

    Raises:
        InvalidValue: as `kvkeep.store.weights_digest`; or a file cannot be read.
    """
    whole = hashlib.sha256(_MAGIC + weights_digest(path, full=full).encode() + b"\n")
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
