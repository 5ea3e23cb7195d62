"""Digests of weights that were made before, remembered by what the files are.

One small JSON file in the user's cache directory. It holds no paths, only digests of them. Whatever
is wrong with it (broken, not writable, not ours), digests are made again: it can cost time only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final, Self

from kvkeep.core.errors import InvalidValue

__all__ = ["FileIdentity", "WeightsCache"]

_VERSION: Final = 1
_ENTRIES: Final = 512  # the latest are kept
_FILE_MAX: Final = 1 << 20  # bytes; ours has about 120 an entry
# A file that is younger may be written to again within one tick of its clock, unseen.
_SETTLED_NS: Final = 2_000_000_000
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class FileIdentity:
    """What makes a file the same one, unchanged. Another ctime: written to, even if mtime was set
    back; renamed or linked files get one too, and are then read again.
    """

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, file: Path) -> Self:
        """The identity of ``file``; links are followed. Raises `InvalidValue`: it is not there."""
        try:
            path = file.resolve(strict=True)
            stat = path.stat()
        except (OSError, RuntimeError) as error:  # a RuntimeError is links in a circle
            why = getattr(error, "strerror", None) or error
            raise InvalidValue(f"cannot read {file}: {why}") from error
        return cls(
            os.fspath(path),
            stat.st_size,
            stat.st_mtime_ns,
            stat.st_ctime_ns,
            stat.st_ino,
            stat.st_dev,
        )


class WeightsCache:
    """Digests by key, in ``$XDG_CACHE_HOME/kvkeep/weights.json`` (else ``~/.cache``), mode 0600.

    Written to a temporary name, then renamed: who reads sees the file before or after. Of two who
    write at once one is forgotten. Thread safety: any.
    """

    def __init__(self) -> None:
        self._file = _cache_file()

    @staticmethod
    def key(files: list[FileIdentity], *, full: bool) -> str:
        """The name under which the digest of ``files`` is remembered."""
        named = json.dumps([_VERSION, full, *(astuple(file) for file in files)])
        return hashlib.blake2b(named.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def find(self, key: str) -> str | None:
        """The digest that was remembered under ``key``."""
        return self._read().get(key)

    def remember(self, key: str, digest: str, files: list[FileIdentity]) -> None:
        """Remember ``digest``, unless one of ``files`` was changed only just now."""
        newest = max((max(file.mtime_ns, file.ctime_ns) for file in files), default=0)
        if self._file is None or newest > time.time_ns() - _SETTLED_NS:
            return
        entries = self._read()
        entries.pop(key, None)
        entries[key] = digest  # at the end, where the latest are
        kept = dict(list(entries.items())[-_ENTRIES:])
        with contextlib.suppress(OSError):  # a read-only home: it is made again next time
            _replace(self._file, json.dumps({"version": _VERSION, "digests": kept}))

    def _read(self) -> dict[str, str]:
        if self._file is None:
            return {}
        try:
            with self._file.open("rb") as opened:
                content = opened.read(_FILE_MAX + 1)
            found = json.loads(content) if len(content) <= _FILE_MAX else {}
        except (OSError, ValueError, RecursionError):
            return {}
        match found:
            case {"version": 1, "digests": dict(digests)}:
                return {
                    key: digest
                    for key, digest in digests.items()
                    if isinstance(digest, str) and _DIGEST.fullmatch(digest)
                }
        return {}


def _cache_file() -> Path | None:
    """Where the file is by the XDG base directory specification; None without a home."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():  # as the specification says: to be ignored
        try:
            folder = Path.home() / ".cache"
        except RuntimeError:
            return None
    return folder / "kvkeep" / "weights.json"


def _replace(file: Path, text: str) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=".weights")  # 0600 from the start
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as opened:
            opened.write(text)
        os.replace(name, file)
    except OSError:
        os.unlink(name)
        raise
