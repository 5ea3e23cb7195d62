"""`tier_status`: the status of a `KVKeepTier`: of its tiers, as vLLM tells it nothing of tokens."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import vllm

from kvkeep.integrations.status_options import StatusAddress, bound_or_none, loopback_names

if TYPE_CHECKING:
    from kvkeep.integrations.engine_status import EngineStatus
    from kvkeep.integrations.vllm.offload.engine import OffloadEngine
    from kvkeep.integrations.vllm.offload.options import OffloadOptions
    from kvkeep.serve.server.status_app import StatusServer
    from kvkeep.store import BlockStore

__all__ = ["TierStatus", "tier_status"]

_LOG = logging.getLogger("kvkeep.vllm")


class TierStatus(NamedTuple):
    """A status that is served. Thread safety: `close` by any thread, several times."""

    status: EngineStatus
    server: StatusServer

    def close(self) -> None:
        """End both, and give the port back."""
        self.server.close()
        self.status.close()


def tier_status(
    options: OffloadOptions, engine: OffloadEngine, store: BlockStore
) -> TierStatus | None:
    """Serve the state of the tiers of ``store``; None: nobody asked, or the port is in use."""
    if not options.status:
        return None
    config = engine.config
    rank = config.parallel_config.data_parallel_rank
    bound = bound_or_none(StatusAddress.parse(options.status).of_rank(rank))
    if bound is None:
        return None
    # A server, rarely needed.
    from kvkeep.integrations.engine_status import EngineFacts, EngineStatus  # noqa: PLC0415
    from kvkeep.serve.http import url_of  # noqa: PLC0415
    from kvkeep.serve.server.status_app import StatusServer, create_status_app  # noqa: PLC0415

    served = config.model_config.served_model_name
    facts = EngineFacts(
        engine=f"vLLM {vllm.__version__}",
        model=served if isinstance(served, str) else str(served[0]),
        page_tokens=1,
        num_pages=1,
    )
    status = EngineStatus(
        facts,
        store.cost,
        tiers=lambda: [(0, tier) for tier in store.stats()],
        requests=False,
    )
    hosts = loopback_names(bound.getsockname()[0])
    _LOG.info("kvkeep serves its status at %s", url_of(bound))
    make = partial(create_status_app, status, key=options.key, hosts=hosts)
    return TierStatus(status, StatusServer(make, bound))
