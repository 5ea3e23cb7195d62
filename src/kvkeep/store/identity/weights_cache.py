"""A cache of weight digests, by the identity of the files.

It is one small JSON file in the user's cache directory, which holds digests of paths, not paths. If
it is damaged, not writable or foreign, digests are made again: that costs time only. A damaged file
is replaced; one of another version stays as it is, since another kvkeep uses it.
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
_ENTRIES: Final = 512  # the latest ones
_FILE_MAX: Final = 1 << 20  # bytes; an entry takes about 120
# A younger file may be written to again within one tick of its clock, without a new ctime.
_SETTLED_NS: Final = 2_000_000_000
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class FileIdentity:
    """The metadata that identify an unchanged file.

    Writing to a file changes its ctime even if mtime is set back. Renaming or linking changes it
    too, and the file is then read again.
    """

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, file: Path) -> Self:
        """Return the identity of ``file``, following links, or raise `InvalidValue`."""
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

    The file is written under a temporary name and then renamed, so readers see the old or the new
    one. Of two concurrent writes, one may be lost. Thread safety: any.
    """

    def __init__(self) -> None:
        self._file = _cache_file()

    @staticmethod
    def key(files: list[FileIdentity], *, full: bool) -> str:
        """Return the key of the digest of ``files``."""
        named = json.dumps([_VERSION, full, *(astuple(file) for file in files)])
        return hashlib.blake2b(named.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def find(self, key: str) -> str | None:
        """Return the digest under ``key``, or None."""
        return (self._read() or {}).get(key)

    def remember(self, key: str, digest: str, files: list[FileIdentity]) -> None:
        """Store ``digest``, unless one of ``files`` changed within the last seconds."""
        newest = max((max(file.mtime_ns, file.ctime_ns) for file in files), default=0)
        if self._file is None or newest > time.time_ns() - _SETTLED_NS:
            return
        entries = self._read()
        if entries is None:
            return
        entries.pop(key, None)
        entries[key] = digest  # at the end, with the latest
        kept = dict(list(entries.items())[-_ENTRIES:])
        with contextlib.suppress(OSError):  # a read-only home: the digest is made again next time
            _replace(self._file, json.dumps({"version": _VERSION, "digests": kept}))

    def _read(self) -> dict[str, str] | None:
        """Return the entries; None if the file is of another version."""
        if self._file is None:
            return {}
        try:
            with self._file.open("rb") as opened:
                content = opened.read(_FILE_MAX + 1)
            found = json.loads(content) if len(content) <= _FILE_MAX else {}
        except (OSError, ValueError, RecursionError):
            return {}
        match found:
            case {"version": int(version)} if version != _VERSION:
                return None
            case {"version": int(), "digests": dict(digests)}:
                return {
                    key: digest
                    for key, digest in digests.items()
                    if isinstance(digest, str) and _DIGEST.fullmatch(digest)
                }
        return {}


def _cache_file() -> Path | None:
    """Return the path by the XDG base directory specification; None without a home directory."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():  # the specification says to ignore it
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
