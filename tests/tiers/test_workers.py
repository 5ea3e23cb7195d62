"""Threads with a bounded queue: what they take, what they refuse, and that they end."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING

import pytest
from tier_bench import until

from kvkeep.store.tiers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Iterator


class Gate:
    """Jobs that wait until they may go on."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.began = threading.Semaphore(0)
        self.done = 0

    def __call__(self) -> None:
        self.began.release()
        assert self.open.wait(30)
        self.done += 1


def threads_of(name: str) -> int:
    return sum(thread.name.startswith(f"kvkeep {name} ") for thread in threading.enumerate())


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def test_first_come_first_served() -> None:
    workers, done = Workers("one", 1, 100), []
    for number in range(20):
        assert workers.submit(lambda number=number: done.append(number))
    assert workers.wait(10)
    assert done == list(range(20))
    assert (workers.cost, workers.unfinished, workers.longest) == (0, 0, 0.0)
    assert workers.close(1)


def test_no_thread_before_the_first_job_and_no_more_than_asked_for(gate: Gate) -> None:
    workers = Workers("few", 3, 100)
    assert threads_of("few") == 0
    for _ in range(8):
        workers.submit(gate)
    for _ in range(3):
        assert gate.began.acquire(timeout=10)
    assert threads_of("few") == 3
    assert not gate.began.acquire(timeout=0.05)
    gate.open.set()
    assert workers.wait(10)
    assert gate.done == 8
    assert workers.close(10)


def test_idle_threads_are_used_again(gate: Gate) -> None:
    workers = Workers("again", 4, 100)
    names = set()
    for _ in range(10):
        workers.submit(lambda: names.add(threading.current_thread().name))
        assert workers.wait(10)
        # It is free when it waits, not when the job is done.
        until(lambda: workers._free == len(workers._started))
    assert len(names) <= 2
    assert workers.close(10)


def test_it_is_refused_when_full(gate: Gate) -> None:
    workers = Workers("full", 1, 10)
    assert workers.submit(gate, 6)
    assert workers.submit(gate, 4)
    assert not workers.submit(gate, 1)
    assert workers.submit(gate, 0)
    assert not workers.submit(gate, 1, wait=0.01)
    assert workers.cost == 10
    gate.open.set()
    assert workers.wait(10)
    assert gate.done == 3
    assert workers.submit(gate, 11), "alone it may be larger"
    assert workers.close(10)


def test_room_is_waited_for(gate: Gate) -> None:
    workers = Workers("wait", 1, 10)
    workers.submit(gate, 10)
    taken: list[bool] = []
    waits = (30.0, None)
    threads = [
        threading.Thread(target=lambda wait=wait: taken.append(workers.submit(gate, 5, wait)))
        for wait in waits
    ]
    for thread in threads:
        thread.start()
    assert not workers.wait(0.02)
    assert taken == []
    gate.open.set()
    for thread in threads:
        thread.join(10)
    assert taken == [True, True]
    assert workers.wait(10)
    assert workers.close(10)


def test_what_is_raised_is_logged_and_the_thread_lives(caplog: pytest.LogCaptureFixture) -> None:
    workers, done = Workers("bad", 1, 10), []

    def fails() -> None:
        raise OSError("broken")

    def panics() -> None:
        raise BaseException("as a library in another language does")

    with caplog.at_level(logging.ERROR, "kvkeep.tiers"):
        for job in (fails, panics, lambda: done.append(1)):
            assert workers.submit(job)
        assert workers.wait(10)
    assert done == [1]
    assert [record.getMessage() for record in caplog.records] == ["a job of tier bad failed"] * 2
    assert (workers.cost, workers.unfinished) == (0, 0)


def test_close_does_what_waits() -> None:
    workers, done = Workers("end", 2, 100), []
    for number in range(10):
        workers.submit(lambda number=number: done.append(number))
    assert workers.close(10)
    assert sorted(done) == list(range(10))
    assert not workers.submit(lambda: None)
    assert not workers.submit(lambda: None, wait=10)


def test_close_gives_up_what_hangs_and_says_so_to_who_waits(gate: Gate) -> None:
    workers = Workers("hung", 1, 100)
    given_up: list[int] = []
    workers.submit(gate, given_up=lambda: given_up.append(0))
    assert gate.began.acquire(timeout=10)
    for number in (1, 2):
        workers.submit(gate, given_up=lambda number=number: given_up.append(number))
    workers.submit(gate)
    assert workers.longest > 0
    assert not workers.close(0.05)
    assert given_up == [1, 2], "the one that runs is not given up"
    assert workers.unfinished == 1
    gate.open.set()
    assert workers.wait(10)
    assert gate.done == 1


def test_who_waits_for_room_hears_of_the_end(gate: Gate) -> None:
    workers = Workers("end", 1, 1)
    workers.submit(gate)
    assert gate.began.acquire(timeout=10)
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(workers.submit(gate, 1, None)))
    thread.start()
    workers.close(0.0)
    thread.join(10)
    assert answers == [False]


def test_threads_end_with_close() -> None:
    workers = Workers("ends", 3, 100)
    for _ in range(9):
        workers.submit(lambda: time.sleep(0.001))
    workers.close(10)
    end = time.monotonic() + 10
    while threads_of("ends") and time.monotonic() < end:
        time.sleep(0.001)
    assert threads_of("ends") == 0


def test_a_job_lives_no_longer_than_its_work() -> None:
    class Big:
        pass

    workers = Workers("gone", 1, 100)
    big = Big()
    gone = weakref.ref(big)
    workers.submit(lambda big=big: None)
    del big
    assert workers.wait(10)
    end = time.monotonic() + 10
    while gone() is not None and time.monotonic() < end:
        gc.collect()
    assert gone() is None


def test_many_submit_and_nothing_is_lost() -> None:
    workers, lock = Workers("many", 4, 16), threading.Lock()
    done = 0

    def job() -> None:
        nonlocal done
        with lock:
            done += 1

    taken = []

    def submit() -> None:
        taken.append(sum(workers.submit(job, 3, wait=10.0) for _ in range(200)))

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert workers.close(10)
    assert done == sum(taken) == 1600
