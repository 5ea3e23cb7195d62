"""Opens tiers from URLs, with the options that every tier has."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache, partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NamedTuple

from kvkeep.core.errors import BackendFailed, InvalidValue, did_you_mean, require, told
from kvkeep.store.backends import Backend, TierURL
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.codecs import BlockShape, codec_of, load_key, make_codec
from kvkeep.store.tiers.front import buffer_bytes
from kvkeep.store.tiers.memory import MemorySpec
from kvkeep.store.tiers.tier import TierOptions, TierSpec
from kvkeep.store.tiers.tiering import Exclusive, Inclusive
from kvkeep.store.tiers.two_queues import tier_policies

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.store.backends.shm import ShmBackend
    from kvkeep.store.codecs import Codec
    from kvkeep.store.tiers.tiering import TieringPolicy

__all__ = [
    "TIERINGS", "TIER_OPTIONS", "check_tiers", "open_backend", "open_tiers", "tiering",
]  # fmt: skip

TIER_OPTIONS = ("codec", "encrypt", "decrypt", "policy", "ttl", "timeout", "writes")
"""Options that every tier has; the others are its backend's."""

TIERINGS = ("inclusive", "inclusive:2", "exclusive", "exclusive:2")
"""Names of tiering policies; any number of touches above 0 may follow the colon."""

_HOMES = {
    "memory": "memory.MemoryBackend",
    "shm": "shm.ShmBackend",
    "file": "disk.DiskBackend",
    "valkey": "valkey.ValkeyBackend",
    "redis": "valkey.ValkeyBackend",
    "valkeys": "valkey.ValkeyBackend",
    "rediss": "valkey.ValkeyBackend",
    "s3": "objects.ObjectBackend",
    "gs": "objects.ObjectBackend",
    "az": "objects.ObjectBackend",
}
_READERS = dict.fromkeys(("s3", "gs", "az"), 16)  # a request takes tens of milliseconds
_FRONT = ("memory", "shm")  # schemes that can be in front of all tiers
_GROUP = "kvkeep.backends"  # entry points by which other packages register scheme = class


def open_backend(url: TierURL) -> Backend:
    """Open the backend of ``url``: one of kvkeep, or an entry point in ``kvkeep.backends``.

    Options that the backend does not know stay in ``url``: call `TierURL.finish` afterwards.

    Raises:
        InvalidValue: the scheme is unknown, or the URL is wrong.
        MissingExtra: the backend needs a package that is not installed.
    """
    backend: object = _kind_of(url).from_url(url)
    if not isinstance(backend, Backend):
        raise InvalidValue(
            f"{url.safe} opens {backend!r}; a Backend is needed: see docs/backends.md"
        )
    return backend


def _kind_of(url: TierURL) -> Any:
    """Return the class of the backend that ``url`` names. Raises `InvalidValue`, `MissingExtra`."""
    if url.scheme in _HOMES:
        module, _, name = _HOMES[url.scheme].partition(".")
        return getattr(importlib.import_module(f"kvkeep.store.backends.{module}"), name)
    others = {point.name: point for point in entry_points(group=_GROUP)}
    if url.scheme in others:
        return others[url.scheme].load()
    schemes = sorted({*_HOMES, *others})
    raise InvalidValue(
        f"{url.safe}: no tier is called {url.scheme}; there are {', '.join(schemes)}"
        f"{did_you_mean(url.scheme, schemes)}"
    )


def tiering(name: str) -> TieringPolicy:
    """Return a new tiering policy by its name, see `TIERINGS`.

    Raises:
        InvalidValue: the name is unknown.
    """
    kind, colon, after = name.partition(":")
    if kind in ("inclusive", "exclusive") and (not colon or after.isdecimal()):
        touches = int(after) if colon else 1
        if touches:
            return Inclusive(touches) if kind == "inclusive" else Exclusive(touches)
    raise InvalidValue(
        f"no tiering {name!r}; there are {', '.join(TIERINGS)}{did_you_mean(name, TIERINGS)}"
    )


