"""The remote tier of LMCache as URLs of kvkeep's. Nothing is opened."""

from __future__ import annotations

import re
from posixpath import normpath
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from kvkeep.core.errors import InvalidValue, MissingExtra, told
from kvkeep.store.tiers.opening import check_tiers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["is_true", "once", "refused", "remote_urls"]

_SCHEMES: Final = {
    "redis": "redis", "redis-cluster": "redis", "resp": "redis", "valkey": "valkey", "s3": "s3",
    "rediss": "rediss", "azure": "az", "fs": "file", "file": "file",
}  # fmt: skip
_INSTEAD: Final = {
    "redis-sentinel": "sentinels are not asked: give the server's own address as redis://",
    "lm": "there is no server of kvkeep's own: share valkey://, or shm:// on one machine",
    "mooncakestore": "there is no tier for mooncakestore://; docs/backends.md says why",
}
_AWS: Final = re.compile(r"(?P<bucket>.+?)\.s3(?:[.-](?P<region>[a-z0-9-]+))?\.amazonaws\.com")


def is_true(value: object) -> bool:
    """Return whether LMCache takes a value for true: what is written true or 1."""
    return told(value).strip("'\" ").lower() in ("true", "1")


def once(paths: Iterable[str]) -> list[str]:
    """Return each directory once, by its first name: kvkeep refuses one that is two tiers."""
    found: dict[str, str] = {}
    for path in paths:
        found.setdefault(normpath(path) if path else "", path)
    return list(found.values())


def remote_urls(url: str, extra: Mapping[str, object]) -> list[str]:
    """Return the tiers of a ``remote_url``: kvkeep's, or as given if there is no such tier.

    ``extra`` is LMCache's ``extra_config``. Several paths become several tiers. Raises
    `InvalidValue` for what is no URL.
    """
    scheme, sign, rest = url.strip().partition("://")
    if not sign:
        raise InvalidValue("remote_url is no URL; LMCache takes one such as redis://host:6379")
    ours = _SCHEMES.get(scheme)
    if ours is None:
        return [url.strip()]
    if ours == "file":
        _, slash, path = rest.partition("/")  # LMCache takes host:port/path
        paths = [one.strip() for one in (slash + path).split(",")]
        return [f"file://{quote(one)}" for one in once(paths) if one] or ["file://"]
    if ours == "s3":
        return [_s3(rest, extra)]
    if ours in ("redis", "valkey", "rediss"):
        modes = (str(extra.get(f"{name}_mode")).lower() for name in ("valkey", "redis"))
        return [_valkey(ours, rest, extra, cluster=scheme == "redis-cluster" or "cluster" in modes)]
    return [f"{ours}://{rest}"]


def refused(url: str) -> str | None:
    """Return why kvkeep would not open a remote tier, or None. Credentials are not checked."""
    scheme = url.partition("://")[0]
    if scheme in _INSTEAD:
        return _INSTEAD[scheme]
    if scheme not in {*_SCHEMES.values(), "valkeys"}:
        return f"there is no tier for {scheme}://; see the tiers in docs/store.md"
    try:
        check_tiers([url], in_front=False)
    except InvalidValue as error:
        if scheme == "az" and "cannot be opened" in str(error):
            return None  # its account is in the environment of the engine
        return str(error)
    except MissingExtra:
        return None
    return None


def _valkey(scheme: str, rest: str, extra: Mapping[str, object], *, cluster: bool) -> str:
    """Return the URL of a server, or of one node: kvkeep asks it for the others."""
    who, at, hosts = rest.rpartition("@")
    first = hosts.partition(",")[0]
    if scheme == "valkey":  # LMCache reads these for valkey:// alone
        name, password = (str(extra.get(f"valkey_{one}") or "") for one in ("username", "password"))
        if not at and (name or password):
            who, at = f"{quote(name, safe='')}:{quote(password, safe='')}", "@"
        if is_true(extra.get("tls_enable")):
            scheme = "valkeys"
        database = extra.get("valkey_database")
        if database is not None and not cluster and "/" not in first:
            first += f"/{database}"
    url = f"{scheme}://{who}{at}{first}"
    return url + ("&" if "?" in url else "?") + "cluster=yes" if cluster else url


def _s3(place: str, extra: Mapping[str, object]) -> str:
    host, *path = place.split("/")  # LMCache takes bucket.host
    options = {}
    if found := _AWS.fullmatch(host):
        name, options["region"] = found["bucket"], found["region"] or ""
    else:
        name, _, rest = host.partition(".")
        plain = is_true(extra.get("disable_tls"))
        options["endpoint"] = f"{'http' if plain else 'https'}://{rest}" if rest else ""
    if region := extra.get("s3_region"):
        options["region"] = str(region)
    options = {key: value for key, value in options.items() if value}
    rest = "/".join([name, *[one for one in path if one]])
    query = "&".join(f"{key}={quote(value, safe=':/')}" for key, value in options.items())
    return f"s3://{rest}" + (f"?{query}" if query else "")
