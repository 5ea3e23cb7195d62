"""A router that knows who holds which prefix: its index, its costs, and an HTTP proxy on it."""

from __future__ import annotations

from kvkeep.router.cost import CostModel
from kvkeep.router.held import Held
from kvkeep.router.index import Place, PrefixIndex
from kvkeep.router.router import PrefixRouter, RouterStats, Score, Ticket

__all__ = [
    "CostModel",
    "Held",
    "Place",
    "PrefixIndex",
    "PrefixRouter",
    "RouterStats",
    "Score",
    "Ticket",
]
