"""The reader against publishers that lose, repeat, restart, and lie."""

from __future__ import annotations

import threading
import time
import tracemalloc
from contextlib import contextmanager

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from listening import Mirror, eventually

from kvkeep import PagedCache
from kvkeep.core.errors import InvalidValue
from kvkeep.serve.kv_events import (
    AllBlocksCleared,
    BlockStored,
    EventPublisher,
    EventReader,
    Source,
)
from kvkeep.serve.kv_events.reader import _backoff_s
from kvkeep.serve.kv_events.wire import END, Batch, MessageAction, Stream, decode, encode, seq_frame

ANY = "tcp://127.0.0.1:*"


def block(number: int) -> BlockStored:
    return BlockStored([number], None, [number], 1, None, "GPU", None)


def payload(*events, rank: int | None = 0) -> bytes:
    return encode(Batch(time.time(), list(events), rank))


class Theirs:
    """A publisher as vLLM's: what was sent can be asked for again, and there is no snapshot.

    A test says what is lost on the way (`send` with ``lost``) and what its history holds.
    """

    def __init__(self, endpoint: str = ANY, replay: str | None = ANY) -> None:
        self.context = zmq.Context()
        self.pub = self.context.socket(zmq.XPUB)
        self.pub.bind(endpoint)
        self.endpoint = self.pub.getsockopt(zmq.LAST_ENDPOINT).decode()
        self.history: list[tuple[int, bytes]] = []
        self.seq = -1
        self.asked: list[int] = []
        self.replay = None
        self.ended = False
        self.router = None
        self.thread = None
        if replay is not None:
            self.router = self.context.socket(zmq.ROUTER)
            self.router.bind(replay)
            self.replay = self.router.getsockopt(zmq.LAST_ENDPOINT).decode()
            self.thread = threading.Thread(target=self.serve)
            self.thread.start()

    def source(self, instance: str = "a") -> Source:
        return Source(instance, self.endpoint, self.replay)

    def await_reader(self) -> None:
        assert self.pub.poll(20_000), "nobody subscribes"
        self.pub.recv()

    def send(self, *events, lost: bool = False, raw: bytes | None = None) -> None:
        self.seq += 1
        made = payload(*events) if raw is None else raw
        self.history.append((self.seq, made))
        if not lost:
            self.pub.send_multipart((b"", seq_frame(self.seq), made))

    def serve(self) -> None:
        while not self.ended:
            if not self.router.poll(20):
                continue
            who, _, start = self.router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            for seq, made in list(self.history):
                if seq >= first:
                    self.router.send_multipart((who, b"", b"", seq_frame(seq), made))
            self.router.send_multipart((who, b"", b"", END, b""))

    def close(self) -> None:
        self.ended = True
        if self.thread is not None:
            self.thread.join()
        self.context.destroy(linger=0)


@contextmanager
def reading(*sources: Source, check_s: float = 30.0, reply_timeout_s: float = 0.5):
    mirror = Mirror()
    reader = EventReader(sources, mirror, check_s=check_s, reply_timeout_s=reply_timeout_s)
    try:
        yield mirror, reader
    finally:
        reader.close()


@pytest.fixture
def theirs():
    made = Theirs()
    yield made
    made.close()


def test_what_was_sent_before_is_asked_for(theirs):
    for number in range(5):
        theirs.send(block(number))
    with reading(theirs.source()) as (mirror, reader):
        eventually(lambda: mirror.of() == {0, 1, 2, 3, 4})
        (stats,) = reader.stats().values()
        assert not stats.partial


def test_a_gap_is_filled_from_the_replay_and_nothing_is_taken_twice(theirs):
    with reading(theirs.source()) as (mirror, reader):
        theirs.await_reader()
        theirs.send(block(0))
        eventually(lambda: mirror.of() == {0})
        for number in range(1, 40):
            theirs.send(block(number), lost=number % 7 in (2, 3))
        eventually(lambda: mirror.of() == set(range(40)))  # `of` refuses copies
        (stats,) = reader.stats().values()
        assert stats.gaps >= 1
        assert stats.resets == mirror.clears == 0


