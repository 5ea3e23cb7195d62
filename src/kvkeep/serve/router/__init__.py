"""A router that knows who holds which prefix: its index, its costs, and an HTTP proxy on it."""

from __future__ import annotations

from kvkeep.serve.router.cost import CostModel
from kvkeep.serve.router.held import Held
from kvkeep.serve.router.index import Place, PrefixIndex
from kvkeep.serve.router.router import PrefixRouter, RouterStats, Score, Ticket

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
