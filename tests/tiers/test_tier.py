"""One tier: what it takes for a block, what it refuses, what it takes out, and what it counts."""

from __future__ import annotations

import os
import random
import struct
from typing import TYPE_CHECKING

import pytest
import xxhash
from tier_bench import PAGE, RAW, Bench, above, content, get, name, put, settle, there

from kvkeep.store.backends.buffers import aligned
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.codecs import BlockShape, make_codec
from kvkeep.store.tiers import Inclusive, Tier, TierSpec
from kvkeep.store.tiers.record import HEADER_BYTES, read_header, seal
from kvkeep.testing.backend_hooks import block_id

if TYPE_CHECKING:
    from pathlib import Path

    from faults import FaultyBackend

KEY = bytes(range(32))
BLOCK = name(0)


def raw_record(block: bytes, size: int = RAW) -> memoryview:
    """A record as memory has it: room for a header, and the raw bytes."""
    record = aligned(HEADER_BYTES + size)
    record[HEADER_BYTES:] = content(block, size)
    return record


def load(tier: Tier, block: bytes, size: int = RAW) -> bytes | None:
    """The raw bytes that a tier reads; None: it has none for us."""
    record = tier.load(block, size, lambda: aligned(HEADER_BYTES + size))
    return None if record is None else bytes(record[HEADER_BYTES:])


def stored(place: FaultyBackend, block: bytes) -> memoryview:
    """The record as it lies in the place."""
    record = place.inner.get(block, aligned)
    assert record is not None
    return record


def forged(
    record: memoryview, *, version: int | None = None, raw_bytes: int | None = None
) -> memoryview:
    """The record with fields of its header changed and its checksum made right again."""
    changed = aligned(len(record))
    changed[:] = record
    if version is not None:
        struct.pack_into("<H", changed, 8, version)
    if raw_bytes is not None:
        struct.pack_into("<Q", changed, 64, raw_bytes)
    changed[120:128] = xxhash.xxh3_64_digest(bytes(changed[:120]))
    return changed


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("size", [4, 1000, RAW, 3 * PAGE, 100_000])
def test_what_is_saved_is_loaded(codec: str, key: bytes | None, size: int, bench: Bench) -> None:
    tier = bench.tier(bench.disk(), codec, key=key)
    assert tier.save(BLOCK, raw_record(BLOCK, size))
    assert load(tier, BLOCK, size) == content(BLOCK, size)
    assert tier.counters.hits == tier.counters.writes == 1
    assert tier.counters.read_bytes == tier.counters.written_bytes > HEADER_BYTES
    assert tier.catalogue.total_bytes == tier.counters.written_bytes


@pytest.mark.parametrize("fault", ["flip", "truncate"])
def test_what_is_damaged_above_is_found_good_below(fault: str, bench: Bench) -> None:
    bad, good = bench.disk(at="bad"), bench.disk(at="good")
    store = bench.store(16, bad, good)
    put(store, range(8))
    settle(store)
    store.memory.remove([name(number) for number in range(8)])
    getattr(bad, fault)(times=3)
    assert get(store, range(8)) == 8
    settle(store)
    first, second = store.tiers
    assert (first.counters.damaged, first.counters.hits) == (3, 5)
    assert (second.counters.damaged, second.counters.hits) == (0, 3)
    assert bad.calls["quarantine"] == 3
    assert len(there(first)) == 5, "what was bad is not found again"
    assert first.breaker.state == "closed", "the place did what it was asked to"
    # It is put there anew by the next put, and once.
    put(store, range(8), wait=20)
    assert there(first) == list(range(8))
    assert first.counters.writes == 11
    assert second.counters.writes == 8


def damages(record: memoryview) -> dict[str, bytes]:
    """What a place could have in the place of a record."""
    whole = bytes(record)
    other = raw_record(name(1))
    seal(other, name(1), 0, RAW)
    return {
        "a flipped bit in the payload": whole[:-1] + bytes([whole[-1] ^ 1]),
        "a flipped bit in the header": whole[:20] + bytes([whole[20] ^ 16]) + whole[21:],
        "its end is missing": whole[:-1],
        "its header alone": whole[:HEADER_BYTES],
        "half a header": whole[:60],
        "one byte": whole[:1],
        "something hangs behind it": whole + b"\0",
        "nothing known": random.Random(1).randbytes(len(whole)),
        "zeros": bytes(len(whole)),
        "another block's": bytes(other),
        "a length that is not its own": bytes(forged(memoryview(whole + b"more"), raw_bytes=RAW)),
    }


