"""kvkeep's parts of vLLM's ``--kv-transfer-config``, from plain values.

Imports nothing of vLLM: ``kvkeep doctor`` checks a configuration where no vLLM is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvkeep.core.errors import InvalidValue, did_you_mean, told
from kvkeep.integrations.vllm.options import ConnectorOptions, OffloadOptions
from kvkeep.store.tiers import check_tiers

if TYPE_CHECKING:
    from kvkeep.integrations.options import EngineOptions

__all__ = [
    "CONNECTOR", "NO_ENGINE", "OFFLOADING", "POLICY", "SPEC", "TIER", "TransferPart",
    "check_inner", "check_part", "offload_parts", "transfer_parts",
]  # fmt: skip

CONNECTOR: Final = "KVKeepConnector"
TIER: Final = "KVKeepTier"
OFFLOADING: Final = "KVKeepOffloadingConnector"
"""vLLM's `OffloadingConnector` for engines with a tier of kvkeep."""
SPEC: Final = "KVKeepSpec"
_MODULE: Final = "kvkeep.integrations.vllm.tier"
NO_ENGINE: Final = (
    f"{TIER} sees the configuration and the requests of its engine through kvkeep's connector: "
    f'give "kv_connector": "{OFFLOADING}" with "kv_connector_module_path": "{_MODULE}" in place '
    f'of "OffloadingConnector", and "spec_name": "{SPEC}"'
)
POLICY: Final = "recompute"
"""What ``kv_load_failure_policy`` must be: vLLM's default makes a lost file a request's error."""
_CONSUMERS: Final = ("kv_consumer", "kv_both")
_ROLES: Final = ("kv_both", "kv_producer", "kv_consumer")
_OF_VLLM: Final = frozenset({"type", "module_path", "locality", "backpressure"})


class TransferPart(NamedTuple):
    """One use of kvkeep: ``name`` is `CONNECTOR` or `TIER`."""

    name: str
    options: EngineOptions


def transfer_parts(config: Mapping[str, Any]) -> list[TransferPart]:
    """Return the uses of kvkeep in a ``--kv-transfer-config``, checked; empty: it has none.

    Looks into `MultiConnector` and into secondary tiers of vLLM's offloading.

    Raises:
        InvalidValue: an option is wrong, or one that kvkeep depends on has a value that breaks a
            promise.
    """
    name, extra = config.get("kv_connector"), config.get("kv_connector_extra_config") or {}
    if not isinstance(extra, Mapping):
        raise InvalidValue(
            f"kv_connector_extra_config is {told(type(extra).__name__)}; an object is needed"
        )
    if name == CONNECTOR:
        role = config.get("kv_role")
        if role not in _ROLES:
            raise InvalidValue(f'kv_role is {told(role)} for {name}; "kv_both" stores and loads')
        return [TransferPart(CONNECTOR, ConnectorOptions.parse(extra))]
    if name == OFFLOADING:
        return offload_parts(extra)
    if name == "OffloadingConnector":
        if any(tier.get("type") == TIER for tier in _objects(extra.get("secondary_tiers"))):
            raise InvalidValue(NO_ENGINE)
        return []
    if name != "MultiConnector":
        return []
    parts = []
    for inner in _objects(extra.get("connectors")):
        found = transfer_parts(inner)
        if any(part.name == CONNECTOR for part in found):
            check_inner(str(inner.get("kv_role")), config)
        parts += found
    if sum(part.name == CONNECTOR for part in parts) > 1:
        raise InvalidValue(
            f"there are two {CONNECTOR}s in one engine, which would find each other's blocks; "
            "leave one of them, with the tiers of both"
        )
    return parts


def offload_parts(extra: Mapping[str, Any]) -> list[TransferPart]:
    """Return kvkeep's tiers below vLLM's offloading, by its extra configuration.

    Raises:
        InvalidValue: an option of a tier is wrong, or one beside ``secondary_tiers`` that a tier
            needs.
    """
    parts = []
    for tier in _objects(extra.get("secondary_tiers")):
        if tier.get("type") == TIER:
            options = {name: value for name, value in tier.items() if name not in _OF_VLLM}
            parts.append(TransferPart(TIER, OffloadOptions.parse(options)))
        elif tier.get("module_path") == _MODULE:
            raise InvalidValue(f'type is {told(tier.get("type"))}; that in {_MODULE} is "{TIER}"')
    if len(parts) > 1:
        raise InvalidValue(
            f"there are two {TIER}s in secondary_tiers; leave one of them, with the tiers of both"
        )
    spec = extra.get("spec_name")
    if parts and spec != SPEC:
        near = did_you_mean(spec, [SPEC]) if isinstance(spec, str) else ""
        raise InvalidValue(
            f'spec_name is {told(spec)}{near}; a {TIER} needs "spec_name": "{SPEC}" with '
            f'"spec_module_path": "{_MODULE}" beside secondary_tiers'
        )
    memory = extra.get("cpu_bytes_to_use")
    try:
        enough = int(memory or 0) > 0
    except (TypeError, ValueError):
        enough = False
    if parts and not enough:
        raise InvalidValue(
            f"cpu_bytes_to_use is {told(memory)}; a {TIER} is below memory of vLLM: give its bytes "
            'beside secondary_tiers, as "cpu_bytes_to_use": 8589934592'
        )
    return parts


def _objects(value: object) -> list[Mapping[str, Any]]:
    """Return the objects in a list of JSON; what else is there is for vLLM to refuse."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def check_inner(own_role: str, outer: Mapping[str, Any]) -> None:
    """Check what vLLM reads from the connector around kvkeep's, whose role is ``own_role``.

    Raises:
        InvalidValue: with the option to set there.
    """
    policy, role, connector = (
        outer.get("kv_load_failure_policy", "fail"), outer.get("kv_role"), outer["kv_connector"],
    )  # fmt: skip
    if policy != POLICY:
        raise InvalidValue(
            f'kv_load_failure_policy is "{policy}" for {connector}, '
            "and vLLM does not read it from the connectors inside: one damaged or missing block "
            f'would end a request with an error. Set "kv_load_failure_policy": "{POLICY}" beside '
            f'"kv_connector": "{connector}" in --kv-transfer-config'
        )
    if own_role in _CONSUMERS and role not in _CONSUMERS:
        raise InvalidValue(
            f'kv_role is "{role}" for {connector} and "{own_role}" for '
            "kvkeep inside it: vLLM would reuse pages while they are loaded. Set "
            f'"kv_role": "kv_both" beside "kv_connector": "{connector}" in '
            '--kv-transfer-config, or "kv_role": "kv_producer" for kvkeep'
        )


def check_part(part: TransferPart) -> None:
    """Check what the options of ``part`` name: URLs of tiers, and files. Opens no tier.

    Raises:
        InvalidValue: a URL is wrong, or a file cannot be used.
        MissingExtra: a tier needs a package that is not installed.
    """
    options = part.options
    check_tiers(options.tiers, in_front=part.name != TIER)
    public = getattr(options, "public_prefixes", "")
    try:
        if public:
            with Path(public).open("rb"):
                pass
    except OSError as error:
        raise InvalidValue(f"public_prefixes: {public} cannot be read: {error.strerror}") from error
