"""Records: the bytes are as documented, and no damage is taken for a record."""

from __future__ import annotations

import random

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from kvkeep.core.keys import BLOCK_ID_BYTES
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.tiers.record import (
    HEADER_BYTES,
    BadRecord,
    OtherVersion,
    naming,
    read_header,
    seal,
    verify,
)

BLOCK = bytes(range(48))
OTHER = BLOCK[:-1] + b"\xff"
FROZEN = (
    "6b766b656570420a"  # magic
    "0100" "0200" "00000000"  # version, codec, flags
    "000102030405060708090a0b0c0d0e0f"  # space
    "101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f"  # block key
    "a00f000000000000" "1900000000000000"  # 4000 raw bytes, 25 of payload
    "96b34af99230ded58b40e69be920a3e9"  # XXH3-128 of the payload
    "000000000000000000000000000000000000000000000000"
    "f02fdbf01d9adb65"  # XXH3-64 of all that
)  # fmt: skip
PAYLOAD = b"the payload of the vector"


def sealed(payload: bytes, block: bytes = BLOCK, codec: int = 0, raw: int = 0) -> memoryview:
    record = aligned(HEADER_BYTES + len(payload))
    record[HEADER_BYTES:] = payload
    seal(record, block, codec, raw or len(payload))
    return record


def renewed(head: bytearray) -> bytes:
    """A header with its checksum made right again."""
    head[120:128] = xxhash.xxh3_64_digest(bytes(head[:120]))
    return bytes(head)


def test_the_format_is_what_it_was() -> None:
    record = sealed(PAYLOAD, codec=2, raw=4000)
    assert bytes(record[HEADER_BYTES:]) == PAYLOAD
    assert record[:HEADER_BYTES].hex() == FROZEN
    header = verify(memoryview(bytes.fromhex(FROZEN) + PAYLOAD), BLOCK)
    assert (header.block, header.codec, header.raw_bytes) == (BLOCK, 2, 4000)
    assert (header.payload_bytes, header.record_bytes) == (25, 153)
    assert naming(BLOCK, 2, 4000) == bytes.fromhex(FROZEN)[:72]


@given(
    st.binary(max_size=200),
    st.binary(min_size=BLOCK_ID_BYTES, max_size=BLOCK_ID_BYTES),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**64 - 1),
)
def test_what_is_sealed_verifies(payload: bytes, block: bytes, codec: int, raw: int) -> None:
    record = aligned(HEADER_BYTES + len(payload))
    record[HEADER_BYTES:] = payload
    seal(record, block, codec, raw)
    header = verify(record, block)
    assert (header.block, header.codec, header.raw_bytes) == (block, codec, raw)
    assert header == read_header(bytes(record[:HEADER_BYTES]))


@pytest.mark.parametrize("at", range(HEADER_BYTES + len(PAYLOAD)))
def test_every_flipped_bit_is_found(at: int) -> None:
    whole = bytes(sealed(PAYLOAD))
    for bit in range(8):
        record = bytearray(whole)
        record[at] ^= 1 << bit
        with pytest.raises(BadRecord):
            verify(memoryview(record), BLOCK)


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, HEADER_BYTES + len(PAYLOAD) - 1])
def test_every_cut_is_found(length: int) -> None:
    with pytest.raises(BadRecord):
        verify(sealed(PAYLOAD)[:length], BLOCK)


def test_what_hangs_behind_it_is_found() -> None:
    with pytest.raises(BadRecord, match="154 bytes and should have 153"):
        verify(memoryview(bytes(sealed(PAYLOAD)) + b"\0"), BLOCK)


def test_another_blocks_record_is_not_this_ones() -> None:
    record = sealed(PAYLOAD)
    with pytest.raises(BadRecord, match="another block"):
        verify(record, OTHER)


def test_two_records_mixed_are_none() -> None:
    one, two = sealed(PAYLOAD), sealed(PAYLOAD[::-1])
    with pytest.raises(BadRecord, match="payload's checksum"):
        verify(memoryview(bytes(one[:HEADER_BYTES]) + bytes(two[HEADER_BYTES:])), BLOCK)


def test_another_version_is_said_to_be_one() -> None:
    head = bytearray(sealed(PAYLOAD)[:HEADER_BYTES])
    head[8] = 2
    with pytest.raises(OtherVersion, match="version 2; this kvkeep reads 1"):
        verify(memoryview(renewed(head) + PAYLOAD), BLOCK)


def test_flags_that_nobody_knows_are_another_format() -> None:
    head = bytearray(sealed(PAYLOAD)[:HEADER_BYTES])
    head[13] = 1
    with pytest.raises(OtherVersion, match="flags 0x100"):
        verify(memoryview(renewed(head) + PAYLOAD), BLOCK)


@pytest.mark.parametrize(("at", "why"), [(0, "not begin"), (40, "another block"), (73, "bytes")])
def test_a_header_that_was_made_anew_helps_nobody(at: int, why: str) -> None:
    """A checksum that is right again: magic, key and length still have to be."""
    head = bytearray(sealed(PAYLOAD)[:HEADER_BYTES])
    head[at] ^= 0x20
    with pytest.raises(BadRecord, match=why):
        verify(memoryview(renewed(head) + PAYLOAD), BLOCK)


@given(st.binary(max_size=400))
@example(bytes.fromhex(FROZEN))
@example(bytes(HEADER_BYTES))
def test_garbage_is_no_record(garbage: bytes) -> None:
    with pytest.raises(BadRecord):
        verify(memoryview(garbage), BLOCK)


def test_many_random_changes() -> None:
    chance = random.Random(4)
    whole = bytes(sealed(chance.randbytes(5000)))
    for _ in range(500):
        record = bytearray(whole)
        for _ in range(chance.randint(1, 6)):
            begin = chance.randrange(len(record))
            width = chance.choice([1, 2, 8, 512])
            record[begin : begin + width] = chance.randbytes(len(record[begin : begin + width]))
        if record != whole:
            with pytest.raises(BadRecord):
                verify(memoryview(record), BLOCK)
