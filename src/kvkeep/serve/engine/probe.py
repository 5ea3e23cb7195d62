"""A check at load time that a model computes the same over pages as by itself.

First `survey` finds what each layer keeps, and `prove_resuming` shows that layers with a state
continue from it. Then two sequences run over pages, first the beginnings of both, then the rest
with what is in the pages; their logits are compared with the model's own. One begins with a long
piece and goes on with a short one, the other the other way round, so that every way to attend runs,
cold and continued. It takes between a few milliseconds and a second, and finds what no list of
architectures could: a model that takes positions from elsewhere, adds a term to its attention,
shares KV between layers, or mixes neighbouring tokens.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from kvkeep.core.errors import IllegalStep, KVKeepError, UnsupportedModel
from kvkeep.core.groups import GroupPlan, StateCopy
from kvkeep.core.groups.tensors import GroupedTensors
from kvkeep.core.pages.tensors import PagedTensors
from kvkeep.serve.engine import loading
from kvkeep.serve.engine.attention.batch import (
    ATTENTION,
    PagedBatch,
    Piece,
    register,
    switch_attention,
)
from kvkeep.serve.engine.attention.memory import KVMemory
from kvkeep.serve.engine.attention.plan import SHORT
from kvkeep.serve.engine.model.survey import survey
from kvkeep.serve.engine.model.wrapped import MixerCache, WrappedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    from transformers import PreTrainedModel

    from kvkeep.core.geometry import KVGeometry, StateTensor
    from kvkeep.core.groups import GroupLayout
    from kvkeep.serve.engine.model.survey import CacheUser, ModelSurvey

    IntArray = npt.NDArray[np.int32]

__all__ = ["Proved", "prove", "prove_resuming"]

# Where pieces end: off the grids of kernels, shorter than a convolution, and tokens one by one.
_CUTS: Final = (0, 18, 67, 69, 70, 71, 72, 140)
# Of the largest output. Modules that continue are apart by 1e-5 at most, others by 1e-2 and more.
_STATE_TOLERANCE: Final = 1e-3


def prove_resuming(name: str, survey: ModelSurvey, geometry: KVGeometry) -> None:
    """Compute tokens in pieces and at once, in one module of each kind, and compare.

    In float32, whatever the model's type: half precision would hide a small difference.

    Raises:
        UnsupportedModel: the outputs of the model ``name`` differ.
    """
    shown: set[type] = set()
    for group in geometry.groups:
        for layer in group.layers if group.state else ():
            user = survey.mixers[layer]
            if type(user.module) in shown:
                continue
            shown.add(type(user.module))
            if (apart := _apart(user, group.state)) > _STATE_TOLERANCE:
                raise UnsupportedModel(
                    f"{name} cannot go on from a state: in pieces, layer {layer} "
                    f"({type(user.module).__name__}) computes other values than at once (apart by "
                    f"{apart:.1%}), so no prefix of it can be reused"
                )


def _apart(user: CacheUser, state: tuple[StateTensor, ...]) -> float:
    """Return how far outputs are apart, relative to the largest."""
    weights = next(user.module.parameters())
    if weights.dtype != torch.float32:
        user = replace(user, module=copy.deepcopy(user.module).float())
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _CUTS[-1], user.width, generator=random).to(weights.device)
    tensors = {one.name: torch.zeros(1, *one.shape, device=weights.device) for one in state}
    cache = MixerCache(tensors.get("conv"), tensors.get("recurrent"))
    with torch.inference_mode():
        whole = _output(user, hidden, None)
        pieces = [_output(user, hidden[:, start:stop], cache) for start, stop in pairwise(_CUTS)]
    return float((torch.cat(pieces, 1) - whole).abs().max() / whole.abs().max())


def _output(user: CacheUser, hidden: torch.Tensor, cache: MixerCache | None) -> torch.Tensor:
    out = user.module(hidden, **{user.name: cache})
    return (out if isinstance(out, torch.Tensor) else out[0]).float()


# Relative to the largest logit. Half precision rounds differently in every order of summation; the
# error of a wrong mask or position is far larger.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
_PAGE_SIZE = 4
_LONG = SHORT + 1
_SINGLE = 3  # tokens that are computed one by one: more than may go to other experts
_LARGEST_WINDOW = 64  # tokens; larger ones are not left, but the survey shows their size


class Proved(NamedTuple):
    """A model that computes the same over pages, and what its modules do."""

    model: WrappedModel
    survey: ModelSurvey


def prove(model: PreTrainedModel, geometry: KVGeometry) -> Proved:
    """Switch ``model`` to attention and states in pages; raise `UnsupportedModel` if it changes.

    Also raised if its K and V have other shapes, or its windows other sizes, than ``geometry``
    says, and if a layer does not continue from its state.
    """
    name = type(model).__name__
    plan = GroupPlan(geometry, _PAGE_SIZE)
    cuts = _cuts(plan.layout)
    length = cuts[0][-1]
    tokens = np.arange(1, 2 * length + 1, dtype=np.int32) * 7919 % loading.vocabulary(model)
    sequences = tokens.reshape(2, length)
    with _translated(f"{name} cannot be run"):
        expected = _by_itself(model, sequences)
    with _translated(f"{name} cannot be run with a cache"):
        found = survey(model, geometry)
        prove_resuming(name, found, geometry)
    attends = any(group.shape is not None for group in geometry.groups)
    register()
    with _translated(f"{name} does not let its attention be replaced"):
        if attends:
            switch_attention(model, ATTENTION)
    wrapped = WrappedModel(model, found)
    try:
        with _translated(f"{name} cannot be run over pages"):
            logits = _OverPages(wrapped, found, plan, device=model.device).run(sequences, cuts)
    except IllegalStep as error:
        raise UnsupportedModel(f"{name} does not hand keywords on to its attention") from error
    apart = (expected - logits).abs().amax(-1) / expected.abs().amax(-1)
    close = (apart <= _TOLERANCE[model.dtype]).sum().item()
    # A rounding error may send a token or two to another expert.
    if close < len(apart) - 2:
        raise UnsupportedModel(
            f"{name} gives other logits over pages than by itself (apart by {apart.max():.1%}): "
            "it needs more than causal attention with K and V of each token"
        )
    return Proved(wrapped, found)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Raise errors of the model's own code as `UnsupportedModel`; kvkeep's errors pass through.

    Any model's code runs here, and may raise anything for arguments that it does not know.
    """
    try:
        yield
    except KVKeepError:
        raise
    except (
        ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError,
        ValueError,
    ) as error:  # fmt: skip
        line = (str(error).strip().splitlines() or [""])[0]
        raise UnsupportedModel(f"{what}: {type(error).__name__}: {line}") from error


