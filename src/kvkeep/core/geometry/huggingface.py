"""Read what a model keeps from its Hugging Face configuration, without Transformers.

Families name the same number differently (``num_hidden_layers``, ``n_layer``, …) and leave out
their defaults. The tests compare the results with caches that Transformers fills. A configuration
that cannot be read for certain is refused: a geometry that is almost right makes wrong pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import UnsupportedModel
from kvkeep.core.geometry.attention import read_shapes
from kvkeep.core.geometry.families import check_servable
from kvkeep.core.geometry.fields import ConfigFields, ConfigSource
from kvkeep.core.geometry.groups import LayerGroup
from kvkeep.core.geometry.layers import read_layers
from kvkeep.core.geometry.shape import KVGeometry
from kvkeep.core.geometry.states import read_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.core.geometry.groups import AttentionShape
    from kvkeep.core.geometry.layers import LayerKind

__all__ = ["read_geometry"]


def read_geometry(config: ConfigSource, *, dtype: str | None, tp: int) -> KVGeometry:
    """See `KVGeometry.from_config`."""
    fields = ConfigFields.read(config)
    check_servable(fields)
    kinds = read_layers(fields)
    groups = list(_groups(fields, kinds))
    if not groups:
        raise UnsupportedModel(f"{fields.family or 'this model'} has no layer that keeps anything")
    dtype = dtype or fields.value("dtype") or fields.value("torch_dtype") or "float32"
    return KVGeometry.of(groups, dtype=dtype, tp=tp)


def _groups(fields: ConfigFields, kinds: list[LayerKind]) -> Iterator[LayerGroup]:
    """Yield a group for each layer and each thing that it keeps."""
    shapes = read_shapes(fields, kinds)
    state, grid = read_state(fields) if any(kind.state for kind in kinds) else ((), 1)
    for layer, (kind, shape) in enumerate(zip(kinds, shapes, strict=True)):
        if shape is not None:
            yield _attention(layer, kind, shape)
        if kind.state:
            yield LayerGroup("state", (layer,), state=state, grid=grid)


def _attention(layer: int, kind: LayerKind, shape: AttentionShape) -> LayerGroup:
    assert kind.attention is not None
    reach = "latent" if shape.latent_dim is not None else kind.attention
    return LayerGroup(reach, (layer,), shape, kind.span)
