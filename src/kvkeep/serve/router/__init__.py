"""A prefix-aware router: an index of cached prefixes, a cost model, and an HTTP proxy."""

from __future__ import annotations

from kvkeep.core.errors import require

require("msgspec", "router")  # first, so that the error names the extra to install
require("zmq", "router")

from kvkeep.serve.router.held import HeldPrefix  # noqa: E402
from kvkeep.serve.router.index import Place, PlacementIndex  # noqa: E402
from kvkeep.serve.router.placing import RoutingCost  # noqa: E402
from kvkeep.serve.router.router import (  # noqa: E402
    PrefixRouter,
    RouterStats,
    RouteTicket,
    Score,
    Text,
)

__all__ = [
    "HeldPrefix",
    "Place",
    "PlacementIndex",
    "PrefixRouter",
    "RouteTicket",
    "RouterStats",
    "RoutingCost",
    "Score",
    "Text",
]
