"""Codecs: encode the KV of a block into bytes, and decode it.

base.py        the contract
named.py       codecs by name, by number and by kind of record; unchanged bytes
lossless.py    byte planes and zstd, exact (numcodecs)
quantised.py   lossy codecs part by part; int8 and fp8: one byte a number, one scale a tile (torch)
int4.py        4 bits a number, a scale and a zero point a group (torch)
encrypted.py   AES-256-GCM around another codec, and key files (cryptography)

`docs/codecs.md` has the formats byte by byte, error bounds and figures.
"""

from __future__ import annotations

from kvkeep.store.codecs.base import BlockShape, Codec, Damaged, OtherKey
from kvkeep.store.codecs.encrypted import (
    ENCRYPTED,
    WITHOUT_KEY_ID,
    generate_key,
    inner_number,
    load_key,
)
from kvkeep.store.codecs.named import CODECS, codec_name, codec_of, make_codec

__all__ = [
    "CODECS",
    "ENCRYPTED",
    "WITHOUT_KEY_ID",
    "BlockShape",
    "Codec",
    "Damaged",
    "OtherKey",
    "codec_name",
    "codec_of",
    "generate_key",
    "inner_number",
    "load_key",
    "make_codec",
]
