"""`prove`: whether a model goes on from a snapshot as if it had never stopped, tried on itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from kvkeep.core.errors import UnsupportedModel
from kvkeep.integrations.transformers_model import one_pass
from kvkeep.store.kv.records import RecordForms

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

    from kvkeep.core.geometry import KVGeometry
    from kvkeep.integrations.transformers_layers import CacheLayers
    from kvkeep.store import Snapshot

__all__ = ["prove"]

_TOKENS: Final = 24
_CUT: Final = 13
"""Off every grid: a model that is only nearly right there is told from one that is wrong."""
_TOLERANCE: Final = {torch.float32: 5e-3, torch.float64: 5e-3}
_COARSE: Final = 0.1  # of types of 16 bits
"""Largest difference, of the largest number in a tensor. A model that ignores a state is off by
about as much as the state is.
"""


def prove(model: PreTrainedModel, geometry: KVGeometry, caches: CacheLayers) -> None:
    """Raise `UnsupportedModel` unless ``model`` resumes from snapshots.

    Two texts of a few tokens are computed as a whole, and in two passes with a snapshot between
    them. All that the cache holds at the end, and the last logits, must agree. Cost: four passes
    over 24 tokens at most.
    """
    name = type(model).__name__
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = (torch.arange(1, _TOKENS + 1)[None] * 7919) % vocabulary
    try:
        whole, logits = _computed(model, caches.empty(recording=True), ids, 0)
        first, _ = _computed(model, caches.empty(recording=True), ids[:, :_CUT], 0)
        snapshot = caches.snapshot(first, _CUT)
        assert snapshot is not None
        _check_shapes(geometry, snapshot)
        second, resumed = _computed(model, caches.resumed(snapshot), ids, _CUT)
        want, got = (caches.snapshot(one, _TOKENS) for one in (whole, second))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedModel(
            f"{name} cannot go on from a cache that was filled from a snapshot, as a trial of "
            f"{_TOKENS} tokens shows: {type(error).__name__}: {error}"
        ) from error
    assert want is not None
    assert got is not None
    tolerance = _TOLERANCE.get(model.dtype, _COARSE)
    for what, left, right in [*_pairs(want, got), ("the logits", logits, resumed)]:
        off = _difference(left, right)
        if not off <= tolerance:  # also NaN
            raise UnsupportedModel(
                f"{name} does not go on exactly from a snapshot: in a trial of {_TOKENS} tokens, "
                f"resumed behind {_CUT}, {what} is off by {off:.2g} of its largest number, and "
                f"at most {tolerance:g} is rounding. Its prompts can only be computed whole"
            )


def _computed(
    model: PreTrainedModel, cache: Cache, ids: torch.Tensor, start: int
) -> tuple[Cache, torch.Tensor]:
    """Compute tokens from ``start`` on; return the cache and the last logits."""
    stop = ids.shape[1]
    mask, positions = torch.ones((1, stop), dtype=torch.long), torch.arange(start, stop)[None]
    logits = one_pass(model, cache, ids[:, start:], mask, positions)
    return cache, logits[:, -1]


def _check_shapes(geometry: KVGeometry, snapshot: Snapshot) -> None:
    """Raise `InvalidValue` if the model caches other tensors than its configuration says."""
    forms = RecordForms(geometry, "HND")
    for records in [forms.base, *forms.windows]:
        if records is not None:
            records.tokens_of(snapshot.layers)
    if forms.states is not None:
        forms.states.check(snapshot.state)


def _pairs(want: Snapshot, got: Snapshot) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    found = []
    for layer, parts in want.layers.items():
        for both in zip(parts, got.layers[layer], strict=True):
            count = min(part.shape[-2] for part in both)  # windows may have more in one
            left, right = (part[..., part.shape[-2] - count :, :] for part in both)
            found.append((f"the KV of layer {layer}", left, right))
    found += [
        (f"the {name} state of layer {layer}", state, got.state[layer, name])
        for (layer, name), state in want.state.items()
    ]
    return found


def _difference(want: torch.Tensor, got: torch.Tensor) -> float:
    if not want.numel():
        return 0.0
    largest = float(want.abs().max().float())
    error = float((want.float() - got.float()).abs().max())
    return error / largest if largest else error
