"""kvkeep's names in vLLM, so that a configuration needs no module paths.

vLLM calls `register` in each of its processes, through the entry point group
``vllm.general_plugins``, also where nobody uses kvkeep. So it imports nothing of kvkeep, says
nothing, and does nothing in a version of vLLM that has other registries. Module paths work as well.

It is beside the package ``vllm``, not in it: what it does is needed before that is imported.
"""

from __future__ import annotations

import logging
from contextlib import suppress

__all__ = ["register"]

_LOG = logging.getLogger("kvkeep.vllm")
_ADAPTER = "kvkeep.integrations.vllm"
_TIER = f"{_ADAPTER}.tier"


def register() -> None:
    """Register the names of kvkeep's classes with vLLM. A second call does nothing.

    Cost: under a millisecond in a process of vLLM, which has the registries loaded.
    """
    for names in (_connectors, _tier):
        try:
            names()
        except (ImportError, AttributeError, TypeError) as error:
            _LOG.debug("this vLLM has no registry for a name of kvkeep: %s", error)


def _connectors() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )

    for name, module in (("KVKeepConnector", _ADAPTER), ("KVKeepOffloadingConnector", _TIER)):
        with suppress(ValueError):  # it has the name
            KVConnectorFactory.register_connector(name, module, name)


def _tier() -> None:
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory  # noqa: PLC0415
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory  # noqa: PLC0415

    with suppress(ValueError):
        OffloadingSpecFactory.register_spec("KVKeepSpec", _TIER, "KVKeepSpec")
    with suppress(ValueError):
        SecondaryTierFactory.register_tier("KVKeepTier", _TIER, "KVKeepTier")
