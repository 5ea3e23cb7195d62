"""The number of connections that the limit on open files (``RLIMIT_NOFILE``) allows."""

from __future__ import annotations

import resource

__all__ = ["connections_for", "file_limit", "raise_file_limit"]

_CONNECTIONS = 1024
_MOST_FILES = 65_536
"""Highest limit to raise to: some libraries allocate memory for each file that may be open."""
_MOST_RESERVE = 256
"""Files kept for tiers, models, logs and threads; under a small limit, a quarter of the limit."""


def file_limit() -> int:
    """Return this process's soft limit on open files; `_MOST_FILES` if it has none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> int:
    """Raise the soft limit on open files to the hard one, at most to 65,536, and return it.

    It changes the whole process, so only commands call it, at their start.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_FILES
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if wanted > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # some systems cap it elsewhere; keep the present limit
            return soft
    return file_limit()


def connections_for(*, files_each: int = 1) -> int:
    """Return how many connections may be open at once, if each takes ``files_each`` files.

    1,024, or fewer if the limit on open files, less a reserve, does not allow that many.
    """
    limit = file_limit()
    room = max(1, (limit - min(_MOST_RESERVE, limit // 4)) // files_each)
    return min(_CONNECTIONS, room)
