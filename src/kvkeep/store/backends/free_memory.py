"""How much memory is free: on the machine, and within the limits of this process's containers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["free_memory"]

_CGROUPS: Final = Path("/sys/fs/cgroup")
# Version 2 has all limits in one hierarchy; version 1 has one for memory.
_FILES: Final = (
    (_CGROUPS, "memory.max", "memory.current"),
    (_CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def free_memory() -> Iterator[tuple[int, str]]:
    """Yield the bytes that each limit leaves, and the limit's name; nothing where none is known.

    The page cache of a container counts as used, although the kernel gives it back.
    """
    with suppress(OSError, ValueError, StopIteration), open("/proc/meminfo", encoding="ascii") as f:
        line = next(line for line in f if line.startswith("MemAvailable:"))
        yield int(line.split()[1]) << 10, "the machine's memory"
    # Beyond a container's limit the kernel kills processes instead of refusing the memory.
    for root, most, used in _FILES:
        for folder in (root / path for path in _own_groups()):
            with suppress(OSError, ValueError):  # "max" is no number: no limit
                left = _number(folder / most) - _number(folder / used)
                yield max(0, left), "the container's memory limit"


def _own_groups() -> set[str]:
    """Return the paths of this process's groups, and of the groups around them."""
    found = {""}  # in a container of its own, its group is the root
    with suppress(OSError, ValueError), open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            _, controllers, path = line.strip().split(":", 2)
            if controllers in ("", "memory"):
                inside = Path(path.strip("/"))
                found.update(str(one) for one in (inside, *inside.parents) if str(one) != ".")
    return found


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))
