"""`PassStates`: the running states of the sequences of one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.groups.tensors import GroupedTensors
    from kvkeep.serve.engine.attention.batch import Piece

__all__ = ["MixerCache", "PassStates", "StateMemory"]


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
