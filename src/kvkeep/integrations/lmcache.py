"""Configurations of LMCache, option by option in kvkeep's words.

The options are those of LMCache 0.5.6; `kvkeep.integrations.lmcache_given` reads them. Nothing of
LMCache is imported, and nothing that a configuration names is opened.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from posixpath import normpath
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple
from urllib.parse import quote, unquote

from kvkeep.core.config_file import is_secret, masked
from kvkeep.core.errors import InvalidValue, did_you_mean, told
from kvkeep.integrations.lmcache_names import (
    EXTRA,
    EXTRA_TAKEN,
    FAMILIES,
    NO_COUNTERPART,
    NOT_NEEDED,
    STATUS,
)
from kvkeep.integrations.lmcache_remote import is_true, once, refused, remote_urls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Translated", "Translation", "translate"]

Fate = Literal["translated", "not needed", "no counterpart", "unknown"]

_ALIASES: Final = {
    "enable_xpyd": "enable_pd",
    "external_backends": "storage_plugins",
    "plugin_locations": "runtime_plugin_locations",
    "controller_url": "controller_pull_url",
    "lmcache_worker_port": "lmcache_worker_ports",
    "nixl_peer_host": "pd_peer_host",
    "nixl_peer_init_port": "pd_peer_init_port",
    "nixl_peer_alloc_port": "pd_peer_alloc_port",
    "nixl_proxy_host": "pd_proxy_host",
    "nixl_proxy_port": "pd_proxy_port",
    "nixl_role": "pd_role",
}


class Translated(NamedTuple):
    """What became of one option of LMCache.

    Attributes:
        option: its name, as given.
        given: its value for people; passwords are left out.
        fate: "translated"; "not needed", as kvkeep does it without an option or another program
            decides it; "no counterpart"; "unknown" to this version of kvkeep.
        note: what it became, or why it is not needed, or what to do instead.
    """

    option: str
    given: str
    fate: Fate
    note: str


@dataclass(frozen=True)
class Translation:
    """Options for an engine with kvkeep, and what became of each option of LMCache.

    ``options`` belong into ``kv_connector_extra_config`` of vLLM, or into the extra config of
    SGLang's storage backend; without those of defaults.
    """

    options: dict[str, Any]
    rows: tuple[Translated, ...]


def translate(given: Mapping[str, object], *, ranks: int = 1) -> Translation:
    """Return the options of LMCache in kvkeep's words. Cost: none; nothing is opened.

    ``ranks`` are those of one machine: LMCache takes the size of its disk tier for each.

    Raises:
        InvalidValue: an option with tiers or times has a value that LMCache would not take.
    """
    work = _Work({_ALIASES.get(name, name): value for name, value in given.items()}, ranks)
    try:
        rows = [work.row(name, _ALIASES.get(name, name)) for name in given]
        return Translation(work.options(), tuple(rows))
    except UnicodeEncodeError as error:  # half a character, of YAML, JSON or a variable
        part = error.object[error.start : error.end]
        raise InvalidValue(f"{told(part)} in a path or URL is no character of UTF-8") from error


_POLICIES: Final = {"LRU": "lru", "LFU": "lfu", "FIFO": "fifo"}
_LEAST: Final = "memory://1GiB"  # an engine has one tier at least
_EMPTY: Final = (None, "", False, "None", "null", "false", "False")


@dataclass
class _Work:
    """One translation: the options that are given, and what is known of the tiers so far."""

    given: dict[str, object]
    ranks: int = 1

    def row(self, option: str, name: str) -> Translated:
        """Tell what becomes of one option; ``name`` is its newest name."""
        value = self.given[name]
        shown = _shown(name, value)
        if name in _TAKEN:
            fate, note = _TAKEN[name](self, value)
            return Translated(option, shown, fate, note)
        for where, fate in ((NOT_NEEDED, "not needed"), (NO_COUNTERPART, "no counterpart")):
            if name in where:
                if fate == "no counterpart" and value in _EMPTY:
                    return Translated(option, shown, "not needed", "it is off")
                return Translated(option, shown, fate, where[name])
        for begin, of in FAMILIES.items():
            if name.startswith(begin):
                why = NO_COUNTERPART.get(of) or NOT_NEEDED.get(of) or STATUS
                return Translated(option, shown, "no counterpart", why)
        near = did_you_mean(name, [*_TAKEN, *NOT_NEEDED, *NO_COUNTERPART])
        return Translated(option, shown, "unknown", f"no option of LMCache 0.5.6{near}")

    # --- tiers -----------------------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        """Return kvkeep's options."""
        tiers = self.memory() + self.disks() + self._remote()
        made: dict[str, Any] = {"tiers": tiers or [_LEAST]}
        if (seconds := self.number("blocking_timeout_secs")) is not None:
            made["load_timeout"] = min(seconds, TIMEOUT_MAX)
        if (ms := self.number("lookup_timeout_ms")) is not None:
            made["lookup_timeout"] = min(ms / 1000, TIMEOUT_MAX)
        if tokens := int(self.number("min_retrieve_tokens") or 0):
            made["min_tokens"] = tokens
        if "save_decode_cache" in self.given and not is_true(self.given["save_decode_cache"]):
            made["answers"] = False
        return made

    def memory(self) -> list[str]:
        if not is_true(self.given.get("local_cpu", True)):
            return []
        size = self.number("max_local_cpu_size")
        if size == 0:
            return []
        return [f"memory://{_bytes(5.0 if size is None else size)}{self._policy('?')}"]

    def disks(self) -> list[str]:
        paths = self.paths()
        if not paths:
            return []
        size = self.number("max_local_disk_size") or 0.0
        room = f"?size={_bytes(size * self.ranks / len(paths))}" if size > 0 else ""
        policy = self._policy("&" if room else "?")
        return [f"file://{quote(path)}{room}{policy}" for path in paths]

    def paths(self) -> list[str]:
        given = self.given.get("local_disk")
        if given in _EMPTY:
            return []
        if not isinstance(given, str):
            raise InvalidValue(f"local_disk is {told(given)}; LMCache takes a path, or several "
                               "with commas between them")  # fmt: skip
        paths = [one.strip().removeprefix("file://") for one in given.split(",") if one.strip()]
        for path in paths:
            if not path.startswith("/") or not path.strip("/") or "\0" in path:
                raise InvalidValue(
                    f"local_disk has {told(path)}; a tier on disk needs the path of a directory, "
                    "from the root"
                )
        return once(path.rstrip("/") for path in paths)

    def _remote(self) -> list[str]:
        if self.refused():
            return []
        lossy = self.given.get("remote_serde") == "cachegen"
        return [url + ("&" if "?" in url else "?") + "codec=int8" if lossy else url
                for url in self.remote_urls()]  # fmt: skip

    def refused(self) -> str | None:
        """Return why kvkeep would not open the remote tiers, or None."""
        urls = self.remote_urls()
        if why := next((why for url in urls if (why := refused(url))), None):
            return why
        own = {normpath(path) for path in self.paths()}
        if own.isdisjoint(normpath(unquote(url.removeprefix("file://"))) for url in urls):
            return None
        return "local_disk has the same directory, and a directory is one tier"

    def remote_urls(self) -> list[str]:
        """Return the URLs of the remote tiers: kvkeep's, or as given if there is no such tier."""
        given = self.given.get("remote_url")
        if given in _EMPTY:
            return []
        return remote_urls(given if isinstance(given, str) else "", self.extra)

    @property
    def extra(self) -> dict[str, Any]:
        """LMCache's ``extra_config``, which may be JSON."""
        given = self.given.get("extra_config")
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError):
                return {}
        return given if isinstance(given, dict) else {}

    def _policy(self, joined: str) -> str:
        name = _POLICIES.get(str(self.given.get("cache_policy", "LRU")).upper(), "lru")
        return "" if name == "lru" else f"{joined}policy={name}"

    def number(self, name: str) -> float | None:
        value = self.given.get(name)
        if value is None:
            return None
        try:
            if isinstance(value, bool):
                raise ValueError
            number = float(value)  # type: ignore[arg-type]
            if not 0 <= number < 1e15:
                raise ValueError
        except (TypeError, ValueError):
            raise InvalidValue(f"{name} is {_shown(name, value)}; a number is needed") from None
        return number


