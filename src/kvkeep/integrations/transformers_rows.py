"""Rows of a batch: their texts, their common prefixes, and the passes that compute them.

A batch is as in ``generate``: ``ids[row, column]``, padded on the left, and the cache has the same
columns. Pads belong to no prefix: the KV of a row is looked up and stored by its text alone, since
positions count from its first token.

    column   0 1 2 3 4 5 6 7 8 9        stored of it
    row 0    . . . a a a a a b b        a a a a a      level 8: known up to this column
    row 1    a a a a a c c c c c        a a a          level 3
    row 2    . . . . . . d d d d                       level 6: pads need no computing
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from kvkeep.core.errors import InvalidValue
from kvkeep.core.tokens import as_tokens, common_length

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.tokens import TokenArray

__all__ = [
    "PASS_TOKENS",
    "Pass",
    "Rows",
    "SharedRows",
    "passes",
    "rows_of",
    "shared_prefixes",
    "tensor_of",
]

PASS_TOKENS: Final = 64
"""Fixed cost of a forward pass (reading weights, starting kernels), in tokens."""


class Rows(NamedTuple):
    """The texts of a batch, and their columns.

    ``ids``, ``mask`` and ``positions`` are [rows, columns] on the CPU, as `generate` makes them;
    ``texts`` are the rows without their ``pads``.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    texts: tuple[TokenArray, ...]
    pads: tuple[int, ...]

    @property
    def columns(self) -> int:
        """Columns of the batch: tokens of its longest text, and pads that all rows have."""
        return int(self.ids.shape[1])

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(map(len, self.texts))


def rows_of(input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Rows:
    """Return the rows of ``input_ids``, [rows, tokens] or [tokens]; no mask: all is text.

    Raises:
        InvalidValue: no tensor, a wrong shape, a row without text, or pads that are not on the
            left.
    """
    ids = tensor_of(input_ids, "input_ids").detach().cpu()
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or not ids.numel():
        raise InvalidValue(
            f"input_ids are shaped {tuple(input_ids.shape)}; [rows, tokens] is needed, with at "
            "least one token"
        )
    if attention_mask is None:
        mask = torch.ones_like(ids)
    else:
        mask = tensor_of(attention_mask, "attention_mask").detach().cpu()
        mask = mask[None] if mask.ndim == 1 else mask
        if mask.shape != ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
            raise InvalidValue(
                f"attention_mask is shaped {tuple(attention_mask.shape)} and input_ids "
                f"{tuple(input_ids.shape)}; it needs a 1 for each token and a 0 for each pad"
            )
        mask = mask.long()
        _check_left(mask)
    pads = tuple(int(count) for count in (mask == 0).sum(1))
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)
    texts = tuple(as_tokens(row[pad:].numpy()) for row, pad in zip(ids, pads, strict=True))
    return Rows(ids, mask, positions, texts, pads)


def tensor_of(given: object, name: str) -> torch.Tensor:
    """Return the argument ``given``, called ``name``; raise `InvalidValue` if it is no tensor."""
    if isinstance(given, torch.Tensor):
        return given
    raise InvalidValue(
        f"{name} is {type(given).__name__}; it is a tensor [rows, tokens], as a tokenizer gives it "
        "with return_tensors='pt': generate(**tokenizer(...)), or its input_ids"
    )


def _check_left(mask: torch.Tensor) -> None:
    """Raise `InvalidValue` unless each row is pads, then text."""
    for number, row in enumerate(mask):
        if not bool(row.any()):
            raise InvalidValue(f"row {number} is all padding; leave it out")
        if not row[-1]:
            raise InvalidValue(
                f"row {number} is padded on the right, where the answer begins; let the tokenizer "
                "pad on the left: padding_side='left'"
            )
        if bool((row[1:] < row[:-1]).any()):
            raise InvalidValue(
                f"row {number} has zeros of attention_mask inside its text; only pads on the left "
                "can be masked"
            )


class SharedRows(NamedTuple):
    """Some rows, and the number of their first tokens that are equal."""

    rows: tuple[int, ...]
    tokens: int


def shared_prefixes(texts: Sequence[TokenArray]) -> tuple[list[int], list[SharedRows]]:
    """Return the rows sorted by text, and the prefixes that several rows share, shortest first.

    These are the inner nodes of the tree of all rows. The last token of a row is never shared: it
    is computed for its logits. O(rows · tokens), and O(rows²) if all rows share something.
    """
    order = sorted(range(len(texts)), key=lambda row: texts[row].tobytes())
    common = [common_length(texts[left][:-1], texts[right][:-1]) for left, right in pairwise(order)]
    found: set[SharedRows] = set()
    for at, tokens in enumerate(common):
        low, high = at, at + 1
        while low and common[low - 1] >= tokens:
            low -= 1
        while high < len(common) and common[high] >= tokens:
            high += 1
        if tokens:
            found.add(SharedRows(tuple(order[low : high + 1]), tokens))
    return order, sorted(found, key=lambda shared: shared.tokens)


class Pass(NamedTuple):
    """One forward pass: columns ``start`` … ``stop - 1`` of ``rows``."""

    rows: tuple[int, ...]
    start: int
    stop: int


def passes(levels: Sequence[int], columns: int) -> list[Pass]:
    """Return the passes that compute rows, known up to ``levels``, up to ``columns``.

    Rows with less known KV begin, and others join later. A row may join earlier than necessary if
    that saves a pass: the sum of all columns computed, plus `PASS_TOKENS` for each pass, is
    minimal. O(rows²).
    """
    ordered = sorted(levels)
    starts = sorted({level for level in levels if level < columns})
    best: dict[int, tuple[int, int]] = {columns: (0, columns)}  # column → cost from there, stop
    for start in reversed(starts):
        best[start] = min(
            (PASS_TOKENS + (stop - start) * bisect_left(ordered, stop) + best[stop][0], stop)
            for stop in best
        )
    found = []
    start = starts[0] if starts else columns
    while start < columns:
        stop = best[start][1]
        rows = tuple(row for row, level in enumerate(levels) if level < stop)
        found.append(Pass(rows, start, stop))
        start = stop
    return found
