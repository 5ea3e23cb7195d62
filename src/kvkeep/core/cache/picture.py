"""Nodes of a `CacheMap`, from the survey of a tree: those shown, and those summed up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.cache.views import MapNode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.cache.blocks import Blocks
    from kvkeep.core.prefix.walk import Numbers, Survey
    from kvkeep.core.tokens import TokenArray

    Head = tuple[TokenArray | None, bytes]

__all__ = ["hidden_nodes", "shown_nodes"]

_HIDDEN = 1 << 52
"""Ids of hidden nodes are below minus this; JSON readers know integers up to 2**53."""


def shown_nodes(
    survey: Survey,
    rows: Numbers,
    heads: Sequence[Head],
    blocks: Sequence[Blocks | None],
    *,
    bare: bool,
    size: int,
) -> list[MapNode]:
    """Return a node for each of ``rows``; with ``bare``, the namespace's own is left out.

    ``size`` is that of a page.
    With each row, ``rows`` has the row above it. Rows without parent are tops.
    """
    ids = survey.ids
    above = survey.parents[rows]
    nodes: list[MapNode] = []
    columns: tuple[Any, ...] = (
        rows, ids[rows], np.append(ids, 0)[above], above, survey.sizes[rows],
        survey.below_pages[rows], survey.below_runs[rows], survey.holders[rows],
        survey.pins[rows], survey.below_uses[rows],
        survey.group_pages[rows], survey.below_groups[rows],
    )  # fmt: skip
    points = survey.points
    numbers = zip(*(column.tolist() for column in columns), strict=True)
    each = zip(numbers, heads, blocks, strict=True)
    for (row, own, parent, place, *counts), (head, key), ended in each:
        if bare and own < 0:
            continue
        pages, below_pages, below_runs, holders, pins, hits, beside, below_beside = counts
        nodes.append(
            MapNode(
                id=own,
                parent=None if place < 0 or (bare and parent < 0) else parent,
                pages=pages,
                below_pages=below_pages,
                below_runs=below_runs,
                holders=holders,
                pins=pins,
                hits=hits,
                head=head,
                key=key,
                namespace=survey.namespace(row),
                blocks=ended,
                group_pages=beside,
                below_group_pages=below_beside,
                checkpoints=() if points is None else tuple(page * size for page in points[row]),
            )
        )
    return nodes


def hidden_nodes(survey: Survey, rows: Numbers, *, bare: bool) -> list[MapNode]:
    """Return a hidden node for each of ``rows`` (and the top) with children that are not shown."""
    parents = survey.parents
    shown = np.zeros(len(parents) + 1, np.bool_)
    shown[rows] = shown[-1] = True  # the last stands for "no parent"
    hidden = np.flatnonzero(~shown[:-1] & shown[parents] & ~survey.gone)
    above, groups = np.unique(parents[hidden], return_inverse=True)

    def sums(column: Numbers) -> list[int]:
        totals = np.zeros(len(above), np.int64)
        np.add.at(totals, groups, column[hidden])
        return totals.tolist()

    ids = survey.ids
    pages, runs = sums(survey.below_pages), sums(survey.below_runs)
    beside = sums(survey.below_groups)
    columns = sums(survey.holders), sums(survey.pins), sums(survey.below_uses)
    counts = np.bincount(groups, minlength=len(above)).tolist()
    return [
        MapNode(
            id=-_HIDDEN - (abs(int(ids[place])) if place >= 0 else 0),
            parent=None if place < 0 or (bare and ids[place] < 0) else int(ids[place]),
            pages=pages[i],
            below_pages=pages[i],
            below_runs=runs[i],
            holders=columns[0][i],
            pins=columns[1][i],
            hits=columns[2][i],
            count=counts[i],
            group_pages=beside[i],
            below_group_pages=beside[i],
        )
        for i, place in enumerate(above.tolist())
    ]
