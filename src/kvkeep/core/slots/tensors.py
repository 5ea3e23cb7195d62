"""`copy_slot`: make the copy that a `SlotCache` names, in the engine's own tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvkeep.core.slots.table import SlotCopy

__all__ = ["copy_slot"]


def copy_slot(
    kv: Sequence[tuple[Tensor, Tensor]],
    copy: SlotCopy,
    *,
    layout: Literal["HND", "NHD"] = "HND",
) -> None:
    """Copy the K and V of a prefix from one slot to another, layer by layer, in place.

    ``kv``: K and V of each layer, shaped [slots, heads, tokens, dim] ("HND") or [slots, tokens,
    heads, dim] ("NHD"); widths may differ between K, V and layers, and tensors may be views. Other
    positions and slots are unchanged. Raises `InvalidValue`, with nothing copied, when a tensor has
    no such slot or position: a slice would be cut silently.

    Cost: one device copy each for K and V of a layer, queued on the current stream. Thread safety:
    none; nothing else may write to these positions at the same time.
    """
    if layout not in ("HND", "NHD"):
        raise InvalidValue(f"layout is 'HND' or 'NHD', got {layout!r}")
    if not 0 <= copy.start <= copy.tokens or min(copy.src, copy.dst) < 0:
        raise InvalidValue(f"slots and positions count from 0, start … tokens; got {copy}")
    axis = 2 if layout == "HND" else 1
    for layer, pair in enumerate(kv):
        for name, tensor in zip("KV", pair, strict=True):
            shape = tuple(tensor.shape)
            if len(shape) != 4 or max(copy.src, copy.dst) >= shape[0] or copy.tokens > shape[axis]:
                raise InvalidValue(
                    f"{name} of layer {layer} is shaped {shape}; {copy} needs four axes, "
                    f"{max(copy.src, copy.dst) + 1} slots and {copy.tokens} tokens in {layout}"
                )
    span = slice(copy.start, copy.tokens)
    index = (slice(None), span) if layout == "HND" else (span,)
    for pair in kv:
        for tensor in pair:
            tensor[(copy.dst, *index)] = tensor[(copy.src, *index)]
