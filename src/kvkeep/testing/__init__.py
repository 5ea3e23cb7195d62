"""Test suites for plug-ins, to be subclassed by their authors.

    BackendTests       the contract of `kvkeep.store.backends.base`
    PolicyTests        the contract of `kvkeep.core.prefix.policy`

A new policy is tested by this, and a new backend likewise:

    from kvkeep.testing import PolicyTests

    class TestMyPolicy(PolicyTests):
        def make_policy(self):
            return MyPolicy()

Suites need pytest and hypothesis (``pip install 'kvkeep[testing]'``), which are imported with the
first suite.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from kvkeep.core.errors import require

if TYPE_CHECKING:
    from kvkeep.testing.backend_suite import BackendTests
    from kvkeep.testing.policy_suite import PolicyTests

__all__ = ["BackendTests", "PolicyTests"]

_HOMES = {
    "BackendTests": "kvkeep.testing.backend_suite",
    "PolicyTests": "kvkeep.testing.policy_suite",
}
_ASSERTING = (
    "backend_hooks", "backend_suite", "backend_threads", "backend_walk", "policy_suite",
)  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    pytest = require("pytest", "testing")
    require("hypothesis", "testing")
    # pytest rewrites asserts, to show values, in test files only; suites must be registered.
    new = [f"{__name__}.{module}" for module in _ASSERTING]
    pytest.register_assert_rewrite(*(module for module in new if module not in sys.modules))
    return getattr(importlib.import_module(_HOMES[name]), name)
