"""Key files: 32 random bytes, readable by their owner only."""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from kvkeep.core.errors import InvalidValue

__all__ = ["KEY_FILE_BYTES", "generate_key", "load_key"]

KEY_FILE_BYTES = 32
_HEX = re.compile(rb"[0-9a-fA-F]{64}\s*")
_LONGEST = 4 * KEY_FILE_BYTES  # bytes; a longer file is not a key and is not read


def load_key(path: str | os.PathLike[str]) -> bytes:
    """Read a key from a file of 32 bytes, or of 64 hexadecimal digits and a newline.

    Raises:
        InvalidValue: the file cannot be read, is no key file, or not only its owner can access it.
            The group may read a file of root's: secrets are mounted and credentials passed so.
    """
    place = Path(path)
    try:
        with open(place, "rb", opener=_nonblocking) as file:
            found = os.fstat(file.fileno())
            content = file.read(_LONGEST + 1) if stat.S_ISREG(found.st_mode) else b""
    except OSError as error:
        raise InvalidValue(f"the key file {place} cannot be read: {error.strerror}") from error
    if not _is_private(found):
        mode = stat.S_IMODE(found.st_mode)
        raise InvalidValue(
            f"the key file {place} has mode {mode:04o}: users other than its owner "
            f"can access it; run chmod 600 {place}"
        )
    if len(content) == KEY_FILE_BYTES:
        return content
    if len(content) <= _LONGEST and _HEX.fullmatch(content):
        return bytes.fromhex(content.decode("ascii"))
    raise InvalidValue(
        f"{place} is no key file: that is 32 bytes or 64 hexadecimal digits, see generate_key"
    )


def _is_private(found: os.stat_result) -> bool:
    """Whether only its owner can access a file, or if that is root, those root lets read it."""
    if os.name != "posix":
        return True
    allowed = stat.S_IRGRP if found.st_uid == 0 != os.geteuid() else 0
    return not found.st_mode & 0o077 & ~allowed


def _nonblocking(path: str, flags: int) -> int:
    """Open without waiting for a writer, in case the file is a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def generate_key(path: str | os.PathLike[str]) -> None:
    """Write a new random key to a new file of mode 0600, as 64 hexadecimal digits.

    Raises:
        InvalidValue: the file exists (replacing its key would make everything encrypted with it
            unreadable), or cannot be written; then no file is left.
    """
    place = Path(path)
    try:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise InvalidValue(f"{place} is there already; name a new file for the key") from error
    except OSError as error:
        raise InvalidValue(f"the key file {place} cannot be created: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_hex(KEY_FILE_BYTES).encode("ascii") + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        place.unlink(missing_ok=True)
        raise InvalidValue(f"the key file {place} cannot be written: {error.strerror}") from error
