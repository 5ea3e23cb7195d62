"""Tests for those who extend kvkeep, and what is needed to test those who use it.

    PolicyTests        the contract of `kvkeep.core.eviction.base`; subclass it with your policy
    BackendTests       the contract of `kvkeep.store.backends.base`; subclass it with your backend
    CountingBackend    a backend around another that counts the calls
    FaultyBackend      the same, failing, hanging, slow or lying on demand
    FaultProxy         a TCP proxy that refuses, hangs, cuts, slows and garbles on demand
    NaiveCache         what a cache stores, as whole token lists: the model to compare with
    TaggedPages        an engine's KV memory in which every slot knows what was written to it
    strategies         hypothesis strategies: prompts that share prefixes, tokens in every form

A new policy is tested by this:

    from kvkeep.testing import PolicyTests

    class TestMyPolicy(PolicyTests):
        def make_policy(self):
            return MyPolicy()

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
    from kvkeep.testing.faulty import CountingBackend, FaultyBackend
    from kvkeep.testing.memory import TaggedPages
    from kvkeep.testing.naive import NaiveCache
    from kvkeep.testing.policy_suite import PolicyTests
    from kvkeep.testing.proxy import FaultProxy

__all__ = [
    "BackendTests",
    "CountingBackend",
    "FaultProxy",
    "FaultyBackend",
    "NaiveCache",
    "PolicyTests",
    "TaggedPages",
    "strategies",
]

_HOMES = {
    "BackendTests": "kvkeep.testing.backend_suite",
    "CountingBackend": "kvkeep.testing.faulty",
    "FaultProxy": "kvkeep.testing.proxy",
    "FaultyBackend": "kvkeep.testing.faulty",
    "NaiveCache": "kvkeep.testing.naive",
    "PolicyTests": "kvkeep.testing.policy_suite",
    "TaggedPages": "kvkeep.testing.memory",
}
_ASSERTING = (
    "backend_hooks", "backend_suite", "backend_threads", "backend_walk", "policy_suite",
    "naive",
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
