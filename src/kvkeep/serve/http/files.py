"""How many connections the limit on open files (``RLIMIT_NOFILE``) leaves room for."""

from __future__ import annotations

import resource

from kvkeep.core.errors import InvalidValue, whole

__all__ = ["connections_for", "file_limit", "raise_file_limit"]

DEFAULT_CONNECTIONS = 1024
_MOST_FILES = 65_536
"""A limit is raised to this at most: some libraries take memory for each file that may be open."""
_MOST_RESERVE = 256
"""Files kept for tiers, models, logs and threads: this many, or a quarter of a small limit."""


def file_limit() -> int:
    """The soft limit on open files of this process; `_MOST_FILES` where there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> int:
    """Raise the soft limit on open files as far as the hard one allows; returns it.

    For commands at their start: it changes the whole process. At most 65,536.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_FILES
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if wanted > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # a system that caps it elsewhere: what there is must do
            return soft
    return file_limit()


def connections_for(wanted: int | None = None, *, files_each: int = 1) -> int:
    """How many connections may be open at once, where each takes ``files_each`` files.

    ``wanted``, or by default 1,024, or fewer where the limit on open files less a reserve does not
    reach for so many. Raises `InvalidValue` for more ``wanted`` than that.
    """
    limit = file_limit()
    room = max(1, (limit - min(_MOST_RESERVE, limit // 4)) // files_each)
    if wanted is None:
        return min(DEFAULT_CONNECTIONS, room)
    if whole("max_connections", wanted, 1) > room:
        raise InvalidValue(
            f"max_connections is {wanted}, and the limit of {limit} open files leaves room for "
            f"{room}; raise the limit (ulimit -n) or take fewer"
        )
    return wanted
