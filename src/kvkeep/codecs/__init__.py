"""Codecs: the KV of a block into bytes and back.

base.py     the contract, and what a codec may know of a block
"""

from __future__ import annotations

from kvkeep.codecs.base import BlockShape, Codec, Damaged

__all__ = ["BlockShape", "Codec", "Damaged"]
