"""Groups of layers beside those that keep every token: windows, chunks, and states.

A page of a plain model holds every layer's KV of some tokens. In a hybrid model only some layers
keep every token: these are the *base pages*, which the prefix tree stores. Layers with a window
keep a *row* for each page of tokens that is still attended to. Layers with a state keep one state a
sequence, whatever its length; copies of it at some positions are *checkpoints*, and only there can
a later request resume. Rows and states take pages of the same pool: several each, which need not be
neighbours. So all groups share one budget, no split between them is fixed, and nothing is padded by
more than a page.

    plan.py         GroupLayout: sizes in pages; GroupPlan: from a model's geometry, in bytes
    tensors.py      GroupedTensors: the memory
    checkpoints.py  GroupBoard: rows and checkpoints of the tree, and what goes first for room
    sequence.py     SequenceGroups: rows and state of one sequence, its passes and copies
"""

from __future__ import annotations

from kvkeep.core.groups.checkpoints import GroupBoard, GroupStats
from kvkeep.core.groups.plan import GroupLayout, GroupPlan, LayerPart, StateSpec, WindowSpec
from kvkeep.core.groups.sequence import RowCopy, SequenceGroups, StateCopy

__all__ = [
    "GroupBoard",
    "GroupLayout",
    "GroupPlan",
    "GroupStats",
    "LayerPart",
    "RowCopy",
    "SequenceGroups",
    "StateCopy",
    "StateSpec",
    "WindowSpec",
]
