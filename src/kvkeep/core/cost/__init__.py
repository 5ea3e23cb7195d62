"""What computing and moving KV take, in seconds: measured, learned online, and compared.

PrefillCost, TransferCost        the formulas, as values
LearnedPrefill, LearnedTransfer  learn them from what happens
CostModel, CostFile              all of an engine and its store, in one place and one file
meet, best_prefix                decide what to load and what to compute
Overlap, take_turns              do both at once, of several prompts
"""

from __future__ import annotations

from kvkeep.core.cost.files import OtherCostVersion
from kvkeep.core.cost.fit import OnlineFit
from kvkeep.core.cost.meeting import (
    LEAST_GAIN,
    LoadablePrompt,
    Meeting,
    PrefixChoice,
    best_prefix,
    meet,
)
from kvkeep.core.cost.model import CostModel
from kvkeep.core.cost.overlap import Overlap
from kvkeep.core.cost.prefill import LearnedPrefill, PrefillCost
from kvkeep.core.cost.saved import CostFile
from kvkeep.core.cost.transfer import LearnedTransfer, TransferCost
from kvkeep.core.cost.turns import LoadProgress, PromptTurn, take_turns

__all__ = [
    "LEAST_GAIN",
    "CostFile",
    "CostModel",
    "LearnedPrefill",
    "LearnedTransfer",
    "LoadProgress",
    "LoadablePrompt",
    "Meeting",
    "OnlineFit",
    "OtherCostVersion",
    "Overlap",
    "PrefillCost",
    "PrefixChoice",
    "PromptTurn",
    "TransferCost",
    "best_prefix",
    "meet",
    "take_turns",
]