def _cpu(work: _Work, value: object) -> tuple[Fate, str]:
    if _LEAST in work.options()["tiers"] and not work.memory():
        return "no counterpart", f"{_LEAST}: no other tier is left, and there has to be one"
    if memory := work.memory():
        return "translated", memory[0].partition("?")[0]
    return "translated", "no memory:// tier; a buffer for transfers remains"


def _cpu_size(work: _Work, value: object) -> tuple[Fate, str]:
    tiers = work.memory()
    if not tiers:
        return "not needed", "no memory:// tier; kvkeep sizes the buffer for transfers"
    return "translated", f"{tiers[0].partition('?')[0]}, for each rank, as before"


def _disk(work: _Work, value: object) -> tuple[Fate, str]:
    tiers = work.disks()
    if not tiers:
        return "not needed", "it is off"
    note = f"{', '.join(tiers)}; what is stored outlives the process"
    return "translated", note if work.number("max_local_disk_size") else f"{note}. {_NO_SIZE}"


def _disk_size(work: _Work, value: object) -> tuple[Fate, str]:
    if not work.paths():
        return "not needed", "local_disk is off"
    if not work.number("max_local_disk_size"):
        return "not needed", _NO_SIZE
    shared = ", an equal share for each path" if len(work.paths()) > 1 else ""
    if work.ranks > 1:
        return "translated", f"size= of file://, times {work.ranks} ranks, which share it{shared}"
    return "translated", (
        f"size= of file://{shared}. LMCache gives it to each rank, kvkeep to all together: with "
        "several ranks on a machine, --tp"
    )


