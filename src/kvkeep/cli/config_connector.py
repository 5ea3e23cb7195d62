"""The section ``[connector]`` of a file of settings: options of kvkeep inside an engine."""

from __future__ import annotations

from dataclasses import fields
from itertools import chain
from typing import TYPE_CHECKING

from kvkeep.integrations.options import refuse_unknown, values_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvkeep.core.config_file import FileValue
    from kvkeep.integrations.options import EngineOptions

__all__ = ["connector_options"]


def _engines() -> tuple[type[EngineOptions], ...]:
    """Return the options of vLLM, vLLM's offloading and SGLang, which need none of the engines."""
    from kvkeep.integrations.sglang.options import StorageOptions  # noqa: PLC0415
    from kvkeep.integrations.vllm.options import (  # noqa: PLC0415
        ConnectorOptions,
        OffloadOptions,
    )

    return ConnectorOptions, OffloadOptions, StorageOptions


def connector_options(values: Mapping[str, FileValue]) -> None:
    """Check values of the section, each by the first engine that has its option.

    Raises:
        InvalidValue: no engine has the option, or it cannot have the value.
    """
    names = {options: [field.name for field in fields(options)] for options in _engines()}
    for name, one in values.items():
        known = [options for options, its in names.items() if name in its]
        if not known:
            every = list(dict.fromkeys(chain(*names.values())))
            where = f"{one.where}: [connector] has"
            refuse_unknown([one.key], every, where, "kvkeep's options are")
        values_in(known[0], {name: one})
