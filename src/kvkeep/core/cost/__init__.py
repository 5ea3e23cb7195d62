"""What computing and moving KV take, in seconds: measured, learned online, and compared.

PrefillCost, TransferCost        the formulas, as values
LearnedPrefill, LearnedTransfer  learn them from what happens
CostModel, CostFile              all of an engine and its store, in one place and one file
best_prefix                      decides how much to load
"""

from __future__ import annotations

from kvkeep.core.cost.fit import OnlineFit
from kvkeep.core.cost.model import CostFile, CostModel
from kvkeep.core.cost.prefill import (
    LearnedPrefill,
    OtherCostVersion,
    PrefillCost,
    PrefixChoice,
    best_prefix,
)
from kvkeep.core.cost.transfer import LearnedTransfer, TransferCost

__all__ = [
    "CostFile",
    "CostModel",
    "LearnedPrefill",
    "LearnedTransfer",
    "OnlineFit",
    "OtherCostVersion",
    "PrefillCost",
    "PrefixChoice",
    "TransferCost",
    "best_prefix",
]