@pytest.mark.parametrize("kind", damages(memoryview(bytes(200))))
@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_what_is_not_the_record_is_taken_out(kind: str, codec: str, bench: Bench) -> None:
    place = bench.disk()
    tier = bench.tier(place, codec)
    assert tier.save(BLOCK, raw_record(BLOCK))
    bad = aligned(len(damages(stored(place, BLOCK))[kind]))
    bad[:] = damages(stored(place, BLOCK))[kind]
    place.inner.put(BLOCK, bad)
    assert load(tier, BLOCK) is None
    assert (tier.counters.damaged, tier.counters.hits, tier.counters.errors) == (1, 0, 0)
    assert place.calls["quarantine"] == 1
    assert there(tier) == []
    assert not tier.knows(BLOCK)
    assert tier.breaker.state == "closed"
    assert tier.save(BLOCK, raw_record(BLOCK))
    assert load(tier, BLOCK) == content(BLOCK)


@pytest.mark.parametrize("more", [-8, 8])
def test_a_raw_record_whose_length_is_not_the_one_it_names_is_damaged(
    more: int, bench: Bench
) -> None:
    """Its checksums are right, as somebody's would be who writes records and gets it wrong."""
    place = bench.disk()
    tier = bench.tier(place)
    record = aligned(HEADER_BYTES + RAW + more)
    seal(record, BLOCK, 0, RAW)
    place.inner.put(BLOCK, record)
    assert load(tier, BLOCK) is None
    assert (tier.counters.damaged, tier.counters.hits) == (1, 0)
    assert there(tier) == []


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_memory_is_not_taken_for_a_record_that_is_too_large(codec: str, bench: Bench) -> None:
    place = bench.disk(4096)
    tier = bench.tier(place, codec)
    huge = aligned(2 << 20)
    seal(huge, BLOCK, tier.codec.number, RAW)
    place.inner.put(BLOCK, huge)
    taken: list[int] = []

    def room() -> memoryview:
        taken.append(1)
        return aligned(HEADER_BYTES + RAW)

    assert tier.load(BLOCK, RAW, room) is None
    assert not taken
    assert len(tier.records.scratch._buffer) < 1 << 20
    assert (tier.counters.refused, tier.counters.damaged) == (1, 0)
    assert not tier.serves(BLOCK)
    assert tier.breaker.state == "closed"


def test_another_length_than_was_asked_for_is_refused_and_stays(bench: Bench) -> None:
    place = bench.disk()
    tier = bench.tier(place)
    tier.save(BLOCK, raw_record(BLOCK))
    assert load(tier, BLOCK, RAW - 100) is None
    assert (tier.counters.refused, tier.counters.damaged) == (1, 0)
    assert there(tier) == [0]
    assert load(tier, BLOCK) == content(BLOCK)


def test_exact_records_of_another_codec_are_read(bench: Bench) -> None:
    place = bench.disk()
    written = bench.tier(place, "lossless")
    written.save(BLOCK, raw_record(BLOCK))
    assert read_header(stored(place, BLOCK)).codec == 1
    raw = bench.tier(place, "raw")
    assert load(raw, BLOCK) == content(BLOCK)
    raw.save(name(1), raw_record(name(1)))
    assert load(written, name(1)) == content(name(1))
    assert (raw.counters.hits, written.counters.hits) == (1, 1)


@pytest.mark.parametrize("codec", ["lossless", "int8"])
def test_raw_records_in_a_tier_with_a_codec_stay_what_they_are(codec: str, bench: Bench) -> None:
    place = bench.disk()
    blocks = [name(number) for number in range(12)]
    raw = bench.tier(place)
    for block in blocks:
        raw.save(block, raw_record(block))
    spec = bench.spec(place, codec, readers=1)
    tier = Tier(spec)
    first, second = (tier.load(b, RAW, lambda: aligned(PAGE)) for b in blocks[:2])
    assert first is not None
    assert second is not None
    assert bytes(first[HEADER_BYTES:]) == content(blocks[0]), "what is read next is elsewhere"
    store = bench.store(64, spec)
    assert get(store, range(12)) == 12
    assert above(store) == [*range(12)], "they were promoted"


