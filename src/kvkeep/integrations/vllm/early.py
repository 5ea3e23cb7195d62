"""The check of kvkeep's options while vLLM makes an engine's configuration.

vLLM makes connectors after it has loaded the weights, which takes minutes. Before that it only asks
for the connector's class, and passes no options. So they are taken from the configuration that is
being made, up the stack, as `OffloadEngine.of_caller` does.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, StartRefused
from kvkeep.integrations.vllm.transfer import check_part, transfer_parts

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

__all__ = ["check_start"]

_DEEPEST = 64
_READ = (
    "kv_connector", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config",
)  # fmt: skip


def check_start() -> None:
    """Check kvkeep's options, if vLLM is making an engine's configuration up the stack.

    Does nothing elsewhere: the connector checks them again. Cost: 0.1 ms for each tier.

    Raises:
        StartRefused: an option is wrong. No `InvalidValue`, which is a ValueError: pydantic would
            put that into an error of its own, with lines of other things before and behind.
        MissingExtra: a tier needs a package that is not installed.
    """
    transfer = _configured()
    if transfer is None:
        return
    try:
        for part in transfer_parts({name: getattr(transfer, name, None) for name in _READ}):
            check_part(part)
    except InvalidValue as error:
        raise StartRefused(" ".join(str(error).split())) from None


def _configured() -> KVTransferConfig | None:
    """Return what is configured in the `VllmConfig` that is being made up the stack."""
    from vllm.config import VllmConfig  # noqa: PLC0415 - vLLM is imported where this is called

    frame = inspect.currentframe()
    for _ in range(_DEEPEST):
        if frame is None:
            break
        if frame.f_code.co_name == "__post_init__":
            made = frame.f_locals.get("self")
            if isinstance(made, VllmConfig):
                return made.kv_transfer_config
        frame = frame.f_back
    return None