def test_what_is_lost_at_the_end_is_found_without_another_message(theirs):
    with reading(theirs.source(), check_s=0.1) as (mirror, _):
        theirs.await_reader()
        theirs.send(block(1))
        eventually(lambda: mirror.of() == {1})
        theirs.send(block(2), lost=True)
        eventually(lambda: mirror.of() == {1, 2})


def test_a_history_that_is_too_short_is_a_part_of_the_truth(theirs):
    with reading(theirs.source()) as (mirror, reader):
        theirs.await_reader()
        theirs.send(block(0))
        eventually(lambda: mirror.of() == {0})
        for number in range(1, 6):
            theirs.send(block(number), lost=True)
        del theirs.history[:3]
        theirs.send(block(6))
        eventually(lambda: mirror.of() == {3, 4, 5, 6})
        (stats,) = reader.stats().values()
        assert stats.partial
        assert mirror.clears == 1


@pytest.mark.parametrize("replay", [ANY, None])
def test_a_restart_begins_anew(replay):
    first = Theirs(replay=replay)
    endpoint, again = first.endpoint, first.replay
    with reading(first.source()) as (mirror, reader):
        first.await_reader()
        for number in range(5):
            first.send(block(number))
        eventually(lambda: mirror.of() == set(range(5)))
        first.close()
        second = Theirs(endpoint, again)
        try:
            second.await_reader()
            second.send(block(100))
            second.send(block(101))
            eventually(lambda: mirror.of() == {100, 101})
            (stats,) = reader.stats().values()
            assert stats.restarts >= 1
        finally:
            second.close()


def test_a_restart_whose_numbers_go_on_is_found_by_its_last_batch():
    first = Theirs()
    endpoint, again = first.endpoint, first.replay
    with reading(first.source()) as (mirror, _):
        first.await_reader()
        for number in range(3):
            first.send(block(number))
        eventually(lambda: mirror.of() == {0, 1, 2})
        first.close()
        second = Theirs.__new__(Theirs)
        # It has sent three by the time that anybody can listen again.
        sent = [(seq, payload(block(seq + 10))) for seq in range(3)]
        second.__init__(endpoint, again)
        second.history, second.seq = sent, 2
        try:
            second.await_reader()
            second.send(block(13))
            eventually(lambda: mirror.of() == {10, 11, 12, 13})
        finally:
            second.close()


def test_without_replay_a_gap_is_the_end_of_what_was_known():
    made = Theirs(replay=None)
    try:
        with reading(made.source()) as (mirror, reader):
            made.await_reader()
            made.send(block(0))
            made.send(block(1), lost=True)
            made.send(block(2))
            made.send(block(3))
            eventually(lambda: mirror.of() == {2, 3})
            (stats,) = reader.stats().values()
            assert stats.partial
    finally:
        made.close()


def test_a_replay_that_is_silent_is_not_waited_for_forever():
    made = Theirs(replay=None)
    dead = zmq.Context()
    router = dead.socket(zmq.ROUTER)
    router.bind(ANY)
    silent = router.getsockopt(zmq.LAST_ENDPOINT).decode()
    try:
        with reading(Source("a", made.endpoint, silent), reply_timeout_s=0.1) as (mirror, _):
            made.await_reader()
            made.send(block(0))
            eventually(lambda: mirror.of() == {0})
            made.send(block(1), lost=True)
            made.send(block(2))  # is given up for asking what was before

            def goes_on() -> bool:
                made.send(block(made.seq + 1))
                return bool(mirror.of()) and 0 not in mirror.of()

            eventually(goes_on)
    finally:
        dead.destroy(linger=0)
        made.close()


