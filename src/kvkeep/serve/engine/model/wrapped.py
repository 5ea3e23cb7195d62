"""Modules of a model that get what they keep from our memory, in place of a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from kvkeep.core.errors import IllegalStep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from kvkeep.core.groups.tensors import GroupedTensors
    from kvkeep.serve.engine.attention.batch import PagedBatch, Piece
    from kvkeep.serve.engine.model.survey import CacheUser, ModelSurvey

__all__ = ["MixerCache", "WrappedModel"]


class MixerCache:
    """The state of one layer for some sequences, in place of a Transformers cache.

    It has the methods that Transformers' modules call on a cache. ``conv`` and ``recurrent`` are
    [sequences, …] and updated in place; None for a layer without.
    """

    def __init__(self, conv: torch.Tensor | None, recurrent: torch.Tensor | None) -> None:
        self._conv = conv
        self._recurrent = recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the inputs that the convolution needs again: [sequences, channels, kernel]."""
        return self._conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the recurrent state."""
        return self._recurrent

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, **_: Any
    ) -> torch.Tensor:
        """Add inputs [sequences, channels, tokens]; return them behind those kept so far."""
        assert self._conv is not None
        every = torch.cat((self._conv, conv_states.to(self._conv.dtype)), -1)
        self._conv.copy_(every[..., -self._conv.shape[-1] :])
        return every

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, **_: Any
    ) -> torch.Tensor:
        """Replace the recurrent state."""
        assert self._recurrent is not None
        return self._recurrent.copy_(recurrent_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        """Whether there is a state: always, an empty one is zero."""
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether inputs are kept for going back: never."""
        return False


class _Run(NamedTuple):
    """Sequences that a mixer computes in one call, all with the same number of tokens."""

    sequences: slice  # in the order of the states
    columns: slice | torch.Tensor  # their tokens in the batch, sequence after sequence
    tokens: int  # of each


class StateMemory:
    """Memory for the states of a pass, which the next one reuses; it grows to the largest pass.

    On a CPU fresh memory takes longer than the copy into it; on a GPU it is the allocator's to
    reuse. Thread safety: none.
    """

    def __init__(self, device: torch.device) -> None:
        self._kept = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, pages: int, page_bytes: int) -> torch.Tensor:
        """Return uninitialised memory, uint8 [pages, page_bytes], valid until the next call."""
        size = pages * page_bytes
        if size > len(self._kept):
            fresh = torch.empty(size, dtype=torch.uint8, device=self._kept.device)
            if fresh.device.type != "cpu":
                return fresh.view(pages, page_bytes)
            self._kept = fresh
        return self._kept[:size].view(pages, page_bytes)


class PassStates:
    """The states of the sequences of one pass: read into ``memory``, written back by `write`.

    Sequences with one token are computed in one call, the others one by one. Thread safety: none.
    Cost: the bytes of all states are copied out of the pages and back.
    """

    def __init__(
        self,
        groups: GroupedTensors,
        pieces: Sequence[Piece],
        begins: Sequence[int],
        memory: StateMemory,
    ) -> None:
        self._groups = groups
        single = [number for number, piece in enumerate(pieces) if len(piece.tokens) == 1]
        longer = [number for number, piece in enumerate(pieces) if len(piece.tokens) > 1]
        order = [pieces[number] for number in (*single, *longer)]
        tables = []
        for piece in order:
            assert piece.state is not None, "a piece of a model with states has one"
            tables.append(piece.state)
        self._pages = np.concatenate(tables)
        out = memory.take(len(self._pages), groups.plan.page_bytes)
        self._memory = groups.read(self._pages, out=out).view(len(order), -1)
        for row, piece in enumerate(order):
            if not piece.start:
                self._memory[row].zero_()  # whatever lies there, NaN included
        self._runs = []
        if single:
            columns = np.array([begins[number] for number in single])
            self._runs.append(_Run(slice(0, len(single)), _columns(columns, groups.device), 1))
        for row, number in enumerate(longer, start=len(single)):
            tokens, begin = len(pieces[number].tokens), begins[number]
            self._runs.append(_Run(slice(row, row + 1), slice(begin, begin + tokens), tokens))
        self._tensors: dict[int, dict[str, torch.Tensor]] = {}
        self._apart: list[tuple[torch.Tensor, torch.Tensor]] = []
        for part in groups.state_parts:
            bytes_ = self._memory[:, part.offset : part.offset + part.nbytes]
            if part.offset % part.dtype.itemsize or self._memory.shape[1] % part.dtype.itemsize:
                copied = bytes_.contiguous()
                self._apart.append((bytes_, copied))
                bytes_ = copied
            tensor = bytes_.view(part.dtype).view(-1, *part.shape)
            self._tensors.setdefault(part.layer, {})[part.name] = tensor

    def mix(
        self,
        layer: int,
        hidden: torch.Tensor,
        call: Callable[[torch.Tensor, MixerCache], torch.Tensor],
    ) -> torch.Tensor:
        """Return what a mixer makes of ``hidden`` [1, T, width]; update the states of ``layer``.

        ``call`` computes [sequences, tokens, width] with their states.
        """
        tensors = self._tensors[layer]
        conv, recurrent = tensors.get("conv"), tensors.get("recurrent")
        out: torch.Tensor | None = None
        for run in self._runs:
            cache = MixerCache(
                None if conv is None else conv[run.sequences],
                None if recurrent is None else recurrent[run.sequences],
            )
            rows = hidden[0, run.columns].view(-1, run.tokens, hidden.shape[-1])
            made = call(rows, cache)
            if len(self._runs) == 1 and isinstance(run.columns, slice):
                return made.flatten(0, 1)[None]
            if out is None:
                out = made.new_empty(1, hidden.shape[1], made.shape[-1])
            out[0, run.columns] = made.flatten(0, 1)
        assert out is not None, "a pass has at least one piece"
        return out

    def write(self) -> None:
        """Write the states back to their pages."""
        for bytes_, copied in self._apart:
            bytes_.copy_(copied)
        self._groups.write(self._pages, self._memory.view(len(self._pages), -1))


def _columns(
    columns: np.ndarray[tuple[int], np.dtype[np.int64]], device: torch.device
) -> slice | torch.Tensor:
    if (np.diff(columns) == 1).all():
        return slice(int(columns[0]), int(columns[-1]) + 1)
    return torch.from_numpy(columns).to(device)


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