def _remote(work: _Work, value: object) -> tuple[Fate, str]:
    urls = work.remote_urls()
    if not urls:
        return "not needed", "it is off"
    if why := work.refused():
        return "no counterpart", why
    note = f"{', '.join(str(masked('', url)) for url in urls)}; records are kvkeep's own, so it "
    note += "begins empty"
    if urls[0].startswith("file://"):
        note += (". For a disk of this machine: over a network filesystem the budget is not kept, "
                 "so machines share valkey:// or an object store instead")  # fmt: skip
    return "translated", note


def _serde(work: _Work, value: object) -> tuple[Fate, str]:
    if value in ("naive", None, ""):
        return "not needed", "records are raw unless codec= says otherwise"
    if value == "cachegen" and (not work.remote_urls() or work.refused()):
        return "not needed", "there is no remote tier"
    if value == "cachegen":
        return "translated", "codec=int8 at the remote tier: lossy, too, and marked as such"
    return "no counterpart", "codec=lossless is exact; int8, int4 and transform are lossy"


def _decode(work: _Work, value: object) -> tuple[Fate, str]:
    if is_true(value):
        return "not needed", "answers that later prompts contain are stored"
    return "translated", "answers: false; without it, answers that are never read are left out"


def _policy_of(work: _Work, value: object) -> tuple[Fate, str]:
    name = _POLICIES.get(str(value).upper())
    if name is None:
        return "no counterpart", "policy= is lru, lfu, fifo, 2q, adaptive, returns and others"
    if name == "lru":
        return "not needed", "lru is the default; adaptive and returns find more"
    return "translated", f"policy={name}"


def _min_tokens(work: _Work, value: object) -> tuple[Fate, str]:
    tokens = work.options().get("min_tokens")
    if tokens is None:
        return "not needed", "0 is the default"
    return "translated", f"min_tokens: {tokens}"


def _api(work: _Work, value: object) -> tuple[Fate, str]:
    if value in _EMPTY:
        return "not needed", "it is off"
    return "no counterpart", STATUS


def _locations(work: _Work, value: object) -> tuple[Fate, str]:
    return "no counterpart", "every tier is read and written; the order in tiers decides"


def _extra(work: _Work, value: object) -> tuple[Fate, str]:
    if value in _EMPTY or value == {}:
        return "not needed", "it is empty"
    extra = work.extra
    if not extra:
        return "unknown", "LMCache takes an object here"
    remote = (work.remote_urls() or [""])[0].partition("://")[0]
    taken = [name for name in extra if remote in EXTRA_TAKEN.get(name, ())]
    notes = [f"{', '.join(taken)}: in the URL of the remote tier"] if taken else []
    notes += [f"{name}: {EXTRA[name]}" for name in extra if name in EXTRA]
    rest = sorted(str(name) for name in extra if name not in EXTRA and name not in taken)
    if rest:
        notes.append(f"look at each: {', '.join(rest[:12])}")
    return "translated" if taken else "no counterpart", "; ".join(notes)


def _connector(work: _Work, value: object) -> tuple[Fate, str]:
    if value != "LMCacheMPConnector":
        return "translated", "KVKeepConnector"
    return "translated", (
        "KVKeepConnector, without a server process. What `lmcache server` has as --l1-size-gb is "
        "shm://…GiB in place of memory://, and each --l2-adapter a tier below it"
    )


def _timeout(name: str) -> Callable[[_Work, object], tuple[Fate, str]]:
    def tell(work: _Work, value: object) -> tuple[Fate, str]:
        seconds = work.options().get(name)
        if seconds is None:
            return "not needed", "nothing is given"
        return "translated", f"{name}: {seconds:g}"

    return tell


_NO_SIZE: Final = (
    "Without max_local_disk_size LMCache stores nothing there, and kvkeep takes 80 % of the free "
    "space: give size="
)
_TAKEN: Final[dict[str, Callable[[_Work, object], tuple[Fate, str]]]] = {
    "kv_connector": _connector,
    "local_cpu": _cpu,
    "max_local_cpu_size": _cpu_size,
    "local_disk": _disk,
    "max_local_disk_size": _disk_size,
    "remote_url": _remote,
    "remote_serde": _serde,
    "save_decode_cache": _decode,
    "cache_policy": _policy_of,
    "blocking_timeout_secs": _timeout("load_timeout"),
    "lookup_timeout_ms": _timeout("lookup_timeout"),
    "min_retrieve_tokens": _min_tokens,
    "internal_api_server_enabled": _api,
    "retrieve_locations": _locations,
    "store_location": _locations,
    "extra_config": _extra,
}


_SECRETS: Final = ("password", "passwd", "secret", "credential", "token_", "_token", "_key", "auth")


def _bytes(gib: float) -> str:
    whole = round(gib * 1024)
    return f"{whole // 1024}GiB" if whole % 1024 == 0 and whole else f"{max(1, whole)}MiB"


def _shown(name: str, value: object) -> str:
    if name == "extra_config" and isinstance(value, str):
        return "JSON"
    if name == "extra_config" or isinstance(value, dict):
        return f"{len(value)} options" if isinstance(value, dict) else told(value, 40)
    if isinstance(value, str) and "://" in value:
        return str(masked(name, value))
    if is_secret(name) or any(word in name.lower() for word in _SECRETS):
        return "…"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, str | int | float) else told(value, 40)