def test_ours_gives_a_snapshot_where_history_is_too_short():
    cache = PagedCache(64, 2)
    publisher = EventPublisher(cache, ANY, ANY, history=1)

    def store(*tokens: int) -> None:
        sequence = cache.open([*tokens, 0])
        sequence.copies()
        sequence.publish(len(tokens))
        sequence.close()

    try:
        for number in range(12):
            store(1, 1, number, number)
            eventually(lambda: not publisher._queue)
        eventually(lambda: publisher.stats.batches > 3)
        with reading(Source("a", publisher.endpoint, publisher.replay)) as (mirror, reader):
            eventually(lambda: len(mirror.of()) == 13)
            (stats,) = reader.stats().values()
            assert stats.snapshots == 1
            assert not stats.partial
            store(7, 7)
            eventually(lambda: len(mirror.of()) == 14)
            assert stats.snapshots == 1
    finally:
        publisher.close()


def test_ranks_and_instances_are_told_apart():
    made = [Theirs() for _ in range(3)]
    try:
        sources = [made[0].source("a"), made[1].source("a"), made[2].source("b")]
        with reading(*sources) as (mirror, _):
            for one, rank in zip(made, (0, 1, 0), strict=True):
                one.await_reader()
                one.send(raw=payload(block(made.index(one)), rank=rank))
            eventually(lambda: len(mirror.held) == 3)
            eventually(
                lambda: [mirror.of("a"), mirror.of("a", 1), mirror.of("b")] == [{0}, {1}, {2}]
            )
    finally:
        for one in made:
            one.close()


# --- what is no batch ------------------------------------------------------------------------

BOMB = b"\x91" * 100_000  # an array in an array in an array …
LONG = b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff"  # says that 4 billion events come


@pytest.mark.parametrize(
    "junk",
    [
        b"", b"\xc1", b"\x80", BOMB, LONG, payload(block(1))[:-3], payload(block(1)) + b"\x00",
        msgspec.msgpack.encode([0.0, [{"type": "BlockStored"}], 0]),
        msgspec.msgpack.encode([0.0, "events", 0]), msgspec.msgpack.encode([0.0]),
    ],
)  # fmt: skip
def test_junk_is_counted_and_skipped(theirs, junk):
    with reading(theirs.source()) as (mirror, reader):
        theirs.await_reader()
        theirs.send(block(0))
        theirs.send(raw=junk)
        theirs.send(block(2))
        eventually(lambda: mirror.of() == {0, 2})
        (stats,) = reader.stats().values()
        assert stats.malformed + stats.unread == 1
        assert stats.gaps == 0


