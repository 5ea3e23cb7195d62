"""Configurations of LMCache, option by option in kvkeep's words.

Read from LMCache 0.5.6: a YAML file, or environment variables ``LMCACHE_…``. Nothing of LMCache is
imported, and nothing that a configuration names is opened.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple
from urllib.parse import quote

from kvkeep.core.config_file import masked
from kvkeep.core.errors import InvalidValue, MissingExtra, did_you_mean, require, told
from kvkeep.integrations.lmcache_names import FAMILIES, NO_COUNTERPART, NOT_NEEDED, STATUS
from kvkeep.store.tiers.opening import check_tiers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Translated", "Translation", "from_environment", "read_yaml", "translate"]

Fate = Literal["translated", "not needed", "no counterpart", "unknown"]

_PREFIX: Final = "LMCACHE_"
_MOST_BYTES: Final = 1 << 20  # of a file
_ALIASES: Final = {
    "enable_xpyd": "enable_pd",
    "external_backends": "storage_plugins",
    "plugin_locations": "runtime_plugin_locations",
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


def read_yaml(path: str) -> dict[str, object]:
    """Return the options of a file of LMCache.

    Raises:
        InvalidValue: it cannot be read, is not a YAML mapping, or is larger than 1 MiB.
        MissingExtra: PyYAML is not installed.
    """
    yaml = require("yaml", "translate")
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InvalidValue(f"cannot read {path}: {error.strerror}") from error
    if len(text) > _MOST_BYTES:
        raise InvalidValue(f"{path} is larger than 1 MiB: no configuration of LMCache")
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        where = getattr(error, "problem_mark", None)
        line = "" if where is None else f", line {where.line + 1}"
        raise InvalidValue(f"{path}{line} is no YAML") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise InvalidValue(f"{path} is {told(found, 40)}; options are needed, as chunk_size: 256")
    return {str(name): value for name, value in found.items()}


def from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    """Return the options that ``LMCACHE_…`` variables give; a file they name is not read."""
    return {
        name.removeprefix(_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(_PREFIX) and name != f"{_PREFIX}CONFIG_FILE"
    }


def translate(given: Mapping[str, object]) -> Translation:
    """Return the options of LMCache in kvkeep's words. Cost: none; nothing is opened.

    Raises:
        InvalidValue: an option with tiers or times has a value that LMCache would not take.
    """
    work = _Work({_ALIASES.get(name, name): value for name, value in given.items()})
    rows = [work.row(name) for name in work.given]
    return Translation(work.options(), tuple(rows))


_POLICIES: Final = {"LRU": "lru", "LFU": "lfu", "FIFO": "fifo"}
_REMOTE: Final = {
    "redis": "redis", "resp": "redis", "valkey": "valkey", "s3": "s3",
    "rediss": "rediss", "azure": "az", "fs": "file", "file": "file",
}  # fmt: skip
_LEAST: Final = "memory://1GiB"  # an engine has one tier at least
_AWS: Final = re.compile(r"(?P<bucket>.+?)\.s3(?:[.-](?P<region>[a-z0-9-]+))?\.amazonaws\.com")
_EMPTY: Final = (None, "", False, "None", "null", "false", "False")


@dataclass
class _Work:
    """One translation: the options that are given, and what is known of the tiers so far."""

    given: dict[str, object]

    def row(self, name: str) -> Translated:
        """Tell what becomes of one option."""
        value = self.given[name]
        shown = _shown(name, value)
        if name in _TAKEN:
            fate, note = _TAKEN[name](self, value)
            return Translated(name, shown, fate, note)
        for where, fate in ((NOT_NEEDED, "not needed"), (NO_COUNTERPART, "no counterpart")):
            if name in where:
                if fate == "no counterpart" and value in _EMPTY:
                    return Translated(name, shown, "not needed", "it is off")
                return Translated(name, shown, fate, where[name])
        for begin, of in FAMILIES.items():
            if name.startswith(begin):
                why = NO_COUNTERPART.get(of) or NOT_NEEDED.get(of) or STATUS
                return Translated(name, shown, "no counterpart", why)
        near = did_you_mean(name, [*_TAKEN, *NOT_NEEDED, *NO_COUNTERPART])
        return Translated(name, shown, "unknown", f"no option of LMCache 0.5.6{near}")

    # --- tiers -----------------------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        """Return kvkeep's options."""
        tiers = self.memory() + self.disks() + self._remote()
        made: dict[str, Any] = {"tiers": tiers or [_LEAST]}
        if (seconds := self.number("blocking_timeout_secs")) is not None:
            made["load_timeout"] = seconds
        if (ms := self.number("lookup_timeout_ms")) is not None:
            made["lookup_timeout"] = ms / 1000
        if tokens := int(self.number("min_retrieve_tokens") or 0):
            made["min_tokens"] = tokens
        if "save_decode_cache" in self.given and not _true(self.given["save_decode_cache"]):
            made["answers"] = False
        return made

    def memory(self) -> list[str]:
        if not _true(self.given.get("local_cpu", True)):
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
        room = f"?size={_bytes(size / len(paths))}" if size > 0 else ""
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
            if not path.startswith("/") or not path.strip("/"):
                raise InvalidValue(
                    f"local_disk has {told(path)}; a tier on disk needs the path of a directory, "
                    "from the root"
                )
        return [path.rstrip("/") for path in paths]

    def _remote(self) -> list[str]:
        url = self.remote_url()
        if url is None or self.refused(url):
            return []
        codec = "codec=int8" if self.given.get("remote_serde") == "cachegen" else ""
        joined = "&" if "?" in url else "?"
        return [url + (joined + codec if codec else "")]

    def refused(self, url: str) -> str | None:
        """Return why kvkeep would not open a remote tier, or None. Credentials are not checked."""
        scheme = url.partition("://")[0]
        if scheme not in _REMOTE.values():
            return f"there is no tier for {scheme}://; see the tiers in docs/store.md"
        if scheme == "az":  # its account is in the environment of the engine
            return None
        try:
            check_tiers([url], in_front=False)
        except InvalidValue as error:
            return str(error)
        except MissingExtra:
            return None
        return None

    def remote_url(self) -> str | None:
        """Return the URL of the remote tier: kvkeep's, or as given if there is no such tier."""
        given = self.given.get("remote_url")
        if given in _EMPTY:
            return None
        given = given.strip() if isinstance(given, str) else given
        if not isinstance(given, str) or "://" not in given:
            raise InvalidValue(
                "remote_url is no URL; LMCache takes one such as redis://host:6379"
            )  # fmt: skip
        scheme, _, rest = given.partition("://")
        ours = _REMOTE.get(scheme)
        if ours is None:
            return given
        if ours == "file":
            _, slash, path = rest.partition("/")  # LMCache takes host:port/path
            return f"file://{quote(slash + path)}"
        if ours == "s3":
            return self._s3(rest)
        return f"{ours}://{rest}"

    def _s3(self, place: str) -> str:
        extra = self.given.get("extra_config")
        extra = extra if isinstance(extra, dict) else {}
        host, *path = place.split("/")  # LMCache takes bucket.host
        options = {}
        if found := _AWS.fullmatch(host):
            name, options["region"] = found["bucket"], found["region"] or ""
        else:
            name, _, rest = host.partition(".")
            plain = _true(extra.get("disable_tls", False))
            options["endpoint"] = f"{'http' if plain else 'https'}://{rest}" if rest else ""
        if region := extra.get("s3_region"):
            options["region"] = str(region)
        options = {key: value for key, value in options.items() if value}
        rest = "/".join([name, *[one for one in path if one]])
        query = "&".join(f"{key}={quote(value, safe=':/')}" for key, value in options.items())
        return f"s3://{rest}" + (f"?{query}" if query else "")

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
    return "translated", f"{', '.join(tiers)}; what is stored outlives the process"


