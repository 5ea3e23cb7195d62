"""The section ``[connector]`` of a file of settings: options of kvkeep inside an engine."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from kvkeep.core.config_file import masked
from kvkeep.integrations.options import refuse_unknown, values_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvkeep.core.config_file import FileValue
    from kvkeep.integrations.options import EngineOptions

__all__ = ["connector_defaults", "connector_options", "connector_rows"]


def _engines() -> dict[str, type[EngineOptions]]:
    """Return the classes of options of each engine, which need none of the engines."""
    from kvkeep.integrations.sglang.options import StorageOptions  # noqa: PLC0415
    from kvkeep.integrations.vllm.offload.options import OffloadOptions  # noqa: PLC0415
    from kvkeep.integrations.vllm.options import ConnectorOptions  # noqa: PLC0415

    return {
        "vLLM": ConnectorOptions, "vLLM's offloading": OffloadOptions, "SGLang": StorageOptions,
    }  # fmt: skip


def connector_defaults() -> dict[str, tuple[object, str]]:
    """Return each option's default, and the engines that have it; empty: all of them."""
    found: dict[str, tuple[object, list[str]]] = {}
    engines = _engines()
    for engine, options in engines.items():
        for one in fields(options):
            default: object = list(one.default) if isinstance(one.default, tuple) else one.default
            found.setdefault(one.name, (default, []))[1].append(engine)
    return {
        name: (default, "" if len(inside) == len(engines) else ", ".join(inside))
        for name, (default, inside) in found.items()
    }


def connector_options(values: Mapping[str, FileValue]) -> None:
    """Check values of the section, each by the first engine that has its option.

    Raises:
        InvalidValue: no engine has the option, or it cannot have the value.
    """
    engines = _engines().values()
    for name, one in values.items():
        known = [
            options for options in engines if name in {field.name for field in fields(options)}
        ]
        if not known:
            refuse_unknown(
                [one.key], list(connector_defaults()), f"{one.where}: [connector] has",
                "kvkeep's options are",
            )  # fmt: skip
        values_in(known[0], {name: one})


def connector_rows(values: Mapping[str, FileValue]) -> list[tuple[str, object, str]]:
    """Return name, value without secrets, and source of each option. Raises `InvalidValue`."""
    connector_options(values)
    rows = []
    for name, (default, engines) in connector_defaults().items():
        one = values.get(name)
        only = f" ({engines})" if engines else ""
        if one is None:
            rows.append((name + only, default, "default"))
        else:
            rows.append((name + only, masked(name, one.value), one.where))
    return rows
