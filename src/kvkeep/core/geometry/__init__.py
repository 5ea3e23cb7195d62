"""Geometry: the shape of a model's KV, and its size in bytes.

    shape.py          KVGeometry: bytes per token, page and sequence, what a budget holds; made of
                      LayerGroups: layers that keep the same, K and V (AttentionShape) or a state
    units.py          element types; amounts of memory and times as text: "24GiB" to bytes and back
    huggingface.py    a geometry from a Hugging Face configuration, as Transformers reads it

Needs the standard library only; Transformers is imported late, where it is installed.
"""

from __future__ import annotations

from kvkeep.core.geometry.huggingface import download_hint
from kvkeep.core.geometry.shape import AttentionShape, KVGeometry, LayerGroup, StateTensor
from kvkeep.core.geometry.units import (
    DTYPES,
    format_bytes,
    normalise_dtype,
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
