"""Modules of a model that get what they keep from our memory, in place of a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvkeep.core.errors import IllegalStep
from kvkeep.serve.engine.model.states import PassStates, StateMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from kvkeep.core.groups.tensors import GroupedTensors
    from kvkeep.serve.engine.attention.batch import PagedBatch
    from kvkeep.serve.engine.model.states import MixerCache
    from kvkeep.serve.engine.model.survey import CacheUser, ModelSurvey

__all__ = ["WrappedModel"]


class _Pass:
    """The pass under way, which the wrapped modules share; nothing between passes."""

    def __init__(self) -> None:
        self.batch: PagedBatch | None = None
        self.states: PassStates | None = None


class WrappedModel:
    """A model whose mixers and latent attention keep nothing, but are handed it in each pass.

    Thread safety: none; one pass at a time.
    """

    def __init__(self, model: PreTrainedModel, survey: ModelSurvey) -> None:
        """Replace the ``forward`` of the modules that ``survey`` found."""
        self._model = model
        self._pass = _Pass()
        self._memory = StateMemory(model.device) if survey.mixers else None
        for layer, user in survey.mixers.items():
            user.module.forward = _mixer(user, layer, self._pass)
        for user in survey.readers:
            user.module.forward = _reader(user, self._pass)

    def run(self, batch: PagedBatch, groups: GroupedTensors | None) -> torch.Tensor:
        """Run a pass and update the states of its sequences; returns what `PagedBatch.run` does.

        If it raises, the states in the pages are as before.
        """
        with torch.inference_mode():
            if self._memory is not None:
                assert groups is not None, "a model with states has groups"
                states = PassStates(groups, batch.pieces, batch.begins, self._memory)
                self._pass.states = states
            self._pass.batch = batch
            try:
                logits = batch.run(self._model)
                if self._pass.states is not None:
                    self._pass.states.write()
            finally:
                self._pass.batch = self._pass.states = None
        return logits


class _BatchCache:
    """A cache for attention in one pass: stores latents, and knows where the sequences are."""

    def __init__(self, batch: PagedBatch) -> None:
        self._batch = batch

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Store the new tokens' latents; K and V are stored later. Returns those of new tokens."""
        if self._batch.memory.homes[layer_idx].latent is not None:
            latent = torch.cat((key_states[0, 0], value_states[0, 0]), -1)
            self._batch.store_latent(layer_idx, latent)
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> torch.Tensor:
        """Return what to add to the numbers of the batch's rows to get positions: int64 [T]."""
        positions = self._batch.positions[0]
        return positions - torch.arange(len(positions), device=positions.device)


def _mixer(user: CacheUser, layer: int, during: _Pass) -> Callable[..., torch.Tensor]:
    forward, name = user.module.forward, user.name

    def mixed(hidden_states: torch.Tensor, *_: Any, **kwargs: Any) -> torch.Tensor:
        if during.states is None:
            raise IllegalStep("this model keeps its states in kvkeep's pages; use Runner.forward")
        # Of the keywords only those stay that do not depend on the tokens.
        kept = {
            key: value
            for key, value in kwargs.items()
            if key not in {name, "paged_batch"} and not _of_tokens(value)
        }

        def call(rows: torch.Tensor, cache: MixerCache) -> torch.Tensor:
            out = forward(rows, **{**kept, name: cache})
            return out if isinstance(out, torch.Tensor) else out[0]

        return during.states.mix(layer, hidden_states, call)

    return mixed


def _of_tokens(value: object) -> bool:
    """Whether a keyword is a tensor, or holds one: positions, masks, rotary embeddings."""
    if isinstance(value, tuple | list):
        return any(map(_of_tokens, value))
    return isinstance(value, torch.Tensor)


def _reader(user: CacheUser, during: _Pass) -> Callable[..., Any]:
    forward, name = user.module.forward, user.name

    def read(*args: Any, **kwargs: Any) -> Any:
        if during.batch is None:
            raise IllegalStep("this model attends over kvkeep's pages; use Runner.forward")
        return forward(*args, **{**kwargs, name: _BatchCache(during.batch)})

    return read
