"""A server on bad days: dead, emptied, hung, slow, garbled, cut off, full; and an object store."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from store_kv import counter, disk, get, open_store, put, quiet

from faults import FaultProxy

sys.path.append(str(Path(__file__).parents[1] / "backends"))
from object_server import ObjectServer
from servers import Server, needs_server, server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvkeep.store import KVStore

MEMORY = "memory://4MiB"
SHORT = "200ms"
LONG_S = 30.0
LENGTH = 24
_fresh = itertools.count(5000)


def prompt(number: int, length: int = LENGTH) -> range:
    """Prompts that share nothing."""
    return range(number * 1000, number * 1000 + length)


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with server() as one:
        yield one


@pytest.fixture
def proxy(running: Server) -> Iterator[FaultProxy]:
    """In front of a server that has prompts 0 … 9."""
    running.ask("FLUSHALL")
    with open_store(MEMORY, running.url) as store:
        for number in range(10):
            put(store, prompt(number))
        assert store.flush(20)
    with FaultProxy(running.address) as one:
        yield one


def opened(address: str, timeout: str = SHORT, *, before: tuple[str, ...] = ()) -> KVStore:
    """A store behind the proxy with nothing in memory; its breaker tries again soon."""
    store = open_store(MEMORY, *before, f"valkey://{address}?timeout={timeout}")
    for tier in store._tiered.tiers:
        tier.calls.pause = 0.05
    return store


def arrives(store: KVStore, tokens: range) -> int:
    """Get what the server has, however long that takes on a busy machine; tokens that came."""
    backend = store._tiered.tiers[-1].backend
    short, backend.timeout = backend.timeout, LONG_S
    try:
        arrived = get(store, tokens)
        quiet(store)  # the use is reported in the background, and waits as long
        return arrived
    finally:
        backend.timeout = short


def breaker(store: KVStore) -> str:
    return store.stats().tiers[-1].breaker


def eventually(good: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not good():
        assert time.monotonic() < end, "it does not recover"
        time.sleep(0.01)


def goes_on(store: KVStore) -> None:
    """What is put is there, come what may, by way of memory."""
    tokens = prompt(next(_fresh), 8)
    done = put(store, tokens)
    assert (done.tokens, done.dropped) == (8, 0)
    assert get(store, tokens) == 8


def recovers(store: KVStore) -> None:
    """The server is read and written again, all of it right, and the breaker is closed."""
    for number in range(10):
        eventually(lambda number=number: get(store, prompt(number)) == LENGTH)
    eventually(lambda: _written(store))
    assert breaker(store) == "closed"
    quiet(store)
    store.check()


def _written(store: KVStore) -> bool:
    before = counter(store, "writes", -1)
    goes_on(store)
    quiet(store)
    return counter(store, "writes", -1) > before


# --- dead and back ---------------------------------------------------------------------------


@needs_server
def test_a_server_that_is_refused_and_comes_back(proxy: FaultProxy) -> None:
    with opened(proxy.address) as store:
        assert arrives(store, prompt(0)) == LENGTH
        proxy.refuse()
        assert get(store, prompt(0)) == LENGTH  # from memory
        for number in range(1, 6):
            assert get(store, prompt(number)) == 0
            goes_on(store)
        quiet(store)
        assert breaker(store) == "open"
        assert counter(store, "errors") >= 3
        assert counter(store, "drops") > 0
        proxy.heal()
        recovers(store)


@needs_server
def test_a_server_that_is_not_there_yet(running: Server) -> None:
    """A store opens without it, and uses it from when it is there."""
    with FaultProxy(running.address) as proxy:
        proxy.refuse()
        with opened(proxy.address) as store:
            goes_on(store)
            assert get(store, prompt(77)) == 0
            proxy.heal()
            eventually(lambda: _written(store))
            assert breaker(store) == "closed"


@needs_server
def test_a_server_that_is_killed_and_started_empty() -> None:
    """Nothing of it is there any more; what is put again is sent again."""
    with server() as one, opened("{}:{}".format(*one.address), "2s") as store:
        assert put(store, prompt(0), wait=True).tokens == LENGTH
        one.kill()
        assert get(store, prompt(0)) == LENGTH
        for number in (1, 2, 3):
            assert get(store, prompt(number)) == 0
            goes_on(store)
        quiet(store)
        assert counter(store, "errors") >= 3
        one.start()
        with opened("{}:{}".format(*one.address), "2s") as other:
            assert get(other, prompt(0)) == 0
            eventually(lambda: _written(store))
            assert put(store, prompt(0), wait=True).skipped == LENGTH  # memory has it
            eventually(lambda: get(other, prompt(0)) == LENGTH)
        assert breaker(store) == "closed"


@needs_server
def test_killed_again_and_again_while_it_is_used() -> None:
    with server() as one, opened("{}:{}".format(*one.address), "2s") as store:
        for number in range(5):
            for extra in range(5):
                put(store, prompt(100 + 5 * number + extra))
            one.kill()
            assert get(store, prompt(0)) == 0
            goes_on(store)
            one.start()
        eventually(lambda: _written(store))
        quiet(store)
        store.check()


@needs_server
def test_what_was_there_a_moment_ago_is_not(running: Server, proxy: FaultProxy) -> None:
    """Expired or evicted by the server between a lookup and the get, or in the middle of it."""
    with opened(proxy.address, f"{LONG_S}s") as store:
        assert store.lookup(prompt(0)).tokens == LENGTH
        running.ask("FLUSHALL")
        assert get(store, prompt(0)) == 0
        done = put(store, prompt(0), wait=True)
        assert done.tokens == LENGTH
    with opened(proxy.address, f"{LONG_S}s") as store:
        name = next(name for name in names(running) if not name.endswith(b":spaces"))  # a block
        running.ask("DEL", name)
        assert get(store, prompt(0)) < LENGTH
        assert counter(store, "errors") == 0


def names(one: Server) -> list[bytes]:
    """Of all keys on a server."""
    from servers import packed, read_exactly, read_line

    with one.connect() as wire:
        wire.sendall(packed(["KEYS", "*"]))
        count = int(read_line(wire)[1:])
        return [read_exactly(wire, int(read_line(wire)[1:])) for _ in range(count)]


# --- hung and slow ---------------------------------------------------------------------------


@needs_server
def test_a_hung_server_costs_its_timeout_and_then_nothing(proxy: FaultProxy) -> None:
    """The hang ends only when this test says so: whatever returns did not wait for it."""
    with opened(proxy.address) as store:
        assert arrives(store, prompt(0)) == LENGTH
        proxy.hang()
        for number in range(1, 5):
            assert get(store, prompt(number)) == 0
            goes_on(store)
        eventually(lambda: breaker(store) == "open")
        assert counter(store, "late") + counter(store, "errors") >= 3
        assert get(store, prompt(0)) == LENGTH
        proxy.heal()
        recovers(store)


@needs_server
@pytest.mark.parametrize("known", [0, LENGTH // 2], ids=["nothing", "half of it"])
def test_a_deadline_ends_a_get_from_a_hung_server(proxy: FaultProxy, known: int) -> None:
    """Long before the server's own timeout; what memory has is returned."""
    with opened(proxy.address, f"{LONG_S}s") as store:
        if known:
            assert get(store, prompt(0, known)) == known
        proxy.hang()
        started = time.monotonic()
        for tokens in (prompt(0), prompt(0, LENGTH + 2)):  # the second asks for a tail as well
            assert get(store, tokens, deadline=0.05) == known
        assert time.monotonic() - started < LONG_S / 3
        proxy.heal()
        recovers(store)


