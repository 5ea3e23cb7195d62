"""kvkeep's names in vLLM, so that a configuration needs no module paths.

vLLM calls `register` in each of its processes, through the entry point group
``vllm.general_plugins``, also where nobody uses kvkeep. So it imports nothing of kvkeep, says
nothing, and does nothing in a version of vLLM that has other registries. Module paths work as well.

It is beside the package ``vllm``, not in it: what it does is needed before that is imported.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["register"]

_LOG = logging.getLogger("kvkeep.vllm")
_ADAPTER = "kvkeep.integrations.vllm"
_TIER = f"{_ADAPTER}.tier"
_OFFLOADING = "OffloadingConnector"


def register() -> None:
    """Register the names of kvkeep's classes with vLLM. A second call does nothing.

    Cost: under a millisecond in a process of vLLM, which has the registries loaded.
    """
    for names in (_connector, _tier, _checked_tier):
        try:
            names()
        except (ImportError, AttributeError, TypeError) as error:
            _LOG.debug("this vLLM has no registry for a name of kvkeep: %s", error)


def _connector() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )

    with suppress(ValueError):  # it has the name
        KVConnectorFactory.register_connector("KVKeepConnector", _ADAPTER, "KVKeepConnector")


def _tier() -> None:
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory  # noqa: PLC0415
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory  # noqa: PLC0415

    with suppress(ValueError):
        OffloadingSpecFactory.register_spec("KVKeepSpec", _TIER, "KVKeepSpec")
    with suppress(ValueError):
        SecondaryTierFactory.register_tier("KVKeepTier", _TIER, "KVKeepTier")


def _checked_tier() -> None:
    """Have kvkeep's tiers checked when vLLM asks for its own connector of offloading.

    vLLM does so while it makes an engine's configuration; the tiers themselves are made after the
    weights are loaded.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )

    registry = KVConnectorFactory._registry
    theirs = registry.get(_OFFLOADING)
    if theirs is not None and not isinstance(theirs, _Checked):
        registry[_OFFLOADING] = _Checked(theirs)


class _Checked:
    """What loads a connector of vLLM, and checks the options of kvkeep's tiers below it."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load

    def __call__(self) -> Any:
        try:
            from kvkeep.integrations.vllm.early import check_start  # noqa: PLC0415
        except ImportError as error:  # kvkeep's tiers would say so; others must not be disturbed
            _LOG.debug("options of kvkeep's tiers are not checked: %s", error)
        else:
            check_start()
        return self._load()
