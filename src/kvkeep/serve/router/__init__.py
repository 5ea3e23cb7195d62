"""A prefix-aware router: an index of cached prefixes, a cost model, and an HTTP proxy."""

from __future__ import annotations

from kvkeep.serve.router.cost import RoutingCost
from kvkeep.serve.router.held import HeldPrefix
from kvkeep.serve.router.index import Place, PlacementIndex
from kvkeep.serve.router.router import PrefixRouter, RouterStats, RouteTicket, Score

__all__ = [
    "HeldPrefix",
    "Place",
    "PlacementIndex",
    "PrefixRouter",
    "RouteTicket",
    "RouterStats",
    "RoutingCost",
    "Score",
]
