"""Room that one thread makes and others are quicker to take."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from kvkeep.core.keys import BLOCK_ID_BYTES
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.codecs import BlockShape, make_codec
from kvkeep.store.tiers import MemorySpec, MemoryTier, Tier, TierOptions, TierSpec
from kvkeep.store.tiers.record import HEADER_BYTES
from kvkeep.store.tiers.space import TierSpace
from kvkeep.store.tiers.turns import AGAIN, Turns

UNIT = 4096


def block(number: int) -> bytes:
    return number.to_bytes(BLOCK_ID_BYTES, "big")


def test_one_that_always_loses_goes_alone():
    """Whatever is made is taken at once by another, as long as that one may go on."""
    turns, lock = Turns(4, threads=2), threading.Lock()
    free, stop, attempts = False, threading.Event(), 0

    def taken() -> bool:
        nonlocal free
        with lock:
            was, free = free, False
        return was

    def thief():
        while not stop.is_set():
            turns.take(lambda: taken() or AGAIN)

    def slow():
        nonlocal attempts, free
        attempts += 1
        if taken():
            return True
        free = True
        until = time.monotonic() + 0.2
        while free and time.monotonic() < until:  # the other one takes it, as long as it may go on
            time.sleep(0.001)
        return AGAIN

    thread = threading.Thread(target=thread_of(thief, stop))
    thread.start()
    try:
        for _ in range(5):
            assert turns.take(slow)
    finally:
        stop.set()
        thread.join()
    assert attempts > 5 * 4  # else nothing was taken from it


def test_others_wait_while_one_goes_alone():
    turns, other_tried = Turns(1, threads=2), threading.Event()
    other = threading.Thread(target=lambda: turns.take(lambda: other_tried.set() or True))
    attempts = 0

    def attempt():
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            return AGAIN
        other.start()
        assert not other_tried.wait(0.2)
        return True

    assert turns.take(attempt)
    other.join(20)
    assert other_tried.is_set()


def thread_of(work, stop):
    def run():
        try:
            work()
        finally:
            stop.set()

    return run


def test_who_never_gets_it_gives_up():
    tries = 0

    def attempt():
        nonlocal tries
        tries += 1
        return AGAIN

    assert Turns(3, threads=5).take(attempt) is None
    assert tries == 3 + 3 + 5
    assert Turns(3, threads=5).take(lambda: False) is False


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_nothing_is_dropped_though_others_take_the_room(kind, tmp_path, monkeypatch):
    """A writer sleeps each time it has made room: the other one takes it, and drops nothing."""
    slow_name, places = "slow", 6
    if kind == "disk":
        tier = Tier(TierSpec(
            "file", DiskBackend(tmp_path / "d", places * UNIT, sync="never"),
            make_codec("raw", BlockShape()), lambda _: None, TierOptions(writers=2),
        ))  # fmt: skip
        tier.open()
        owner, name = TierSpace, "make_room"
    else:
        tier = MemoryTier(MemorySpec(MemoryBackend(places * UNIT)))
        owner, name = MemoryTier, "_evict"
    made = getattr(owner, name)

    def make_room(self, *needed):
        freed = made(self, *needed)
        if threading.current_thread().name == slow_name:
            time.sleep(0.01)
        return freed

    monkeypatch.setattr(owner, name, make_room)
    stop, lost = threading.Event(), []
    record = memoryview(bytearray(HEADER_BYTES + 1000)).cast("B")

    def put(number: int) -> bool:
        if kind == "disk":
            return tier.save(block(number), memoryview(bytearray(record)))
        draft = tier.reserve(block(number), 3000)
        if draft is None:
            return False
        with draft:
            draft.view[:] = np.zeros(len(draft.view), np.uint8)
            tier.commit(draft, block(number)).release()
        return True

    def quick():
        number = 1 << 20
        while not stop.is_set():
            number += 1
            if not put(number):
                lost.append(number)

    def slow():
        lost.extend(number for number in range(12) if not put(number))
        stop.set()

    threads = [
        threading.Thread(target=thread_of(quick, stop)),
        threading.Thread(target=thread_of(slow, stop), name=slow_name),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not lost
    tier.backend.close()
