"""`scheduler_side`: the scheduler's side of a connector, with a status if one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.integrations.status_options import StatusAddress, bound_or_none
from kvkeep.integrations.vllm.scheduler import SchedulerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvkeep.integrations.vllm.groups import Groups
    from kvkeep.integrations.vllm.options import ConnectorOptions

__all__ = ["scheduler_side"]


def scheduler_side(
    vllm_config: VllmConfig, options: ConnectorOptions, groups: Groups
) -> SchedulerSide:
    """Return the scheduler's side of an engine.

    With the option ``status`` it is one that serves a status; where its address cannot be bound,
    a warning says so, and it is a plain one. Of several data-parallel ranks each has its own port.

    Raises:
        InvalidValue: a rank would have a port beyond the last one.
    """
    transfer = vllm_config.kv_transfer_config
    loads, saves = transfer.is_kv_consumer, transfer.is_kv_producer
    if options.status:
        rank = vllm_config.parallel_config.data_parallel_rank
        bound = bound_or_none(StatusAddress.parse(options.status).of_rank(rank))
        if bound is not None:
            from kvkeep.integrations.vllm.watched import (  # noqa: PLC0415 - a server, rarely needed
                WatchedSchedulerSide,
            )

            return WatchedSchedulerSide(
                vllm_config, options, groups, loads=loads, saves=saves, bound=bound
            )
    return SchedulerSide(vllm_config, options, groups, loads=loads, saves=saves)
