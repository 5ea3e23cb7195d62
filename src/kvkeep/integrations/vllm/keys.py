"""Keys of blocks, from vLLM's block hashes."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvkeep.core.keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["keys_of", "whole_hashes"]


def keys_of(hashes: Sequence[bytes], group: int) -> list[bytes]:
    """Return the keys of one group's blocks, from vLLM's hashes of them. Cost: at most 0.1 µs each.

    vLLM's hash covers all tokens up to the block's end, images, LoRA and cache salt. Hashes of 16
    bytes are padded. In all groups but the first, the last byte is changed, so keys of two groups
    are equal only if 31 bytes of two hashes are.
    """
    hashes = whole_hashes(hashes)
    if group == 0:
        return hashes if isinstance(hashes, list) else list(hashes)
    return [each[:-1] + bytes((each[-1] ^ group,)) for each in hashes]


def whole_hashes(hashes: Sequence[bytes]) -> Sequence[bytes]:
    """Return vLLM's hashes of blocks with 32 bytes each; those that have them are unchanged."""
    if hashes and len(hashes[0]) > KEY_BYTES:
        return [hashlib.sha256(each).digest() for each in hashes]
    if hashes and len(hashes[0]) < KEY_BYTES:
        return [each.ljust(KEY_BYTES, b"\0") for each in hashes]
    return hashes
