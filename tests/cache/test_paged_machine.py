"""Engines' whole repertoire against `PagedCache`, checked after every step by the slow model.

``KVKEEP_FUZZ=long`` runs fifty times as many examples.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from paged_machine import ChainMachine, RadixMachine

SETTINGS = settings(
    max_examples=150 * (50 if os.environ.get("KVKEEP_FUZZ") == "long" else 1),
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = SETTINGS
TestChainMachine = ChainMachine.TestCase
TestChainMachine.settings = SETTINGS
