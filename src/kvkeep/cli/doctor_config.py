"""What ``kvkeep doctor`` is given: a configuration of an engine, or URLs of tiers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvkeep.cli.doctor_checks import fail, ok
from kvkeep.core.config_file import ConfigFile
from kvkeep.core.errors import InvalidValue, KVKeepError, did_you_mean, reason, told
from kvkeep.integrations.options import EngineOptions, tiers_of
from kvkeep.integrations.sglang.options import StorageOptions
from kvkeep.integrations.vllm.options import ConnectorOptions
from kvkeep.integrations.vllm.transfer import (
    CONNECTOR,
    OFFLOADING,
    SPEC,
    TIER,
    TransferPart,
    check_part,
    offload_parts,
    transfer_parts,
)
from kvkeep.store.backends import TierURL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvkeep.cli.doctor_checks import CheckResult

__all__ = ["AskedTiers", "asked_for"]

_SGLANG: Final = "KVKeepStorage"
_STORAGE: Final = "kvkeep.integrations.sglang"
# Names by which an engine is told of a class, and of its module; and the modules of ours.
_CLASSES: Final = (
    ("kv_connector", "kv_connector_module_path"), ("spec_name", "spec_module_path"),
    ("type", "module_path"), ("class_name", "module_path"),
)  # fmt: skip
_MODULES: Final = {
    CONNECTOR: ("kvkeep.integrations.vllm", "kvkeep.integrations.vllm.connector"),
    OFFLOADING: ("kvkeep.integrations.vllm.tier", "kvkeep.integrations.vllm.offload.engine"),
    SPEC: ("kvkeep.integrations.vllm.tier", "kvkeep.integrations.vllm.offload.spec"),
    TIER: ("kvkeep.integrations.vllm.tier",),
    _SGLANG: (_STORAGE, f"{_STORAGE}.storage"),
}
_TOML: Final = ".toml"
_MOST_BYTES: Final = 1 << 20  # of a file with options
_OF_TRANSFER: Final = (
    "kv_connector", "engine_id", "kv_buffer_device", "kv_buffer_size", "kv_role", "kv_rank",
    "kv_parallel_size", "kv_ip", "kv_port", "kv_connector_extra_config",
    "kv_connector_module_path", "enable_permute_local_kv", "kv_load_failure_policy",
)  # fmt: skip


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
    _refuse_other_modules(config)
    if "kv_connector" in config:
        _refuse_misspelt(config)
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


def _refuse_other_modules(config: Mapping[str, Any]) -> None:
    """Raise `InvalidValue` if a class of ours is looked for in a module that does not have it."""
    for key, where in _CLASSES:
        name, module = config.get(key), config.get(where)
        modules = _MODULES.get(name) if isinstance(name, str) else None
        if modules and module is not None and module not in modules:
            raise InvalidValue(f"{where} is {told(module)}; {name} is in {modules[0]}")
    inside = [config.get(key) for key in ("connectors", "secondary_tiers")]
    inner = [one for some in inside if isinstance(some, list) for one in some]
    for one in (config.get("kv_connector_extra_config"), *inner):
        if isinstance(one, dict):
            _refuse_other_modules(one)


def _refuse_misspelt(config: Mapping[str, Any]) -> None:
    """Raise `InvalidValue` for a name that is nearly one of vLLM's, which would refuse it.

    Names that are like none are left to vLLM: another version may have more.
    """
    for name in config:
        near = "" if name in _OF_TRANSFER else did_you_mean(name, _OF_TRANSFER)
        if near:
            raise InvalidValue(f"vLLM's --kv-transfer-config has no {told(name)}{near}")


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
