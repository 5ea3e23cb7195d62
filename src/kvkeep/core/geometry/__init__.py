"""Geometry: the shape of a model's KV, and its size in bytes.

    shape.py        KVGeometry: bytes per token, page and sequence, what a budget holds, shards
    groups.py       LayerGroup: layers that keep the same, K and V (AttentionShape) or a state
    dtypes.py       element types and their spellings
    units.py        amounts of memory and times as text: "24GiB" to bytes and back
    hub.py          download_hint: what to do about a name on the hub in place of a directory
    huggingface.py  a geometry from a Hugging Face configuration, read without Transformers:
                    fields.py reads it, families.py refuses, layers.py finds the kind of each
                    layer, attention.py its heads and widths, states.py the states of families

Needs the standard library only.
"""

from __future__ import annotations

from kvkeep.core.geometry.dtypes import DTYPES, normalise_dtype
from kvkeep.core.geometry.groups import AttentionShape, LayerGroup, StateTensor
from kvkeep.core.geometry.hub import download_hint
from kvkeep.core.geometry.shape import KVGeometry
from kvkeep.core.geometry.units import (
    format_bytes,
    parse_bytes,
    parse_count,
    parse_seconds,
    parse_wait,
)

__all__ = [
    "DTYPES",
    "AttentionShape",
    "KVGeometry",
    "LayerGroup",
    "StateTensor",
    "download_hint",
    "format_bytes",
    "normalise_dtype",
    "parse_bytes",
    "parse_count",
    "parse_seconds",
    "parse_wait",
]
