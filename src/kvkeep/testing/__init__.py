"""Tests for those who extend kvkeep, and what is needed to test those who use it.

    PrefixIndexTests   the contract of `kvkeep.core.prefix.base`; subclass it with your index
    PolicyTests        the contract of `kvkeep.core.eviction.base`; subclass it with your policy
    BackendTests       the contract of `kvkeep.store.backends.base`; subclass it with your backend
    NaiveCache         what a cache stores, as whole token lists: the model to compare with
    TaggedPages        an engine's KV memory in which every slot knows what was written to it
    strategies         hypothesis strategies: prompts that share prefixes, tokens in every form

A new index is tested by this, and a new policy likewise:

    from kvkeep.testing import PrefixIndexTests

    class TestMyIndex(PrefixIndexTests):
        exact = True  # finds pages that match only in part

        def make_index(self, page_size, policy):
            return MyIndex(page_size, policy)

The suites need pytest and hypothesis (``pip install 'kvkeep[testing]'``), which are imported when a
suite is asked for.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from kvkeep.core.errors import require

if TYPE_CHECKING:
    from kvkeep.testing import strategies
    from kvkeep.testing.backend_suite import BackendTests
    from kvkeep.testing.memory import TaggedPages
    from kvkeep.testing.naive import NaiveCache
    from kvkeep.testing.policy_suite import PolicyTests
    from kvkeep.testing.prefix_suite import PrefixIndexTests

__all__ = [
    "BackendTests",
    "NaiveCache",
    "PolicyTests",
    "PrefixIndexTests",
    "TaggedPages",
    "strategies",
]

_HOMES = {
    "BackendTests": "kvkeep.testing.backend_suite",
    "NaiveCache": "kvkeep.testing.naive",
    "PolicyTests": "kvkeep.testing.policy_suite",
    "PrefixIndexTests": "kvkeep.testing.prefix_suite",
    "TaggedPages": "kvkeep.testing.memory",
}
_ASSERTING = (
    "backend_hooks", "backend_suite", "backend_threads", "backend_walk", "policy_suite",
    "prefix_driver", "prefix_finding", "prefix_forgetting", "prefix_holding",
    "prefix_pins", "prefix_walk", "naive",
)  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "strategies":
        require("hypothesis", "testing")
        return importlib.import_module("kvkeep.testing.strategies")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name.endswith("Tests"):
        pytest = require("pytest", "testing")
        require("hypothesis", "testing")
        # Suites are not test files: without this a failing assert would not show its values.
        new = [f"{__name__}.{module}" for module in _ASSERTING]
        pytest.register_assert_rewrite(*(module for module in new if module not in sys.modules))
    return getattr(importlib.import_module(_HOMES[name]), name)
