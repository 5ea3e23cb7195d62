"""Encryption: no reading without the key, no block in place of another."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from codec_blocks import KEY, LLAMA, NAME, SHAPES, block, decode, encode, every_codec

from kvkeep.core.errors import InvalidValue
from kvkeep.store.codecs import Damaged, OtherKey, codec_of, make_codec
from kvkeep.store.codecs.encrypted import EncryptedCodec

OTHER = bytes(reversed(KEY))


@pytest.fixture(params=["raw", "lossless", "int8"])
def codec(request):
    return make_codec(request.param, LLAMA, KEY)


def test_the_plain_bytes_do_not_occur_in_it():
    raw = b"a prompt that nobody else should read " * 40
    encoded = encode(make_codec("raw", SHAPES["opaque"], KEY), raw)
    assert len(encoded) == len(raw) + 52
    assert b"prompt" not in encoded


def test_a_block_is_bound_to_its_name(codec):
    """Write access to the store does not allow exchanging blocks."""
    raw = block(LLAMA, 32)
    encoded = encode(codec, raw, b"block one")
    assert len(decode(codec, encoded, len(raw), b"block one")) == len(raw)
    for name in (b"block two", b"", b"block one\0", b"block on"):
        with pytest.raises(Damaged):
            decode(codec, encoded, len(raw), name)


def test_each_bit_is_covered():
    codec = make_codec("raw", SHAPES["opaque"], KEY)
    encoded = encode(codec, b"16 bytes of text")
    for bit in range(len(encoded) * 8):
        bad = bytearray(encoded)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(OtherKey if bit < 64 else Damaged):
            decode(codec, bytes(bad), 16)


def test_another_key_reads_nothing(codec):
    raw = block(LLAMA, 32)
    encoded = encode(codec, raw)
    other = make_codec(codec.inner.name, LLAMA, OTHER)
    with pytest.raises(OtherKey, match=encoded[:8].hex()):
        decode(other, encoded, len(raw))
    assert KEY.find(encoded[:8]) < 0


def test_old_keys_are_for_reading_only(codec):
    raw = block(LLAMA, 32)
    encoded = encode(codec, raw)
    new = make_codec(codec.inner.name, LLAMA, OTHER, [KEY])
    assert decode(new, encoded, len(raw)) == decode(codec, encoded, len(raw))
    with pytest.raises(OtherKey):
        decode(codec, encode(new, raw), len(raw))
    by_number = codec_of(codec.number, LLAMA, OTHER, [KEY])
    assert by_number is not None
    assert decode(by_number, encoded, len(raw)) == decode(codec, encoded, len(raw))


# Written by kvkeep before records had key ids: the codec's number, and the encoded bytes.
BEFORE_KEY_IDS = (
    64,
    "775a118094ec5e29d1e20ab65044343a6f5b1937a9ce2bc59c8d33edfaf7a8afcdce2fd9b6ce4e308ef87561"
    "12d9653b4eaf4cc9d0faa77ec9d533bd",
)


def test_records_without_key_ids_are_read():
    number, encoded = BEFORE_KEY_IDS[0], bytes.fromhex(BEFORE_KEY_IDS[1])
    for keys in ((KEY,), (OTHER, [KEY])):
        old = codec_of(number, SHAPES["opaque"], *keys)
        assert old is not None
        assert decode(old, encoded, 16) == b"16 bytes of text"
    old = codec_of(number, SHAPES["opaque"], OTHER)
    assert old is not None
    with pytest.raises(Damaged, match="another key"):
        decode(old, encoded, 16)
    assert codec_of(number, SHAPES["opaque"]) is None


def test_the_same_key_reads_what_another_process_wrote(codec):
    raw = block(LLAMA, 32)
    encoded = encode(codec, raw)
    other = codec_of(codec.number, LLAMA, KEY)
    assert other is not None
    assert decode(other, encoded, len(raw)) == decode(codec, encoded, len(raw))


def test_bytes_are_bound_to_their_codec():
    """The codec's number is authenticated: int8 codes cannot pass as raw bytes."""
    raw = os.urandom(1000)
    shape = SHAPES["opaque"]
    encoded = encode(make_codec("raw", shape, KEY), raw)
    with pytest.raises(Damaged):
        decode(make_codec("lossless", shape, KEY), encoded, len(raw))


def test_nonces_and_salts_do_not_repeat():
    codec = make_codec("raw", SHAPES["opaque"], KEY)
    nonces = {encode(codec, b"same")[24:36] for _ in range(2000)}
    assert len(nonces) == 2000
    salts = {encode(make_codec("raw", SHAPES["opaque"], KEY), b"")[8:24] for _ in range(50)}
    assert len(salts) == 50


def test_a_forked_process_does_not_repeat_its_parent_s_nonces():
    """They share the record key, so nonces from a counter would repeat."""
    code = """if True:
        import os, sys
        from kvkeep.store.codecs import BlockShape, make_codec
        codec = make_codec("raw", BlockShape(), bytes(32))
        out = bytearray(56)
        reader, writer = os.pipe()
        if not os.fork():
            codec.encode(memoryview(b"same"), memoryview(out), b"")
            os.write(writer, out)
            os._exit(0)
        os.wait()
        theirs = os.read(reader, 56)
        codec.encode(memoryview(b"same"), memoryview(out), b"")
        back = bytearray(4)
        codec.decode(memoryview(theirs), memoryview(back), b"")
        assert back == b"same"
        assert theirs[:24] == out[:24], "another salt: then nonces may be anything"
        assert theirs[24:36] != out[24:36]
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_format_is_as_documented():
    """Read with docs/codecs.md and two primitives alone."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    raw = block(LLAMA, 3)
    encoded = encode(make_codec("lossless", LLAMA, KEY), raw)
    hkdf = HKDF(algorithm=SHA256(), length=32, salt=encoded[8:24], info=b"kvkeep record key 1")
    plain = AESGCM(hkdf.derive(KEY)).decrypt(encoded[24:36], encoded[36:], b"\x81" + NAME)
    assert decode(make_codec("lossless", LLAMA), plain, len(raw)) == raw
    named = HKDF(algorithm=SHA256(), length=8, salt=None, info=b"kvkeep key id 1")
    assert encoded[:8] == named.derive(KEY)


def test_numbers_and_names():
    for plain, secret in zip(every_codec(LLAMA), every_codec(LLAMA, KEY), strict=True):
        assert secret.number == 128 + plain.number
        assert secret.name == f"{plain.name}+aes-256-gcm"
        assert secret.exact == plain.exact
        assert KEY.hex() not in repr(secret) + str(vars(secret))
        assert repr(KEY) not in repr(secret) + str(vars(secret))


def test_wrong_keys_and_layers_are_refused():
    for key in (b"", KEY[:31], KEY + b"\0", KEY.hex().encode()):
        with pytest.raises(InvalidValue, match="32"):
            make_codec("raw", LLAMA, key)
    with pytest.raises(InvalidValue, match="encrypts already"):
        EncryptedCodec(make_codec("raw", LLAMA, KEY), KEY)
