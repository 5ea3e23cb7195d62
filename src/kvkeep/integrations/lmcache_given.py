"""What is given to LMCache: a YAML file, variables ``LMCACHE_…``, vLLM's ``--kv-transfer-config``.

As in LMCache, variables replace the options of a file, and ``lmcache.…`` in vLLM's configuration
replaces both.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvkeep.core.errors import InvalidValue, require, told

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import ModuleType

__all__ = ["Given", "from_environment", "gather", "read_yaml"]

_PREFIX: Final = "LMCACHE_"
_MOST_BYTES: Final = 1 << 20  # of a file
_MOST_ALIASES: Final = 16  # each may stand for all that was before it
_MOST_BITS: Final = 256  # of a number; Python writes no whole number of 4,301 digits


class Given(NamedTuple):
    """Options of LMCache, by their names there.

    Attributes:
        options: from all places, the last one for each name.
        role: vLLM's ``kv_role``.
        inside: LMCache's connector is one of a `MultiConnector`.
    """

    options: dict[str, object]
    role: str = "kv_both"
    inside: bool = False


def gather(what: str | None, environment: Mapping[str, str]) -> Given:
    """Return the options that LMCache would have.

    ``what`` is a path of a YAML file, or of a file with vLLM's configuration, or that
    configuration itself as JSON; None: the file that ``LMCACHE_CONFIG_FILE`` names, or none.

    Raises:
        InvalidValue: it cannot be read, is not a mapping, or names no connector of LMCache.
        MissingExtra: PyYAML is not installed, and there is a file.
    """
    file = environment.get(f"{_PREFIX}CONFIG_FILE")
    if what is None:
        read = read_yaml(file) if file else {}
        return Given({**read, **from_environment(environment)})
    read = _json(what) if what.lstrip().startswith("{") else read_yaml(what)
    if "kv_connector" not in read:
        return Given({**read, **from_environment(environment)})
    entry = _entry(read)
    base = gather(None, environment).options
    extra = entry.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        raise InvalidValue(f"kv_connector_extra_config is {told(extra, 40)}; an object is needed")
    base |= {str(name).removeprefix("lmcache."): value for name, value in extra.items()}
    options = {"kv_connector": entry["kv_connector"], **base}
    return Given(options, _role(read, entry), inside=entry is not read)


def read_yaml(path: str) -> dict[str, object]:
    """Return the options of a file of LMCache.

    Raises:
        InvalidValue: it cannot be read, is not a YAML mapping, is larger than 1 MiB, or has more
            than 16 aliases, which could stand for terabytes.
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
        found = yaml.load(text, _loader(yaml))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        where = getattr(error, "problem_mark", None)
        line = "" if where is None else f", line {where.line + 1}"
        raise InvalidValue(f"{path}{line} is no YAML") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise InvalidValue(f"{path} is {told(found, 40)}; options are needed, as chunk_size: 256")
    return {str(name): value for name, value in found.items()}


def _loader(yaml: ModuleType) -> type[Any]:
    """Return PyYAML's safe loader with a bound on what a small text can become."""

    class _Bounded(yaml.SafeLoader):  # type: ignore[name-defined, misc]
        aliases = 0

        def compose_node(self, parent: object, index: object) -> object:
            self.aliases += bool(self.check_event(yaml.AliasEvent))
            if self.aliases > _MOST_ALIASES:
                raise ValueError("too many aliases")
            return super().compose_node(parent, index)

        def construct_yaml_int(self, node: object) -> int:
            number: int = super().construct_yaml_int(node)
            if number.bit_length() > _MOST_BITS:
                raise ValueError("too large a number")
            return number

    _Bounded.add_constructor("tag:yaml.org,2002:int", _Bounded.construct_yaml_int)
    return _Bounded


def from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    """Return the options that ``LMCACHE_…`` variables give; a file they name is not read."""
    return {
        name.removeprefix(_PREFIX).lower(): _unquoted(value)
        for name, value in environment.items()
        if name.startswith(_PREFIX) and name != f"{_PREFIX}CONFIG_FILE"
    }


def _unquoted(value: str) -> str:
    """Leave out quotes around a value, as LMCache does: files of variables often keep them."""
    value = value.strip()
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value


def _json(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(
            "what begins with { is no JSON; vLLM's --kv-transfer-config is"
        ) from error
    assert isinstance(found, dict), "it begins with a brace"
    return found


def _entry(given: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of LMCache's connector, which may be inside `MultiConnector`."""
    found = [one for one in _connectors(given) if "LMCache" in str(one.get("kv_connector"))]
    if len(found) != 1:
        name = told(given["kv_connector"], 40)
        raise InvalidValue(f"kv_connector is {name}, with {len(found)} connectors of LMCache; "
                           "LMCacheConnectorV1 is translated")  # fmt: skip
    return found[0]


def _connectors(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield given
    extra = given.get("kv_connector_extra_config")
    inner = extra.get("connectors") if isinstance(extra, dict) else None
    for one in inner if isinstance(inner, list) else []:
        if isinstance(one, dict):
            yield one


def _role(given: dict[str, Any], entry: dict[str, Any]) -> str:
    role = entry.get("kv_role") or given.get("kv_role") or "kv_both"
    if role not in ("kv_both", "kv_producer", "kv_consumer"):
        raise InvalidValue(
            f"kv_role is {told(role, 40)}; kv_both, kv_producer or kv_consumer is needed"
        )
    return str(role)
