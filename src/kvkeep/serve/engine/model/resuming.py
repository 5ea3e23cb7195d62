"""A proof that modules with a state continue from it.

Some modules cannot: they ignore the state for all but a single token (Jamba, Mamba), or keep more
than they hand over. Each is shown by its own output, because what follows it in the model may hide
most of a wrong one.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import torch

from kvkeep.core.errors import UnsupportedModel
from kvkeep.serve.engine.model.states import MixerCache

if TYPE_CHECKING:
    from kvkeep.core.geometry import KVGeometry
    from kvkeep.core.geometry.groups import StateTensor
    from kvkeep.serve.engine.model.survey import CacheUser, ModelSurvey

__all__ = ["prove_resuming"]

# Where pieces end: off the grids of kernels, shorter than a convolution, and tokens one by one.
_CUTS: Final = (0, 18, 67, 69, 70, 71, 72, 140)
# Of the largest output. Modules that continue are apart by 1e-5 at most, others by 1e-2 and more.
_TOLERANCE: Final = 1e-3


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
            if (apart := _apart(user, group.state)) > _TOLERANCE:
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
