"""`PrefixIndexTests`: the contract of `kvkeep.core.prefix.base`, one sentence of it a test."""

from __future__ import annotations

from kvkeep.testing.prefix_finding import FindingTests
from kvkeep.testing.prefix_forgetting import ForgettingTests
from kvkeep.testing.prefix_holding import HoldingTests
from kvkeep.testing.prefix_pins import PinTests
from kvkeep.testing.prefix_walk import WalkTests

__all__ = ["PrefixIndexTests"]


class PrefixIndexTests(FindingTests, HoldingTests, ForgettingTests, PinTests, WalkTests):
    """Subclass it, fill in `make_index` and `exact`, and pytest runs all of it."""