def stored(**more) -> dict:
    event = {
        "type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1],
        "block_size": 1, "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip
    return {**event, **more}


@pytest.mark.parametrize(
    "event",
    [
        stored(block_hashes=[b"x" * 65]), stored(parent_block_hash=b"x" * 65),
        stored(block_hashes=[0] * (2**20 + 1)), stored(token_ids=[0] * (2**22 + 1)),
        stored(lora_name="x" * 257), stored(medium="x" * 257), stored(extra_keys=[None] * 2**21),
        stored(kv_cache_spec_kind="x" * 257), {"type": "BlockRemoved", "block_hashes": [b"x" * 65],
        "medium": None},
    ],
)  # fmt: skip
def test_an_event_that_holds_too_much_is_left_out(event):
    batch, unread = decode(msgspec.msgpack.encode([0.0, [event, stored()], 0]))
    assert unread == 1
    assert batch.events == [BlockStored([1], None, [1], 1, None, "GPU", None)]


@pytest.mark.parametrize(
    "batch",
    [
        [0.0, [{"type": "AllBlocksCleared"}] * (2**17 + 1), 0],
        [0.0, [0] * (2**17 + 1), 0],
        [0.0, [], -1],
        [0.0, [], 2**16],
    ],
)
def test_a_batch_that_holds_too_much_is_none(batch):
    with pytest.raises(InvalidValue):
        decode(msgspec.msgpack.encode(batch))


@pytest.mark.parametrize("length", [2**22 + 1, 2**32 - 1])
def test_no_memory_is_taken_for_what_a_list_claims_to_hold(length):
    claims = b"\xdd" + length.to_bytes(4, "big")
    event = msgspec.msgpack.encode(stored(token_ids=None)).replace(
        b"token_ids\xc0", b"token_ids" + claims
    )
    tracemalloc.start()
    try:
        with pytest.raises(InvalidValue):  # it is cut off where the tokens should be
            decode(b"\x93\xcb" + bytes(8) + b"\x91" + event)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_who_sends_too_much_at_once_is_cut_off_and_the_others_are_not():
    made = [Theirs(), Theirs()]
    try:
        sources = [made[0].source("a"), made[1].source("b")]
        with reading(*sources) as (mirror, reader):
            for one in made:
                one.await_reader()
            made[0].send(raw=bytes((8 << 20) + 1))
            made[1].send(block(0))
            eventually(lambda: mirror.of("b") == {0})
            eventually(lambda: not reader.stats()[sources[0]].connected)
            assert reader.stats()[sources[0]].malformed == 0
    finally:
        for one in made:
            one.close()


def test_frames_that_are_none(theirs):
    with reading(theirs.source()) as (mirror, reader):
        theirs.await_reader()
        for frames in ([b""], [b"", b"123"], [b"", b"1", b"2"], [b""] * 9, [b"", b"x" * 9, b""]):
            theirs.pub.send_multipart(frames)
        theirs.send(block(0))
        eventually(lambda: mirror.of() == {0})
        (stats,) = reader.stats().values()
        assert stats.malformed == 5


def test_an_event_of_tomorrow_does_not_hide_those_of_today():
    events = [
        {"type": "BlockMoved", "from": "GPU", "to": "CPU"},
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "tomorrow": [1, {"x": 2}]},
        {"type": "AllBlocksCleared"},
        {"type": "BlockRemoved", "block_hashes": [b"12345678" * 4], "medium": None},
    ]
    batch, unread = decode(msgspec.msgpack.encode([1.5, events]))
    assert unread == 1
    assert [type(event).__name__ for event in batch.events] == [
        "BlockRemoved", "AllBlocksCleared", "BlockRemoved",
    ]  # fmt: skip
    assert batch.data_parallel_rank is None


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_at_all_do_more_than_be_refused(junk):
    try:
        decode(junk)
    except InvalidValue:
        return


def test_a_receiver_that_fails_does_not_end_the_reading(theirs):
    class Picky(Mirror):
        def apply(self, instance, events, rank=0):
            if isinstance(events[0], AllBlocksCleared):
                raise RuntimeError("not today")
            super().apply(instance, events, rank)

    mirror = Picky()
    reader = EventReader([theirs.source()], mirror)
    try:
        theirs.await_reader()
        theirs.send(AllBlocksCleared())
        theirs.send(block(1))
        eventually(lambda: mirror.of() == {1})
    finally:
        reader.close()


@pytest.mark.parametrize("endpoint", ["", "localhost", "tcp://x", "tcp://x:99999", "http://x:80"])
def test_an_address_that_is_none(endpoint):
    with pytest.raises(InvalidValue, match="an endpoint is"):
        Source("a", endpoint)
    with pytest.raises(InvalidValue, match="an endpoint is"):
        Source("a", "tcp://127.0.0.1:5557", endpoint)


