"""Codecs: the KV of a block into bytes and back.

base.py        the contract, and what a codec may know of a block
named.py       codecs by name and by number
raw.py         as they are
lossless.py    byte planes and zstd, exact (numcodecs)
quantised.py   what int8.py and fp8.py share: a byte a number, a scale a tile (torch)
tiles.py       which numbers share a scale
encrypted.py   AES-256-GCM around another codec (cryptography)
keyfile.py     the files that keys are in

`docs/codecs.md` has the formats byte by byte, error bounds and figures.
"""

from __future__ import annotations

from kvkeep.store.codecs.base import BlockShape, Codec, Damaged, OtherKey
from kvkeep.store.codecs.encrypted import ENCRYPTED, WITHOUT_KEY_ID, inner_number
from kvkeep.store.codecs.keyfile import generate_key, load_key
from kvkeep.store.codecs.named import CODECS, codec_of, make_codec

__all__ = [
    "CODECS",
    "ENCRYPTED",
    "WITHOUT_KEY_ID",
    "BlockShape",
    "Codec",
    "Damaged",
    "OtherKey",
    "codec_of",
    "generate_key",
    "inner_number",
    "load_key",
    "make_codec",
]