def open_tiers(
    tiers: Sequence[str | Backend],
    shape: BlockShape | None = None,
    *,
    shares: bool = False,
    prompt_bytes: int = 0,
) -> tuple[MemorySpec, list[TierSpec]]:
    """Open ``tiers``, fastest first; return the memory tier and the tiers below it.

    ``shares``: tenants are to share them by weight. ``prompt_bytes``: of a prompt of
    `PROMPT_TOKENS` tokens, if known.

    If the first tier is neither ``memory://`` nor ``shm://`` with raw blocks, memory of
    `buffer_bytes` is put in front.

    Raises:
        InvalidValue: there is no tier, one of the URLs is wrong, or tenants are to share memory
            that processes share; nothing stays open.
        MissingExtra: xxhash, which computes the checksums of records, is not installed.
    """
    shape = shape or BlockShape()
    given: object = tiers
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise InvalidValue(f"tiers are a list of URLs, fastest first, got {told(tiers)}")
    _require_extras(tiers)
    _refuse_twice(tiers)
    opened: list[MemorySpec | TierSpec] = []
    try:
        for place in tiers:
            opened.append(_open(place, shape, first=not opened))
        if shares and isinstance(opened[0], MemorySpec) and opened[0].backend.scheme == "shm":
            raise InvalidValue(
                f"shares are for memory of one process; from {opened[0].backend.describe()}, which "
                "processes share, the block used least recently is evicted: leave shares out, or "
                "take memory://"
            )
    except BaseException:
        for tier in opened:
            tier.backend.close()
        raise
    if not isinstance(opened[0], MemorySpec):
        opened.insert(0, MemorySpec(MemoryBackend(buffer_bytes(prompt_bytes)), name="buffer"))
    memory, *below = opened
    assert isinstance(memory, MemorySpec)
    behind = [tier for tier in below if isinstance(tier, TierSpec)]
    count = Counter([memory.name])
    for tier in behind:  # tiers of one scheme are numbered, from the second on
        scheme = tier.name
        count[scheme] += 1
        if count[scheme] > 1:
            tier.name = f"{scheme}{count[scheme]}"
    return memory, behind


def check_tiers(tiers: Sequence[str], *, in_front: bool = True) -> None:
    """Check URLs of tiers as `open_tiers` does, fastest first; open and change nothing.

    ``in_front``: the first of them may be the memory in front of the others. Options of backends
    in other packages are checked as far as these offer that (`Backend.check_url`). Files of keys
    are read.

    Raises:
        InvalidValue: a URL is wrong.
        MissingExtra: a tier needs a package that is not installed.
    """
    _require_extras(tiers)
    _refuse_twice(tiers)
    for at, place in enumerate(tiers):
        url = TierURL(place)
        asked = _read(url, BlockShape(), first=in_front and not at)
        has_budget = _checking(_kind_of(url)).check_url(url)
        url.finish()
        asked.check_budget(has=has_budget)


def _require_extras(tiers: Sequence[str | Backend]) -> None:
    """Raise `MissingExtra`, naming all extras that ``tiers`` need, if xxhash is not installed.

    It computes the checksums of records: without it, reads and writes would fail in the background.
    """
    urls = [place for place in tiers if isinstance(place, str)]
    homes = [_HOMES.get(place.partition("://")[0], "") for place in urls]
    extras = ["objects" if any(home.startswith("objects.") for home in homes) else "store"]
    if any("encrypt=" in place for place in urls):
        extras.append("encryption")
    require("xxhash", ",".join(extras))


def _refuse_twice(tiers: Sequence[object]) -> None:
    """Raise `InvalidValue` if a directory is two tiers: each would evict and move the other's."""
    seen: set[str] = set()
    for place in tiers:
        if not (isinstance(place, str) and place.startswith("file://")):
            continue
        try:
            url = TierURL(place)
        except InvalidValue:
            continue  # opening it says so
        path = os.path.normpath(url.path)
        if path in seen:
            raise InvalidValue(f"{url.safe} is given twice; a directory is one tier")
        seen.add(path)


