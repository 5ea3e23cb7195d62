"""A check at load time that a model computes the same over pages as by itself.

Two sequences run over pages, first the beginnings of both, then the rest with the KV in the pages;
their logits are compared with the model's own. One begins with a long piece and ends with a short
one, the other the other way round, so that every way to attend runs, cold and continued. It takes
between a few milliseconds and a second, and finds what no list of architectures could: a model that
takes positions from elsewhere, adds a term to its attention, shares KV between layers, or mixes
neighbouring tokens.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvkeep.core.errors import IllegalStep, KVKeepError, UnsupportedModel
from kvkeep.core.pages.tensors import PagedTensors
from kvkeep.serve.engine import loading
from kvkeep.serve.engine.attention.batch import PagedBatch, Piece
from kvkeep.serve.engine.attention.hook import ATTENTION, register
from kvkeep.serve.engine.attention.short import SHORT

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    from transformers import PreTrainedModel

    from kvkeep.core.geometry import KVGeometry
    from kvkeep.serve.engine.attention.dense import Scoring

__all__ = ["prove"]

# Relative to the largest logit. Half precision rounds differently in every order of summation; the
# error of a wrong mask or position is far larger.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
_FIRST = SHORT + 1  # tokens of the first sequence in the first pass
_REST = 2  # and in the second pass; the other sequence has them the other way round
_TOKENS = _FIRST + _REST
_PAGE_SIZE = 4


def prove(model: PreTrainedModel, geometry: KVGeometry) -> None:
    """Switch ``model`` to attention over pages; raise `UnsupportedModel` if its results change.

    Also raised if its K and V have other shapes, or its windows other sizes, than ``geometry``
    says.
    """
    name = type(model).__name__
    tokens = np.arange(1, 2 * _TOKENS + 1, dtype=np.int32) * 7919 % loading.vocabulary(model)
    sequences = tokens.reshape(2, _TOKENS)
    with _translated(f"{name} cannot be run"):
        expected = _by_itself(model, sequences)
    register()
    with _translated(f"{name} does not let its attention be replaced"):
        model.set_attn_implementation(ATTENTION)
    if model.config.get_text_config()._attn_implementation != ATTENTION:
        raise UnsupportedModel(f"{name} does not let its attention be replaced")
    try:
        with _translated(f"{name} cannot be run over pages"):
            logits = _over_pages(model, sequences, geometry)
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


def _by_itself(model: PreTrainedModel, sequences: npt.NDArray[np.int32]) -> torch.Tensor:
    ids = torch.from_numpy(sequences).long().to(model.device)
    with torch.inference_mode():
        rows = [model(input_ids=one[None], use_cache=False).logits[0] for one in ids]
    return torch.cat(rows).float()


def _over_pages(
    model: PreTrainedModel, sequences: npt.NDArray[np.int32], geometry: KVGeometry
) -> torch.Tensor:
    one, two = sequences
    first, rest = _FIRST, _REST
    num_pages = -(-_TOKENS // _PAGE_SIZE)
    tensors = PagedTensors(geometry, 2 * num_pages, _PAGE_SIZE, device=model.device)
    # Page tables that are neither in order nor contiguous.
    table, other = np.arange(2 * num_pages, dtype=np.int32)[::-1].reshape(-1, 2).T
    begun = _Recorder(
        [Piece(one[:first], 0, table, first), Piece(two[:rest], 0, other, rest)], tensors
    )
    ended = _Recorder(
        [Piece(one[first:], first, table, rest), Piece(two[rest:], rest, other, first)], tensors
    )
    begin, end = (batch.run(model).float() for batch in (begun, ended))
    for batch in (begun, ended):
        if batch.windows != list(geometry.windows):
            raise UnsupportedModel(
                f"{type(model).__name__} attends with windows {batch.windows}, layer by layer, and "
                f"its geometry says {list(geometry.windows)}"
            )
    return torch.cat((begin[:first], end[:rest], begin[first:], end[rest:]))


class _Recorder(PagedBatch):
    """A batch that checks the shapes of each layer's K and V, and records its window."""

    def __init__(self, pieces: list[Piece], tensors: PagedTensors) -> None:
        super().__init__(pieces, tensors)
        self.windows: list[int | None] = []

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        window: int | None,
        scoring: Scoring,
    ) -> torch.Tensor:
        geometry = self.tensors.geometry
        stored = [geometry.kv_heads, geometry.head_dim, geometry.kv_heads, geometry.value_dim]
        given = [*key.shape[1:], *value.shape[1:]]
        if layer != len(self.windows) or layer >= geometry.layers or given != stored:
            raise UnsupportedModel(
                f"layer {layer} brings K and V of heads × width {given}, as number "
                f"{len(self.windows)} to do so; the geometry has {geometry.layers} of {stored}"
            )
        self.windows.append(window)
        return super().attend(layer, query, key, value, window=window, scoring=scoring)