@needs_server
def test_a_deadline_returns_what_arrived(running: Server, proxy: FaultProxy) -> None:
    """A server that answers, and sends values at the pace of a modem: a prefix, all of it right."""
    long = prompt(50, 400)  # 64 kB, at 10 kB/s on each of four connections
    with open_store(MEMORY, running.url) as store:
        put(store, long, wait=True)
    with opened(proxy.address, f"{LONG_S}s") as store:
        proxy.slow(10_000, "answers")
        started = time.monotonic()
        assert get(store, long, deadline=0.5) < 400
        assert time.monotonic() - started < LONG_S / 3
        eventually(lambda: get(store, long, deadline=0.5) > 0)
        proxy.heal()
        assert get(store, long) == 400
        recovers(store)
        assert counter(store, "damaged") == 0


@needs_server
def test_a_hung_server_does_not_hold_up_the_tiers_before_it(
    proxy: FaultProxy, tmp_path: Path
) -> None:
    url = disk(tmp_path / "d")
    with open_store(url) as store:
        put(store, prompt(50), wait=True)
    with opened(proxy.address, f"{LONG_S}s", before=(url,)) as store:
        proxy.hang()
        started = time.monotonic()
        assert get(store, prompt(50)) == LENGTH
        assert put(store, prompt(51)).tokens == LENGTH
        assert store.lookup(prompt(51)).tokens == LENGTH
        assert not store.flush(0.05)
        assert time.monotonic() - started < LONG_S / 3
        assert counter(store, "hits", 1) == 6
        proxy.heal()
        recovers(store)
        assert store.flush(20)


