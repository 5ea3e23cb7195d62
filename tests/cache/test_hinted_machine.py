"""All that engines do to a `PagedCache`, with sessions and hints in between.

``KVKEEP_FUZZ=long`` runs forty times as many examples.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from paged_hints import HintedChainMachine, HintedRadixMachine

SETTINGS = settings(
    max_examples=60 * (40 if os.environ.get("KVKEEP_FUZZ") == "long" else 1),
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

TestHintedRadixMachine = HintedRadixMachine.TestCase
TestHintedRadixMachine.settings = SETTINGS
TestHintedChainMachine = HintedChainMachine.TestCase
TestHintedChainMachine.settings = SETTINGS
