"""The identity of the LoRA weights of a request.

vLLM's hashes contain an adapter's name and path, which stay the same when the adapter is trained
again into the same files. So the identity of its files goes into the keys as well, taken at the
first request for the adapter. vLLM may have loaded the adapter earlier (``--lora-modules``,
``/v1/load_lora_adapter``): if its files were written after this process began, they may not be what
was loaded, and only this process finds KV of that adapter. If the files change later, it is unknown
which version is in use, and no KV of that adapter is stored until a restart.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue
from kvkeep.integrations import loaded
from kvkeep.integrations.vllm.keys import whole_hashes
from kvkeep.store.identity import model_identity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.lora.request import LoRARequest

__all__ = ["Adapters"]

_LOG = logging.getLogger("kvkeep.vllm")
_Files = tuple[tuple[str, int, int, int], ...]


class Adapters:
    """Digests of adapters, by their numbers. Thread safety: none; the scheduler's thread."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[str, _Files, bytes | None]] = {}

    def digest(self, adapter: LoRARequest) -> bytes | None:
        """Return the digest to mix into the adapter's keys; None if its KV cannot be stored."""
        path, number = str(adapter.lora_path), int(adapter.lora_int_id)
        files = _files(path)
        known = self._seen.get(number)
        if known is None:
            digest = self._first(adapter.lora_name, path, files)
            if adapter.load_inplace and digest is not None:
                _LOG.warning(
                    "LoRA %s is loaded in place, so it is not known which weights a request is "
                    "computed with; kvkeep does not store its KV", adapter.lora_name,
                )  # fmt: skip
                digest = None
            self._seen[number] = (path, files, digest)
            return digest
        if known[2] is not None and known[:2] != (path, files):
            _LOG.warning(
                "the files of LoRA %s changed while vLLM may still use the old ones; kvkeep does "
                "not store its KV until vLLM is restarted", adapter.lora_name,
            )  # fmt: skip
            self._seen[number] = (path, files, None)
            return None
        return known[2]

    def _first(self, name: str, path: str, files: _Files) -> bytes | None:
        reason = "it is not a local directory"
        if files:
            try:
                identity = model_identity(path)  # with alpha and rank in adapter_config.json
            except InvalidValue as error:
                reason = str(error)
            else:
                if changed := loaded.changed_since(Path(path), loaded.process_began()):
                    _LOG.info(
                        "%s was written after this process began: only this process will find KV "
                        "of LoRA %s", changed, name,
                    )  # fmt: skip
                    identity += secrets.token_hex(16)
                return hashlib.sha256(identity.encode()).digest()
        _LOG.warning("kvkeep does not store KV of LoRA %s (%s): %s", name, path, reason)
        return None

    @staticmethod
    def mixed(hashes: Sequence[bytes], digest: bytes) -> list[bytes]:
        """Return the hashes of blocks for one adapter. Cost: 0.5 µs each.

        Hashes that have not 32 bytes count as `whole_hashes` makes them, as beside public ones.
        """
        return [hashlib.sha256(digest + each).digest() for each in whole_hashes(hashes)]


def _files(path: str) -> _Files:
    """Return name, size, time and inode of an adapter's files; empty if it is no directory."""
    try:
        found = sorted(Path(path).iterdir())
        stats = [(file.name, file.stat()) for file in found if file.is_file()]
    except OSError:
        return ()
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)
