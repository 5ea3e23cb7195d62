"""`PrefixIndexTests`: the contract of `Tree`, a test for each sentence."""

from __future__ import annotations

from prefix_finding import FindingTests
from prefix_forgetting import ForgettingTests
from prefix_holding import HoldingTests
from prefix_walk import WalkTests

__all__ = ["PrefixIndexTests"]


class PrefixIndexTests(FindingTests, HoldingTests, ForgettingTests, WalkTests):
    """Subclass it, fill in `make_index` and `exact`, and pytest runs all of it."""