@needs_server
def test_close_does_not_wait_for_a_hung_server(proxy: FaultProxy) -> None:
    store = opened(proxy.address, f"{LONG_S}s")
    assert get(store, prompt(0)) == LENGTH
    proxy.hang()
    put(store, prompt(60))
    started = time.monotonic()
    assert not store.close(0.1)
    assert time.monotonic() - started < LONG_S / 3


@needs_server
def test_answers_that_come_too_late(proxy: FaultProxy) -> None:
    with opened(proxy.address) as store:
        proxy.delay(0.5)
        for number in range(3):
            assert get(store, prompt(number)) == 0
        goes_on(store)
        eventually(lambda: breaker(store) == "open")
        proxy.heal()
        recovers(store)


# --- nonsense --------------------------------------------------------------------------------

GARBAGE = {
    "nothing known": b"\x00\xff\x17 what is this",
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a huge value": b"$999999999999\r\n",
    "a negative value": b"$-7\r\nxx",
    "endless nesting": b"*1\r\n" * 5000,
    "an error": b"-LOADING the dataset is in memory\r\n",
    "a number": b":640\r\n",
    "an answer that never ends": b"+" + b"y" * 5000,
    "values of another": b"$640\r\n" + b"z" * 640 + b"\r\n",
}


@needs_server
@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage(proxy: FaultProxy, kind: str) -> None:
    """On connections that are open, and on new ones."""
    with opened(proxy.address) as store:
        assert arrives(store, prompt(0)) == LENGTH
        proxy.replace(GARBAGE[kind])
        for number in range(1, 5):
            assert get(store, prompt(number)) == 0
            goes_on(store)
        quiet(store)
        counted = ("errors", "damaged", "misses", "late", "drops", "already")
        assert sum(counter(store, name) for name in counted) > 0
        proxy.heal()
        if kind == "values of another":  # it said so: quarantine is to delete
            eventually(lambda: _written(store))
        else:
            recovers(store)


