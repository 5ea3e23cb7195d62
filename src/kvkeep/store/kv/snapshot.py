"""`Snapshot`: everything that a model needs to go on after some tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["Snapshot"]


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What a model keeps of the first ``tokens`` tokens of a prompt, to go on behind them.

    Every layer with attention is in ``layers``, and every layer with a state in ``state``; a layer
    may be in both. Tensors of KV have the store's layout, as in `KVStore.put`.

    Attributes:
        tokens: the position at which a model goes on.
        start: the first token of layers that keep every token.
        layers: for each number of a layer, (k, v), or the latent alone. A layer that keeps every
            token has tokens ``start`` … ``tokens - 1``. A layer with a window or chunks has the
            last ones before ``tokens``, at least those from `KVStore.window_start` on; layers of
            one group have equally many.
        state: for each (layer, name) of `kvkeep.core.geometry.StateTensor`, the tensor exactly as
            it is after ``tokens`` tokens.
    """

    tokens: int
    start: int
    layers: Mapping[int, tuple[Tensor, ...]] = field(default_factory=dict)
    state: Mapping[tuple[int, str], Tensor] = field(default_factory=dict)
