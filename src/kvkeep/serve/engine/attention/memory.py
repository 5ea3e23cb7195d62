"""`KVMemory`: where the KV of each layer of a model lies, and what the layer attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from kvkeep.core.groups.tensors import LayerPages
from kvkeep.core.pages.tensors import Scratch
from kvkeep.serve.engine.attention import flash

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvkeep.core.geometry import KVGeometry
    from kvkeep.core.groups.tensors import GroupedTensors
    from kvkeep.core.pages.tensors import PagedTensors
    from kvkeep.serve.engine.attention.flash import Kernel

__all__ = ["EVERYTHING", "KVMemory", "LatentMaps", "LayerHome", "Reach", "reaches"]


@dataclass(frozen=True, slots=True, eq=False)
class LatentMaps:
    """The linear maps of one layer from stored vectors.

    ``keys`` is [heads, stored, key dim], from the whole stored vector; ``values`` [heads, latent,
    value dim], from the latent, its leading part.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def expand(self, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [tokens, heads, dim] of the vectors ``stored`` [tokens, width]."""
        heads, latent, _ = self.values.shape
        keys = torch.matmul(stored, self.keys)
        values = torch.matmul(stored[:, :latent], self.values)
        assert len(keys) == heads
        return keys.transpose(0, 1), values.transpose(0, 1)

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Return the queries for stored vectors [tokens, heads, stored]; [tokens, heads, dim]."""
        return torch.matmul(query.transpose(0, 1), self.keys.transpose(1, 2)).transpose(0, 1)

    def value(self, attended: torch.Tensor) -> torch.Tensor:
        """Return attention [tokens, heads, dim] from that over latents [tokens, heads, latent]."""
        return torch.matmul(attended.transpose(0, 1), self.values).transpose(0, 1)


class Reach(NamedTuple):
    """Which tokens a token attends to.

    ``span`` None: all before it. Else the last ``span``, itself included, or if ``chunked`` those
    before it in its chunk of ``span`` tokens.
    """

    span: int | None = None
    chunked: bool = False

    def first(self, position: int) -> int:
        """Return the first position that the token at ``position`` attends to."""
        if self.span is None:
            return 0
        if self.chunked:
            return position // self.span * self.span
        return max(0, position + 1 - self.span)


EVERYTHING: Final = Reach()


def reaches(geometry: KVGeometry) -> dict[int, Reach]:
    """Return the reach of each layer with attention."""
    return {
        layer: Reach(group.span, group.kind == "chunk")
        for group in geometry.groups
        for layer in group.layers
        if group.shape is not None
    }


@dataclass(frozen=True, slots=True, eq=False)
class LayerHome:
    """The KV of one layer: number ``at`` of the part with number ``part``.

    ``shared``: another layer stores it, and this one attends over it. ``latent``: the layer's maps
    from what is stored.
    """

    part: int
    at: int
    reach: Reach
    shared: bool = False
    latent: LatentMaps | None = None


class KVMemory:
    """The memory of a model's KV in parts, the layers of each of which share pages.

    Thread safety: none.

    Args:
        parts: layers by the pool pages in which their KV lies.
        reach: of each layer that stores KV.
        device: of the parts.
        shared: for layers that attend over the KV of another layer, that layer.
        latent: the maps of each layer that stores latents.

    Attributes:
        parts: as given.
        kernels: the kernel that attends over each part; None: pages are gathered.
        homes: where the KV of each layer lies.
        scratch: memory for gathers.
    """

    def __init__(
        self,
        parts: Sequence[LayerPages],
        reach: Mapping[int, Reach],
        *,
        device: torch.device,
        shared: Mapping[int, int] | None = None,
        latent: Mapping[int, LatentMaps] | None = None,
    ) -> None:
        self.parts = tuple(parts)
        self.kernels: list[Kernel | None] = [flash.find(part.tensors) for part in parts]
        maps = latent or {}
        self.homes = {
            layer: LayerHome(number, at, reach[layer], latent=maps.get(layer))
            for number, part in enumerate(self.parts)
            for at, layer in enumerate(part.layers)
        }
        for layer, source in (shared or {}).items():
            home = self.homes[source]
            self.homes[layer] = LayerHome(home.part, home.at, home.reach, shared=True)
        self.device = device
        self.scratch = self.parts[0].tensors.scratch() if parts else Scratch(torch.int8, device)

    @classmethod
    def plain(
        cls,
        tensors: PagedTensors,
        *,
        shared: Mapping[int, int] | None = None,
        latent: Mapping[int, LatentMaps] | None = None,
    ) -> KVMemory:
        """Return the memory of a model whose layers all keep every token, in the same pages."""
        layers = tuple(range(tensors.geometry.layers))
        part = LayerPages(None, 0, layers, tensors)
        everything = dict.fromkeys(layers, EVERYTHING)
        return cls([part], everything, device=tensors.device, shared=shared, latent=latent)

    @classmethod
    def grouped(
        cls,
        groups: GroupedTensors,
        *,
        shared: Mapping[int, int] | None = None,
        latent: Mapping[int, LatentMaps] | None = None,
    ) -> KVMemory:
        """Return the memory of a hybrid model."""
        reach = reaches(groups.plan.geometry)
        return cls(groups.parts, reach, device=groups.device, shared=shared, latent=latent)