def _checking(kind: Any) -> type[Backend]:
    """Return what checks the URLs of ``kind``: itself, if its `from_url` reads the same options."""
    if isinstance(kind, type) and issubclass(kind, Backend):
        reads = next(base for base in kind.__mro__ if "from_url" in vars(base))
        if "check_url" in vars(reads):
            return kind
    return Backend


def _open(place: str | Backend, shape: BlockShape, *, first: bool) -> MemorySpec | TierSpec:
    if isinstance(place, Backend):
        backend, front = place, first and place.scheme in _FRONT
        asked = _Asked(front, make_codec("raw", shape), partial(codec_of, shape=shape))
        _prepare(backend, asked)
    else:
        url = TierURL(place)
        asked = _read(url, shape, first=first)
        backend = open_backend(url)
        try:
            url.finish()
            _prepare(backend, asked)
            asked.check_budget(has=backend.capacity is not None)
        except (InvalidValue, BackendFailed):
            backend.close()
            raise
        if asked.timeout is not None:
            backend.timeout = asked.timeout
    scheme, options = backend.scheme if asked.url is None else asked.url.scheme, asked.options
    if asked.front:
        memory: MemoryBackend | ShmBackend = backend  # type: ignore[assignment]
        return MemorySpec(memory, options.policy, ttl=options.ttl, name=scheme)
    return TierSpec(scheme, backend, asked.codec, asked.codec_of, options)


def _prepare(backend: Backend, asked: _Asked) -> None:
    """Fix the capacity, and keep stores with a shared arena in front from those with it below."""
    backend.settle_capacity()
    if backend.scheme == "shm":
        shared: ShmBackend = backend  # type: ignore[assignment]
        shared.claim(raw=asked.front)


class _Asked(NamedTuple):
    """What a tier is asked to be. Options of its backend are still in ``url``.

    ``front``: memory in front of the other tiers, of raw blocks.
    """

    front: bool
    codec: Codec
    codec_of: Callable[[int], Codec | None]
    options: TierOptions = TierOptions()
    timeout: float | None = None
    url: TierURL | None = None

    def check_budget(self, *, has: bool) -> None:
        """Raise `InvalidValue` for options of a tier with a budget, unless it ``has`` one."""
        evicts = self.options.ttl is not None or self.options.policy is not tier_policies()["lru"]
        if not self.front and not has and evicts:
            assert self.url is not None
            raise InvalidValue(
                f"{self.url.safe} has no size=, so kvkeep evicts nothing there: "
                "policy= and ttl= are for tiers with size="
            )


def _read(url: TierURL, shape: BlockShape, *, first: bool) -> _Asked:
    """Take the options that every tier has out of ``url``. Raises `InvalidValue`; opens nothing."""
    policy = url.choice("policy", list(tier_policies()), "lru")
    ttl = url.seconds("ttl")
    name = url.text("codec", "raw")
    key_file, old_files = url.text("encrypt"), url.text("decrypt")
    assert name is not None
    if old_files is not None and key_file is None:
        raise InvalidValue(f"{url.safe}: decrypt= names old keys to read with; encrypt= is missing")
    key = None if key_file is None else load_key(key_file)
    old_keys = [] if old_files is None else [load_key(file) for file in old_files.split(",")]
    codec = make_codec(name, shape, key, old_keys)
    by_number: Callable[[int], Codec | None] = lru_cache(maxsize=256)(
        partial(codec_of, shape=shape, key=key, old_keys=old_keys)
    )
    front = url.scheme in _FRONT and first and codec.number == 0
    if front and url.scheme == "shm" and policy != "lru":
        raise InvalidValue(
            f"{url.safe}: policy={policy} is for memory of one process; from memory that "
            "processes share, the block used least recently is evicted: leave policy= out"
        )
    options = TierOptions(
        policy=tier_policies()[policy],
        ttl=ttl,
        writes=None if front else url.write_budget("writes"),
        readers=_READERS.get(url.scheme, 4),
    )
    return _Asked(front, codec, by_number, options, None if front else url.seconds("timeout"), url)