def _disk_size(work: _Work, value: object) -> tuple[Fate, str]:
    if not work.paths():
        return "not needed", "local_disk is off"
    if not work.number("max_local_disk_size"):
        return "not needed", "without size= a directory keeps to a share of the disk"
    several = len(work.paths()) > 1
    return "translated", f"size= of file://{', an equal share for each path' if several else ''}"


def _remote(work: _Work, value: object) -> tuple[Fate, str]:
    url = work.remote_url()
    if url is None:
        return "not needed", "it is off"
    if why := work.refused(url):
        return "no counterpart", why
    return "translated", f"{masked('', url)}; records are kvkeep's own, so it begins empty"


def _serde(work: _Work, value: object) -> tuple[Fate, str]:
    if value in ("naive", None, ""):
        return "not needed", "records are raw unless codec= says otherwise"
    url = work.remote_url()
    if value == "cachegen" and (url is None or work.refused(url)):
        return "not needed", "there is no remote tier"
    if value == "cachegen":
        return "translated", "codec=int8 at the remote tier: lossy, too, and marked as such"
    return "no counterpart", "codec=lossless is exact; int8, int4 and transform are lossy"


def _decode(work: _Work, value: object) -> tuple[Fate, str]:
    if _true(value):
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
    if not isinstance(value, dict):
        return "unknown", "LMCache takes an object here"
    names = ", ".join(sorted(map(str, value))[:12])
    if any("password" in str(name) or "secret" in str(name) or "key" in str(name)
           for name in value):  # fmt: skip
        names += ("; credentials: in the URL of valkey://, and in the environment for object "
                  "stores")  # fmt: skip
    taken = {"s3_region", "disable_tls"} & {*value}
    if taken and (work.remote_url() or "").startswith("s3://"):
        return "translated", f"region= and endpoint= of s3://; of {names}"
    return "no counterpart", f"look at each: {names}"


def _timeout(name: str) -> Callable[[_Work, object], tuple[Fate, str]]:
    def tell(work: _Work, value: object) -> tuple[Fate, str]:
        seconds = work.options().get(name)
        if seconds is None:
            return "not needed", "nothing is given"
        return "translated", f"{name}: {seconds:g}"

    return tell


_TAKEN: Final[dict[str, Callable[[_Work, object], tuple[Fate, str]]]] = {
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


def _true(value: object) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in ("true", "1", "yes", "on")
    return bool(value)


def _bytes(gib: float) -> str:
    whole = round(gib * 1024)
    return f"{whole // 1024}GiB" if whole % 1024 == 0 and whole else f"{max(1, whole)}MiB"


def _shown(name: str, value: object) -> str:
    if name == "extra_config" or isinstance(value, dict):
        return f"{len(value)} options" if isinstance(value, dict) else told(value, 40)
    if isinstance(value, str) and "://" in value:
        return str(masked(name, value))
    if any(word in name for word in ("password", "secret", "token_", "api_key", "access_key")):
        return "…"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, str | int | float) else told(value, 40)
