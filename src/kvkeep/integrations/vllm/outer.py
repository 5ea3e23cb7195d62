"""Options that vLLM reads from the outer configuration if the connector is inside another one.

`MultiConnector` gives each of its connectors a copy of the configuration with its own
``kv_transfer_config``. vLLM's scheduler, however, reads the outer one, also for two
options on which the connector depends:

    kv_load_failure_policy   "fail" ends a request whose load fails with an empty answer
    kv_role                  without "consumer" vLLM reuses pages that a load may still write to

The outer configuration belongs to all connectors in it and is not changed here; options that would
break a promise are refused in the worker, which sees the outer one. vLLM makes workers first, so
the scheduler's side never starts.

A process of vLLM has one worker's side, even if a script makes two engines in it: the second engine
gets the connector of the first, which would store the second's KV under the first's namespace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config import get_current_vllm_config_or_none

from kvkeep.core.errors import InvalidValue
from kvkeep.integrations.vllm.transfer import POLICY, check_inner

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

__all__ = ["require_outer", "require_own_engine"]


def require_outer(own: KVTransferConfig) -> None:
    """Set the options that the connector needs in ``own``; check that the outer ones agree.

    Raises:
        InvalidValue: the outer configuration differs, with the option to set there.
    """
    own.kv_load_failure_policy = POLICY
    current = get_current_vllm_config_or_none()
    outer = None if current is None else current.kv_transfer_config
    if outer is None or outer is own:
        return
    read = ("kv_connector", "kv_role", "kv_load_failure_policy")
    check_inner(str(own.kv_role), {name: getattr(outer, name) for name in read})


def require_own_engine(own: KVTransferConfig) -> None:
    """Check that the starting engine is the one for which the connector was made.

    Raises:
        InvalidValue: it is another engine.
    """
    current = get_current_vllm_config_or_none()
    if current is None:
        return
    outer = current.kv_transfer_config
    if outer is None or outer.engine_id != own.engine_id:
        raise InvalidValue(
            "vLLM gave a second engine in this process the connector of the first, which has other "
            "KV; end the first engine before, or run each engine in its own process "
            "(VLLM_ENABLE_V1_MULTIPROCESSING=1, the default)"
        )
