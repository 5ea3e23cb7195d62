"""Asserts in the modules of the contract suite show their values, as those of test files do."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "prefix_driver", "prefix_finding", "prefix_forgetting", "prefix_holding", "prefix_pins",
    "prefix_walk",
)  # fmt: skip