def test_closing_leaves_no_thread(theirs):
    before = set(threading.enumerate())
    with reading(theirs.source(), Source("b", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2")):
        pass
    assert set(threading.enumerate()) <= before


# --- sequence numbers ------------------------------------------------------------------------


def test_numbers():
    stream = Stream()
    assert stream.classify(4) is MessageAction.GAP
    assert stream.classify(0) is MessageAction.TAKE
    stream.advance(0, b"0", live=True)
    assert stream.classify(2) is MessageAction.GAP
    stream.advance(1, b"1")  # from a replay
    stream.advance(2, b"2")
    assert [stream.classify(1), stream.classify(2)] == [MessageAction.SKIP, MessageAction.SKIP]
    assert stream.classify(3) is MessageAction.TAKE
    stream.advance(3, b"3", live=True)
    assert stream.classify(3) is MessageAction.RESTART
    assert stream.classify(0) is MessageAction.RESTART
    assert stream.is_last(3, b"3")
    assert not stream.is_last(3, b"three")
    assert not stream.is_last(2, b"2")
    stream.reset(anywhere=True)
    assert stream.classify(77) is MessageAction.TAKE


def test_the_backoff_grows_to_a_bound_however_long_a_publisher_is_silent():
    assert [_backoff_s(5.0, timeouts) for timeouts in (1, 2, 3, 4)] == [10.0, 20.0, 40.0, 60.0]
    assert _backoff_s(5.0, 10_000) == 60.0


# --- sources that come and go ----------------------------------------------------------------


def test_sources_come_and_go_and_come_back():
    """Nothing of a source arrives once it is not followed; back again, its snapshot tells all."""
    caches = [PagedCache(64, 1) for _ in range(3)]
    made = [EventPublisher(cache, ANY, ANY) for cache in caches]
    sources = [
        Source(name, one.endpoint, one.replay) for name, one in zip("abc", made, strict=True)
    ]
    mirror = Mirror()
    reader = EventReader([], mirror, check_s=0.1)

    def fill(number: int, count: int) -> None:
        sequence = caches[number].open([number * 1000 + at for at in range(count)])
        sequence.publish(count)
        sequence.close()

    try:
        fill(0, 5)
        reader.follow(sources[:2])
        eventually(lambda: len(mirror.of("a")) == 5)
        fill(1, 7)
        eventually(lambda: len(mirror.of("b")) == 7)
        assert set(reader.stats()) == set(sources[:2])
        reader.unfollow("a")
        assert set(reader.stats()) == {sources[1]}
        told = len(mirror.events)
        fill(0, 9)
        reader.follow(sources[1:])  # one of them is known
        fill(2, 3)
        eventually(lambda: len(mirror.of("c")) == 3)
        assert len(mirror.of("a")) == 5, "it was told after it left"
        assert len(mirror.events) > told
        mirror.clear("a")
        reader.follow(sources[:1])
        eventually(lambda: len(mirror.of("a")) == 9)
        assert len(mirror.of("b")) == 7
    finally:
        reader.close()
        for one in made:
            one.close()


def test_a_source_that_cannot_be_followed_is_left_out(caplog):
    mirror = Mirror()
    reader = EventReader([], mirror)
    cache = PagedCache(8, 1)
    publisher = EventPublisher(cache, ANY, ANY)
    try:
        good = Source("b", publisher.endpoint, publisher.replay)
        reader.follow([Source("a", "ipc:///" + "x" * 300), good])
        eventually(lambda: good in reader.stats())
        sequence = cache.open([1, 2])
        sequence.publish(2)
        sequence.close()
        eventually(lambda: len(mirror.of("b")) == 2)
        assert set(reader.stats()) == {good}
        assert "KV events of a are not read" in caplog.text
    finally:
        reader.close()
        publisher.close()


def test_what_is_followed_while_everybody_talks():
    """Sources come and go while they publish; in the end each is known as it is."""
    caches = [PagedCache(256, 1) for _ in range(4)]
    made = [EventPublisher(cache, ANY, ANY) for cache in caches]
    sources = [Source(str(at), one.endpoint, one.replay) for at, one in enumerate(made)]
    mirror = Mirror()
    reader = EventReader(sources[:1], mirror, check_s=0.1)
    ended = threading.Event()

    def talk(cache: PagedCache) -> None:
        for number in range(10_000):
            if ended.is_set():
                break
            sequence = cache.open([number * 7 + at for at in range(5)])
            sequence.publish(5)
            sequence.close()
            time.sleep(0.001)

    talking = [threading.Thread(target=talk, args=(cache,)) for cache in caches]
    for thread in talking:
        thread.start()
    try:
        for turn in range(40):
            name = str(turn % 4)
            reader.unfollow(name)
            mirror.clear(name)
            told = mirror.held.get((name, 0))
            time.sleep(0.005)
            assert mirror.held.get((name, 0)) is told is None
            reader.follow([sources[turn % 4]])
    finally:
        ended.set()
        for thread in talking:
            thread.join()
    try:
        for at, cache in enumerate(caches):
            eventually(
                lambda at=at, cache=cache: len(mirror.of(str(at))) == cache.stats().pages_cached
            )
    finally:
        reader.close()
        for one in made:
            one.close()
