"""Geometry: the shape of a model's KV, and its size in bytes.

    shape.py        KVGeometry: bytes per token and page, pages in a budget, tensor-parallel shards
    dtypes.py       element types and their spellings
    units.py        amounts of memory and times as text: "24GiB" to bytes and back
    huggingface.py  a geometry from a Hugging Face configuration, read without Transformers:
                    fields.py reads it, families.py refuses, windows.py finds sliding layers

Needs the standard library only.
"""

from __future__ import annotations

from kvkeep.core.geometry.dtypes import DTYPES, normalise_dtype
from kvkeep.core.geometry.shape import KVGeometry
from kvkeep.core.geometry.units import format_bytes, parse_bytes, parse_count, parse_seconds

__all__ = [
    "DTYPES",
    "KVGeometry",
    "format_bytes",
    "normalise_dtype",
    "parse_bytes",
    "parse_count",
    "parse_seconds",
]