def _cuts(layout: GroupLayout | None) -> tuple[list[int], list[int]]:
    """Return where the pieces of both sequences end, pass by pass."""
    if layout is None:
        return [_LONG, _LONG + 2], [2, _LONG + 2]
    # Past those windows that are quick to leave.
    spans = [window.span for window in layout.windows if window.span <= _LARGEST_WINDOW]
    length = max(spans, default=0) + _LONG + 2 * _PAGE_SIZE
    # Then tokens one by one, both sequences in one pass.
    before = length - _SINGLE
    single = range(before + 1, length + 1)
    return [before - 3, before, *single], [2, before, *single]


def _by_itself(model: PreTrainedModel, sequences: IntArray) -> torch.Tensor:
    ids = torch.from_numpy(sequences).long().to(model.device)
    with torch.inference_mode():
        rows = [model(input_ids=one[None], use_cache=False).logits[0] for one in ids]
    return torch.cat(rows).float()


class _OverPages:
    """Runs sequences over pages of its own, in tables that are neither in order nor contiguous."""

    def __init__(
        self, model: WrappedModel, found: ModelSurvey, plan: GroupPlan, device: torch.device
    ) -> None:
        self._model = model
        self._found = found
        self._plan = plan
        self._device = device

    def run(self, sequences: IntArray, cuts: tuple[list[int], list[int]]) -> torch.Tensor:
        """Return the logits of all tokens, sequence after sequence."""
        tables = self._tables(len(sequences), sequences.shape[1])
        memory, groups = self._memory()
        logits: list[list[torch.Tensor]] = [[] for _ in sequences]
        starts = [0] * len(sequences)
        for number, stops in enumerate(zip(*cuts, strict=True)):
            if groups is not None and number == len(cuts[0]) - _SINGLE:
                tables[0] = self._moved(tables[0], groups)
            pieces = [
                table.piece(tokens[start:stop], start, self._plan.layout)
                for table, tokens, start, stop in zip(tables, sequences, starts, stops, strict=True)
            ]
            made = self._model.run(PagedBatch(pieces, memory), groups).float()
            parts = made.tensor_split(
                np.cumsum([len(piece.tokens) for piece in pieces])[:-1].tolist()
            )
            for rows, part in zip(logits, parts, strict=True):
                rows.append(part)
            starts = list(stops)
        return torch.cat([torch.cat(rows) for rows in logits])

    def _tables(self, sequences: int, tokens: int) -> list[_Table]:
        pages, layout = -(-tokens // _PAGE_SIZE), self._plan.layout
        shapes: list[tuple[int, ...]] = [(pages,)]
        if layout is not None:
            shapes += [(pages, width) for width in layout.widths]
            shapes.append((layout.state_pages,))
        sizes = [int(np.prod(shape)) for shape in shapes]
        spare = 0 if layout is None else layout.state_pages
        self._num_pages = sequences * sum(sizes) + spare
        ids = np.arange(self._num_pages, dtype=np.int32)[::-1]
        self._spare, ids = ids[:spare], ids[spare:]
        tables = []
        for mine in ids.reshape(-1, sequences).T:
            base, *rows = (
                part.reshape(shape)
                for part, shape in zip(np.split(mine, np.cumsum(sizes)[:-1]), shapes, strict=True)
            )
            state = rows.pop() if layout is not None and layout.state is not None else None
            windows = () if layout is None else tuple(rows[: len(layout.windows)])
            tables.append(_Table(base, windows, state))
        return tables

    def _memory(self) -> tuple[KVMemory, GroupedTensors | None]:
        plan, found = self._plan, self._found
        if plan.layout is None:
            tensors = PagedTensors(plan.geometry, self._num_pages, _PAGE_SIZE, device=self._device)
            return KVMemory.plain(tensors, shared=found.shared, latent=found.latent), None
        groups = GroupedTensors(plan, self._num_pages, self._device)
        return KVMemory.grouped(groups, shared=found.shared, latent=found.latent), groups

    def _moved(self, table: _Table, groups: GroupedTensors) -> _Table:
        """Return ``table`` with its state in other pages."""
        if table.state is None:
            return table
        groups.copy([StateCopy(table.state, self._spare)])
        return table._replace(state=self._spare)


class _Table(NamedTuple):
    """The pages of one sequence."""

    base: IntArray
    rows: tuple[IntArray, ...]
    state: IntArray | None

    def piece(self, tokens: IntArray, start: int, layout: GroupLayout | None) -> Piece:
        """Return a piece that begins at ``start``, without the rows that it does not need."""
        rows = []
        for window, table in zip(() if layout is None else layout.windows, self.rows, strict=True):
            kept = table.copy()
            kept[: window.first_needed(start, _PAGE_SIZE)] = -1
            rows.append(kept)
        return Piece(tokens, start, self.base, len(tokens), tuple(rows), self.state)
