"""Groups of layers beside those that keep every token: windows, chunks, and states.

A page of a plain model holds every layer's KV of some tokens. In a hybrid model only some layers
keep every token: these are the *base pages*, which the prefix tree stores. Layers with a window
keep a *row* for each page of tokens that is still attended to. Layers with a state keep one state a
sequence, whatever its length; copies of it at some positions are *checkpoints*, and only there can
a later request resume. Rows and states take pages of the same pool: several each, which need not be
neighbours. So all groups share one budget, no split between them is fixed, and nothing is padded by
more than a page.

    plan.py       GroupPlan: sizes and places, from a model's geometry
    tensors.py    GroupedTensors: the memory
    tables.py     SequenceGroups: one sequence; of that, rows.py has its rows, copies.py copies that
                  wait, and its mark and checkpoints
    board.py      GroupBoard: rows and checkpoints of the whole tree, and their recount; stored.py
                  rows by base page, units.py references, what goes first, what pins keep
"""

from __future__ import annotations

from kvkeep.core.groups.board import GroupBoard, GroupStats
from kvkeep.core.groups.copies import RowCopy, StateCopy
from kvkeep.core.groups.plan import GroupPlan, LayerPlace
from kvkeep.core.groups.tables import SequenceGroups
from kvkeep.core.pages.layout import GroupLayout, StateSpec, WindowSpec

__all__ = [
    "GroupBoard",
    "GroupLayout",
    "GroupPlan",
    "GroupStats",
    "LayerPlace",
    "RowCopy",
    "SequenceGroups",
    "StateCopy",
    "StateSpec",
    "WindowSpec",
]
