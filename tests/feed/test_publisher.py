"""Our publisher against readers: ours, and the few lines of anybody's."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from listening import Mirror, eventually

from kvkeep import Namespace, PagedCache
from kvkeep.core.errors import InvalidValue
from kvkeep.core.keys import chain_keys, root_key
from kvkeep.serve.kv_events import (
    BlockStored,
    CacheBlocks,
    EventPublisher,
    EventReader,
    Source,
    salt_digest,
)
from kvkeep.serve.kv_events.publisher import _in_batches
from kvkeep.serve.kv_events.wire import END, MOST_BYTES, SNAPSHOT, Batch, decode, encode, seq_frame

ANY = "tcp://127.0.0.1:*"


def fill(cache: PagedCache, tokens, namespace="") -> None:
    sequence = cache.open(tokens, namespace)
    sequence.copies()
    sequence.publish(len(tokens))
    sequence.close()


def hashes(cache: PagedCache) -> set[int]:
    """What the cache holds, from its own tree."""
    found: set[int] = set()
    for space in cache.namespaces():
        path: list[bytes] = []
        for run in cache.runs(space):
            del path[run.depth :]
            parent = path[-1] if path else root_key(space)
            keys = chain_keys(parent, run.tokens.tobytes(), cache.page_size * 4)
            path.append(keys[-1])
            found |= {int.from_bytes(key[-8:], "big") for key in keys}
    return found


@pytest.fixture
def cache() -> PagedCache:
    return PagedCache(64, 4)


def test_a_reader_knows_what_the_cache_holds(cache):
    fill(cache, list(range(20)))  # before anybody publishes
    publisher = EventPublisher(cache, ANY, ANY)
    mirror = Mirror()
    reader = EventReader([Source("a", publisher.endpoint, publisher.replay)], mirror)
    try:
        eventually(lambda: mirror.of() == hashes(cache) != set())
        for salt in ("", "s", "t"):
            fill(cache, [*range(12), *range(100, 130)], salt)
        eventually(lambda: mirror.of() == hashes(cache))
        cache.evict(9)
        fill(cache, list(range(500, 540)))
        eventually(lambda: mirror.of() == hashes(cache))
        cache.clear("s")
        eventually(lambda: mirror.of() == hashes(cache))
        cache.clear()
        eventually(lambda: mirror.of() == set())
    finally:
        reader.close()
        publisher.close()
    (stats,) = reader.stats().values()
    assert stats.malformed == stats.unread == 0
    # A subscription may begin a moment after the snapshot: what was missed by that is asked for.
    assert stats.gaps <= stats.replays


def test_the_wire_is_vllms(cache):
    """Read with msgpack alone, as somebody would who knows only the schema."""
    publisher = EventPublisher(cache, ANY, ANY)
    context = zmq.Context()
    sub, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        sub.subscribe(b"kv")
        sub.connect(publisher.endpoint)
        dealer.connect(publisher.replay)

        def stored() -> dict:
            """The first that comes by after the subscription has."""
            while True:
                cache.clear()
                fill(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9], "pepper")
                if sub.poll(100):
                    frames.extend(sub.recv_multipart())
                    found = msgspec.msgpack.decode(frames[2])[1]
                    if found[-1]["type"] == "BlockStored":
                        return found[-1]
                    frames.clear()

        frames: list[bytes] = []
        event = stored()
        topic, seq, payload = frames
        assert topic == b"kv"
        at = int.from_bytes(seq, "big")
        when, _, rank = msgspec.msgpack.decode(payload)
        assert isinstance(when, float)
        assert rank is None
        keys = chain_keys(root_key(Namespace("pepper")), np.arange(1, 9, dtype="<i4").tobytes(), 16)
        assert event == {
            "type": "BlockStored",
            "block_hashes": [int.from_bytes(key[-8:], "big") for key in keys],
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [[salt_digest("pepper")], None],
        }
        assert b"pepper" not in payload
        dealer.send_multipart((b"", seq_frame(at)))
        again = dealer.recv_multipart()
        assert again == [b"", topic, seq, payload]
        while (again := dealer.recv_multipart())[2] != END:
            assert int.from_bytes(again[2], "big") > at
        assert again == [b"", b"", END, b""]
    finally:
        context.destroy(linger=0)
        publisher.close()


def test_what_is_no_request_is_not_answered(cache):
    publisher = EventPublisher(cache, ANY, ANY)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.connect(publisher.replay)
        for junk in ((b"",), (b"", b"short"), (b"x", seq_frame(0)), (b"", b"", b"")):
            dealer.send_multipart(junk)
        dealer.send_multipart((b"", seq_frame(SNAPSHOT)))
        assert dealer.recv_multipart()[3]
        assert publisher.stats.refused == 4
    finally:
        context.destroy(linger=0)
        publisher.close()


def test_a_full_queue_never_holds_the_cache_up_and_loses_nothing_for_good():
    cache = PagedCache(256, 4)
    publisher = EventPublisher(cache, ANY, ANY, queue=2)
    mirror = Mirror()
    reader = EventReader([Source("a", publisher.endpoint, publisher.replay)], mirror, check_s=0.2)
    rng = np.random.default_rng(1)
    try:
        with cache.lock:  # the thread cannot look at the cache: the queue runs over
            while publisher.stats.dropped < 20:
                fill(cache, rng.integers(0, 9, 40))
        eventually(lambda: mirror.of() == hashes(cache))
        assert publisher.stats.resyncs >= 1
    finally:
        reader.close()
        publisher.close()


def test_many_who_ask_for_a_snapshot_cost_the_cache_one_look(cache):
    """Ten at once: the tree is walked once a second at most, and each gets all of it."""
    fill(cache, list(range(60)))
    looks = []

    class Watched:
        page_size, groups, subscribe = cache.page_size, cache.groups, cache.subscribe

        def namespaces(self):
            looks.append(1)
            return cache.namespaces()

        def runs(self, space):
            return cache.runs(space)

    publisher = EventPublisher(Watched(), ANY, ANY)
    context = zmq.Context()
    try:
        eventually(lambda: publisher.stats.batches >= 2)
        before = len(looks)
        dealers = [context.socket(zmq.DEALER) for _ in range(10)]
        for dealer in dealers:
            dealer.connect(publisher.replay)
            dealer.send_multipart((b"", seq_frame(SNAPSHOT)))
        for dealer in dealers:
            mirror = Mirror()
            while (frames := dealer.recv_multipart())[2] != END:
                mirror.apply("a", decode(frames[3])[0].events)
            assert mirror.of() == hashes(cache)
        assert 1 <= len(looks) - before <= 3
        assert publisher.stats.snapshots == 10
    finally:
        context.destroy(linger=0)
        publisher.close()


def test_close_publishes_the_rest_and_leaves_no_thread(cache):
    before = set(threading.enumerate())
    publisher = EventPublisher(cache, ANY)
    fill(cache, list(range(40)))
    publisher.close()
    publisher.close()
    assert publisher.stats.events >= 2
    assert set(threading.enumerate()) <= before
    fill(cache, list(range(70, 90)))  # nobody is told any more
    assert cache.stats().hook_errors == 0


@pytest.mark.parametrize(
    "endpoint", ["nonsense", "tcp://127.0.0.1:99999", "tcp://nohost.invalid:1"]
)
def test_an_endpoint_that_cannot_be_bound(cache, endpoint):
    with pytest.raises(InvalidValue, match="an endpoint is tcp"):
        EventPublisher(cache, endpoint)


def test_an_endpoint_that_is_taken(cache):
    publisher = EventPublisher(cache, ANY)
    try:
        with pytest.raises(InvalidValue, match="in use"):
            EventPublisher(cache, publisher.endpoint)
    finally:
        publisher.close()


# --- the journal -----------------------------------------------------------------------------


def runs_of(cache):
    return [(space, list(cache.runs(space))) for space in cache.namespaces()]


def told(mirror: Mirror, events) -> None:
    mirror.apply("a", events)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2**20)), max_size=25), st.data())
def test_a_journal_mirrors_its_cache_and_survives_missed_events(steps, data):
    cache, journal, mirror = PagedCache(24, 2), CacheBlocks(2), Mirror()
    deaf = False

    def hear(event):
        if not deaf:
            told(mirror, journal.take(event))

    cache.subscribe(hear)
    for step, number in steps:
        rng = np.random.default_rng(number)
        if step < 3:
            fill(cache, rng.integers(0, 2, rng.integers(1, 14)), ("", "x")[number % 2])
        elif step == 3:
            cache.evict(number % 6)
        else:
            deaf = not deaf
            if not deaf:
                told(mirror, journal.reconcile(runs_of(cache)))
        if not deaf:
            assert mirror.of() == hashes(cache)
            fresh = Mirror()
            told(fresh, CacheBlocks(2).reconcile(runs_of(cache)))
            assert fresh.of() == hashes(cache)


def test_events_seen_in_the_runs_already_change_nothing():
    """What happens while the cache is being looked at is taken a second time."""
    cache, journal, mirror, late = PagedCache(12, 2), CacheBlocks(2), Mirror(), []
    cache.subscribe(late.append)
    rng = np.random.default_rng(5)
    for _ in range(30):
        fill(cache, rng.integers(0, 3, 12))
    told(mirror, journal.reconcile((space, cache.runs(space)) for space in cache.namespaces()))
    assert mirror.of() == hashes(cache)
    for event in late:
        told(mirror, journal.take(event))
    assert mirror.of() == hashes(cache)


def test_runs_without_tokens_are_not_told():
    cache, journal = PagedCache(12, 2, prefix="chain"), CacheBlocks(2)
    fill(cache, [1, 2, 3, 4])
    assert journal.reconcile((space, cache.runs(space)) for space in cache.namespaces()) == []
    cache.subscribe(lambda event: events.extend(journal.take(event)))
    events: list = []
    fill(cache, [5, 6, 7, 8])
    assert [type(event) for event in events] == [BlockStored]


@pytest.mark.parametrize(("page_size", "pages"), [(1, 70_000), (16, 65_536), (1024, 1024)])
def test_no_event_and_no_batch_is_too_large_for_a_reader(page_size, pages):
    """One prompt of up to a million tokens: told in pieces, each behind the one before."""
    cache = PagedCache(pages + 1, page_size)
    journal = CacheBlocks(page_size)
    with cache.open(np.arange(pages * page_size, dtype=np.int32)) as sequence:
        sequence.publish()
    told = journal.reconcile([(Namespace(), cache.runs(Namespace()))])
    for events in (told, CacheBlocks(page_size).reconcile(runs_of(cache))):
        assert all(event.extra_keys is None for event in events)
        assert sum(len(event.block_hashes) for event in events) == pages
        for event, before in zip(events[1:], events, strict=False):
            assert event.parent_block_hash == before.block_hashes[-1]
        batches = [encode(Batch(0.0, some, 0)) for some in _in_batches(events)]
        assert max(map(len, batches)) < MOST_BYTES // 2
        read = [event for payload in batches for event in decode(payload)[0].events]
        assert read == events
    gone = journal.reconcile([])
    assert sum(len(event.block_hashes) for event in gone) == pages
    assert len(gone) == -(-pages // 2**16)
    assert journal.reconcile([]) == []


def test_a_salt_is_told_once_at_the_beginning_of_a_prompt():
    cache = PagedCache(64, 4)
    journal = CacheBlocks(4)
    told: list[BlockStored] = []
    cache.subscribe(lambda event: told.extend(journal.take(event)))
    fill(cache, list(range(9)), "pepper")
    fill(cache, list(range(17)), "pepper")
    assert [event.extra_keys for event in told] == [[[salt_digest("pepper")], None], None]


def test_what_is_kept_for_replays_has_a_bound_in_bytes(cache, monkeypatch):
    monkeypatch.setattr("kvkeep.serve.kv_events.publisher._HISTORY_BYTES", 2000)
    publisher = EventPublisher(cache, ANY, ANY)
    try:
        for number in range(40):
            fill(cache, list(range(number * 100, number * 100 + 20)))
            eventually(lambda: not publisher._queue)
        eventually(lambda: publisher.stats.batches > 20)
        eventually(lambda: publisher._history[-1][0] == publisher._seq)
        assert 0 < publisher._history_bytes <= 2000
        assert publisher._history_bytes == sum(len(one) for _, one in publisher._history)
        mirror = Mirror()
        reader = EventReader([Source("a", publisher.endpoint, publisher.replay)], mirror)
        try:
            eventually(lambda: mirror.of() == hashes(cache))
        finally:
            reader.close()
    finally:
        publisher.close()


def test_what_waits_has_a_bound_in_tokens(monkeypatch):
    monkeypatch.setattr("kvkeep.serve.kv_events.publisher._QUEUE_TOKENS", 100)
    cache = PagedCache(256, 4)
    publisher = EventPublisher(cache, ANY, ANY)
    try:
        for number in range(30):
            fill(cache, list(range(number * 100, number * 100 + 20)))
        fill(cache, list(range(5000, 5200)))  # more than may wait at all
        eventually(lambda: not publisher._queue and not publisher._resync_due)
        assert publisher.stats.dropped > 0
        assert publisher._enqueued == publisher._dequeued
        mirror = Mirror()
        reader = EventReader([Source("a", publisher.endpoint, publisher.replay)], mirror)
        try:
            eventually(lambda: mirror.of() == hashes(cache))
        finally:
            reader.close()
    finally:
        publisher.close()