REFUSED = {
    "int8, is lossy, and the tier's is exact": (("int8", None), ("raw", None)),
    "is not encrypted, and those of this tier are": (("raw", None), ("raw", KEY)),
    "is encrypted, and this tier has no key": (("raw", KEY), ("raw", None)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_records_that_are_not_for_a_tier_are_refused_and_written_anew(
    kind: str, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvkeep.tiers")
    theirs, ours = REFUSED[kind]
    place = bench.disk()
    written = bench.tier(place, theirs[0], key=theirs[1])
    written.save(BLOCK, raw_record(BLOCK))
    before = bytes(stored(place, BLOCK))
    tier = bench.spec(place, ours[0], key=ours[1])
    store = bench.store(16, tier)
    tier = store.tiers[0]
    assert get(store, [0]) == 0
    assert (tier.counters.refused, tier.counters.damaged) == (1, 0)
    assert kind in caplog.text
    assert place.calls["quarantine"] == 0
    assert bytes(stored(place, BLOCK)) == before, "it stays as it is"
    assert tier.breaker.state == "closed"
    assert put(store, [0], wait=20).kept == [0], "as if it were not there"
    assert read_header(stored(place, BLOCK)).codec == tier.codec.number
    store.memory.remove([BLOCK])
    assert get(store, [0]) == 1


def test_another_version_is_refused_and_written_anew(bench: Bench) -> None:
    place = bench.disk()
    bench.tier(place).save(BLOCK, raw_record(BLOCK))
    place.inner.put(BLOCK, forged(stored(place, BLOCK), version=9))
    store = bench.store(16, place)
    tier = store.tiers[0]
    assert store.knows(BLOCK)
    assert get(store, [0]) == 0
    assert (tier.counters.refused, tier.counters.damaged) == (1, 0)
    assert there(tier) == [0]
    assert not store.knows(BLOCK)
    assert store.locate([BLOCK]) == []
    assert put(store, [0], wait=20).kept == [0]
    store.memory.remove([BLOCK])
    assert get(store, [0]) == 1


def test_a_record_of_another_key_is_refused_and_left_alone(bench: Bench) -> None:
    place = bench.disk()
    mine = bench.tier(place, "raw", key=KEY)
    mine.save(BLOCK, raw_record(BLOCK))
    other = bench.tier(place, "raw", key=bytes(32))
    assert load(other, BLOCK) is None
    assert other.fetch(BLOCK) is None
    assert (other.counters.damaged, other.counters.refused) == (0, 2)
    assert load(mine, BLOCK) is not None
    assert other.save(BLOCK, raw_record(BLOCK)), "it is written anew"
    assert load(other, BLOCK) is not None


def foreign(place: DiskBackend, block: bytes, size: int) -> str:
    """A file under the name of a block that is no record; it takes no room on the disk."""
    path = place._directory.path(block)
    with open(path, "wb") as file:
        file.truncate(size)
    return path


@pytest.mark.parametrize("size", [1 << 40, 11 << 20, 9 << 20, 1 << 20])
def test_a_large_file_under_a_blocks_name_is_put_aside_before_others_go(
    tmp_path: Path, size: int
) -> None:
    place = DiskBackend(tmp_path / "store", 10 << 20)
    tier = Tier(TierSpec("file", place, make_codec("raw", BlockShape()), lambda _number: None))
    for number in range(100):
        place.put(block_id(number), memoryview(bytes(20_000)))
    foreign(place, block_id(500), size)
    with open(place._directory.path(block_id(500)).removesuffix("f4") + "core", "wb") as file:
        file.truncate(11 << 20)  # and one that is nobody's
    tier.relist()
    assert len(tier.catalogue) == 100
    assert (tier.counters.damaged, tier.counters.evictions) == (1, 0)
    for number in range(200, 210):
        assert tier.save(block_id(number), raw_record(block_id(number)))
    assert tier.counters.evictions == tier.counters.drops == 0
    assert place.used() == sum(-(-one.size // 4096) * 4096 for one in place.list()) + sum(
        -(-size // 4096) * 4096 for _ in os.listdir(tmp_path / "store" / "quarantine")
    )


def test_nothing_goes_where_all_of_it_would_not_suffice(tmp_path: Path) -> None:
    place = DiskBackend(tmp_path / "store", 20 * 4096)
    tier = Tier(TierSpec("file", place, make_codec("raw", BlockShape()), lambda _number: None))
    for number in range(10):
        place.put(block_id(number), memoryview(bytes(4000)))
    tier.relist()
    tier.catalogue.pin([block_id(number) for number in range(8)], 60.0, 1 << 20)
    assert not tier._space.make_room(3 * 4096)
    assert tier.counters.evictions == 0
    assert tier._space.make_room(2 * 4096)
    assert tier.counters.evictions == 2, "whole units are counted: no more than must go"


def test_what_the_place_lost_is_a_miss_and_is_forgotten(bench: Bench) -> None:
    place = bench.memory(16)
    tier = bench.tier(place)
    place.lose(times=1)
    assert tier.save(BLOCK, raw_record(BLOCK)), "it said so"
    assert tier.knows(BLOCK)
    assert load(tier, BLOCK) is None
    assert (tier.counters.misses, tier.counters.damaged) == (1, 0)
    assert not tier.knows(BLOCK)


def test_what_others_wrote_is_not_sent_again(bench: Bench) -> None:
    place = bench.disk()
    ours, theirs = bench.tier(place), bench.tier(place)
    theirs.save(BLOCK, raw_record(BLOCK))
    assert ours.save(BLOCK, raw_record(BLOCK))
    assert (ours.counters.already, ours.counters.writes) == (1, 0)
    assert place.calls["put"] == 1
    assert ours.knows(BLOCK)


def test_a_block_larger_than_the_tier_lets_nothing_go(bench: Bench) -> None:
    tier = bench.tier(bench.memory(4))
    for number in range(4):
        assert tier.save(name(number), raw_record(name(number)))
    assert not tier.save(name(9), raw_record(name(9), 5 * PAGE))
    assert there(tier) == [0, 1, 2, 3]
    assert (tier.counters.drops, tier.counters.evictions) == (1, 0)


def test_a_place_that_finds_no_room_whatever_goes_is_given_up(bench: Bench) -> None:
    place = bench.memory(4)
    tier = bench.tier(place)
    for number in range(4):
        tier.save(name(number), raw_record(name(number)))
    place.fill_up()
    assert not tier.save(name(9), raw_record(name(9)))
    assert tier.counters.drops == 1
    assert tier.breaker.state == "closed", "full is not broken"
    place.heal()
    assert tier.save(name(9), raw_record(name(9)))


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_a_mixed_bag_of_faults_never_gives_a_wrong_byte(codec: str, bench: Bench) -> None:
    place = bench.disk(2048)
    tier = bench.tier(place, codec, breaker_limit=1 << 30)
    chance = random.Random(9)
    blocks = [name(number) for number in range(20)]
    sizes = [chance.choice([100, RAW, 9000]) for _ in blocks]
    for _ in range(300):
        at = chance.randrange(len(blocks))
        fault = chance.choice(["flip", "truncate", "lose", "fill_up", "fail", ""])
        if fault:
            getattr(place, fault)(times=1)
        if chance.random() < 0.5:
            tier.save(blocks[at], raw_record(blocks[at], sizes[at]))
        found = load(tier, blocks[at], sizes[at])
        assert found is None or found == content(blocks[at], sizes[at])
        place.heal()
    for block, size in zip(blocks, sizes, strict=True):
        found = load(tier, block, size)
        if found is None:
            assert tier.save(block, raw_record(block, size))
            found = load(tier, block, size)
        assert found == content(block, size)
    tier.catalogue.check()


def test_a_store_over_a_damaged_tier_alone_ends_at_the_first_bad_block(bench: Bench) -> None:
    place = bench.disk()
    store = bench.store(16, place, policy=Inclusive())
    put(store, range(6))
    settle(store)
    store.memory.remove([name(number) for number in range(6)])
    bad = stored(place, name(3))
    bad[-1] ^= 1
    place.inner.put(name(3), bad)
    assert get(store, range(6)) == 3
    settle(store)
    assert 3 not in there(store.tiers[0])
    assert set(above(store)) >= {0, 1, 2}