@needs_server
@pytest.mark.parametrize("every", [97, 389, 1009])
def test_flipped_bits(running: Server, proxy: FaultProxy, every: int) -> None:
    """Somewhere in answers, lengths included: misses, and never a wrong byte."""
    for number in range(10, 40):
        with open_store(MEMORY, running.url) as store:
            put(store, prompt(number), wait=True)
    with opened(proxy.address) as store:
        store._tiered.tiers[0].calls.limit = 1 << 30  # ask on, whatever comes
        for number in range(40):
            proxy.flip(every, first=every // 2 + 7 * number)
            assert get(store, prompt(number)) <= LENGTH
        # Which of lengths and values they hit depends on how the answers are cut into packets.
        assert counter(store, "errors") + counter(store, "damaged") > 0
        quiet(store)
        proxy.heal()
        eventually(lambda: _written(store))
        for number in range(10):
            put(store, prompt(number), wait=True)
            assert get(store, prompt(number)) == LENGTH


@needs_server
@pytest.mark.parametrize("after", [0, 1, 30, 700, 2000])
@pytest.mark.parametrize("side", ["answers", "requests"])
def test_cut_in_the_middle(proxy: FaultProxy, after: int, side: str) -> None:
    """Of values that are read, and of values that are written: half a one is never found."""
    with opened(proxy.address) as store:
        proxy.cut(after, side)  # type: ignore[arg-type]
        for number in range(4):
            assert get(store, prompt(number)) <= LENGTH
            goes_on(store)
        quiet(store)
        assert counter(store, "errors") > 0
        proxy.heal()
        recovers(store)
        assert counter(store, "damaged") == 0


@needs_server
def test_values_that_are_not_ours(running: Server, proxy: FaultProxy) -> None:
    """Under our keys: another type, another block's record, garbage, cut, longer, empty."""
    keys = sorted(names(running))[:7]
    record = running.ask("GET", keys[-1])
    running.ask("DEL", keys[0])
    running.ask("LPUSH", keys[0], "a list")
    running.ask("SET", keys[1], record)
    running.ask("SET", keys[2], b"garbage")
    running.ask("SET", keys[3], record[:200])
    running.ask("APPEND", keys[4], b"more")
    running.ask("SET", keys[5], b"")
    with opened(proxy.address) as store:
        found = [get(store, prompt(number)) for number in range(10)]
        assert sum(found) < 10 * LENGTH
        eventually(lambda: breaker(store) == "closed")
        for _ in range(2):
            for number in range(10):
                put(store, prompt(number), wait=True)
                assert get(store, prompt(number)) == LENGTH
        assert counter(store, "damaged") > 0
    running.ask("DEL", keys[0])
    with opened(proxy.address) as store:
        assert sum(get(store, prompt(number)) for number in range(10)) >= 9 * LENGTH
        assert counter(store, "damaged") == 0


# --- full, and forgetful ---------------------------------------------------------------------


@needs_server
@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
def test_a_server_that_is_full(policy: str) -> None:
    """It refuses, and writes are dropped and counted; or it evicts, and prefixes are shorter."""
    options = ("--maxmemory", "3mb", "--maxmemory-policy", policy)
    with server(*options) as one, open_store(MEMORY, one.url, block_tokens=256) as store:
        for number in range(80):  # of 64 KiB
            assert put(store, prompt(number, 512), wait=True).tokens == 512
        drops = counter(store, "drops")
        with open_store(MEMORY, one.url, block_tokens=256) as other:
            found = [get(other, prompt(number, 512)) for number in range(80)]
            assert 0 < sum(found) < 80 * 512
            assert counter(other, "damaged") == counter(other, "errors") == 0
        if policy == "noeviction":
            assert drops > 0
            one.ask("FLUSHALL")
            assert put(store, prompt(999, 512), wait=True).tokens == 512
            assert counter(store, "drops") == drops
        else:
            assert drops == 0
        assert store.stats().tiers[1].breaker_opened == 0  # a full server is no failure
        store.check()


@needs_server
def test_blocks_expire(running: Server) -> None:
    url = f"{running.url}?expire=200ms&prefix=short"
    with open_store(MEMORY, url) as store:
        assert put(store, prompt(0), wait=True).tokens == LENGTH
        with open_store(MEMORY, url) as other:
            eventually(lambda: other.lookup(prompt(0)).tokens == 0)
            assert get(other, prompt(0)) == 0
        assert get(store, prompt(0)) == LENGTH  # memory keeps it
        assert put(store, prompt(0), wait=True).skipped == LENGTH
        with open_store(MEMORY, url) as other:
            assert get(other, prompt(0)) in (LENGTH, 0)  # it was sent again
        assert counter(store, "writes") == 2 * LENGTH / 4


# --- an object store -------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [500, 503, 403, "truncate", "stall"])
def test_an_object_store_that_fails(fault: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    with ObjectServer() as objects:
        url = f"s3://bucket/p?endpoint={objects.url}&timeout=500ms"
        with open_store(MEMORY, url) as store:
            put(store, prompt(0), wait=True)
            put(store, prompt(1), wait=True)
        with open_store(MEMORY, url) as store:
            store._tiered.tiers[0].calls.pause = 0.05
            assert get(store, prompt(0)) == LENGTH
            objects.fault = fault
            assert get(store, prompt(1)) == 0
            goes_on(store)
            quiet(store)
            assert counter(store, "errors") + counter(store, "late") > 0
            objects.fault = None
            objects.healed.set()
            eventually(lambda: get(store, prompt(1)) == LENGTH)
            eventually(lambda: _written(store))
            assert breaker(store) == "closed"
            assert counter(store, "damaged") == 0
