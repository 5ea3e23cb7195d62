"""A Transformers model: its shape and limits, timed passes, and the trial at load."""

from __future__ import annotations

import inspect
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from kvkeep.core.errors import UnsupportedModel, require
from kvkeep.core.geometry import KVGeometry
from kvkeep.store.kv.forms import RecordForms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import Cache, PreTrainedModel

    from kvkeep.core.cost import LearnedPrefill
    from kvkeep.integrations.transformers_caches import CacheLayers
    from kvkeep.store import Snapshot

__all__ = [
    "PassClock",
    "geometry_of",
    "needs_snapshots",
    "one_pass",
    "prove",
    "rope_limit",
    "takes_positions",
]

# Rotary embeddings that change at all positions once a text exceeds a length.
_LENGTH_DEPENDENT_ROPE: Final = {"dynamic", "longrope"}


def geometry_of(model: PreTrainedModel) -> KVGeometry:
    """Return the shape of the model's KV in Transformers' caches.

    Raises:
        UnsupportedModel: the KV of this model cannot be reused, with the reason.
    """
    transformers = require("transformers", "transformers")
    name = type(model).__name__
    if not isinstance(model, transformers.PreTrainedModel) or not model.can_generate():
        raise UnsupportedModel(
            f"a Transformers model that generates is needed, got {name}; of a wrapper, pass what "
            "it wraps"
        )
    geometry = KVGeometry.from_config(model.config, dtype=str(model.dtype))
    text = model.config.get_text_config()
    if getattr(text, "use_bidirectional_attention", None) or not getattr(text, "is_causal", True):
        raise UnsupportedModel(f"{name} attends in both directions: its KV cannot be reused")
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise UnsupportedModel(f"{name} lies on {', '.join(sorted(devices))}; one device is needed")
    return geometry


def rope_limit(model: PreTrainedModel) -> int | None:
    """Return the length from which the rotary embedding depends on the text's length, or None."""
    text = model.config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in [value for value in ropes.values() if isinstance(value, dict)] or [ropes]:
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            name = "original_max_position_embeddings"
            original = rope.get(name) or getattr(text, name, None)
            return int(original or text.max_position_embeddings)
    return None


def takes_positions(model: PreTrainedModel) -> bool:
    """Return whether the model takes positions; if not, its KV depends on padding."""
    return "position_ids" in inspect.signature(model.forward).parameters


def needs_snapshots(geometry: KVGeometry) -> bool:
    """Return whether a cache of the model holds more, or less, than K and V of every token."""
    groups = geometry.groups
    return len(groups) > 1 or groups[0].kind != "full"


@torch.no_grad()
def one_pass(
    model: PreTrainedModel,
    cache: Cache,
    ids: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Make one pass over some columns, as the chunked prefill of ``generate`` does.

    ``mask`` are all columns up to the last of ``ids``. Returns the logits of the last one at least.
    """
    named: Any = model
    settings: dict[str, Any] = {"use_cache": True}
    if takes_positions(model):
        settings["position_ids"] = positions.to(model.device)
    if named._supports_logits_to_keep():
        settings["logits_to_keep"] = 1
    inputs = named.prepare_inputs_for_generation(
        ids.to(model.device),
        past_key_values=cache,
        attention_mask=mask.to(model.device),
        is_first_iteration=True,
        **settings,
    )
    logits: torch.Tensor = named(**inputs, return_dict=True).logits
    return logits


class PassClock:
    """Times the passes of ``model`` over more than one token a row, and tells ``prefill``.

    On a GPU it waits for the end of each pass, which is when its KV is used.

    Thread safety: none, as the model.
    """

    def __init__(self, model: PreTrainedModel, prefill: LearnedPrefill) -> None:
        self._model = model
        self._prefill = prefill

    @contextmanager
    def timing(self, rows: int, start: int, stop: int) -> Iterator[None]:
        """Time a pass over columns ``start`` … ``stop - 1`` of ``rows`` rows."""
        began = self._now()
        yield
        self._observe(rows, start, stop, began)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Time the passes that ``generate`` makes, until the end of the ``with`` block."""
        begun: list[float] = []

        def before(_module: Any, given: Any, named: dict[str, Any]) -> None:
            # Passes of an answer's single tokens are not waited for.
            begun[:] = [self._now()] if _shape(given, named)[1] > 1 else []

        def after(_module: Any, given: Any, named: dict[str, Any], _result: Any) -> None:
            cache = named.get("past_key_values")
            if not begun or cache is None:
                return
            rows, columns = _shape(given, named)
            stop = int(cache.get_seq_length())  # the pass has added its columns
            self._observe(rows, stop - columns, stop, begun[0])

        hooks = [
            self._model.register_forward_pre_hook(before, with_kwargs=True),
            self._model.register_forward_hook(after, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _observe(self, rows: int, start: int, stop: int, began: float) -> None:
        if stop - start > 1 and start >= 0:
            self._prefill.observe([(start, stop)] * rows, self._now() - began)

    def _now(self) -> float:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return time.perf_counter()


def _shape(given: Any, named: dict[str, Any]) -> tuple[int, int]:
    """Return rows and columns of a pass; none if it is not given tokens."""
    ids = named.get("input_ids", given[0] if given else None)
    return (0, 0) if ids is None else (int(ids.shape[0]), int(ids.shape[1]))


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
            records.tensors_of(snapshot.layers)
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
