"""What requests reuse, and what that saves."""

from __future__ import annotations

import threading

import pytest

from kvkeep.observe.usage import UsageTable
from request_events import Requests


def admit(reuse: Requests, id: str, prompt: int, cached: int, namespace: str = "") -> None:
    reuse.begun(id, kind="chat", model="m", headers={})
    reuse.admitted(
        id, namespace=namespace, prompt_tokens=prompt, cached_tokens=cached, match_s=0.001
    )


def end(reuse: Requests, id: str) -> None:
    reuse.ended(id, outcome="done", generated=1, ttft_s=0.1)


def test_tokens_are_counted_where_they_were():
    table = UsageTable()
    reuse = Requests(table.see)
    admit(reuse, "a", 100, 30)
    reuse.loaded("a", sources=[(30, 50, "memory"), (50, 60, "file")], seconds=0.1, late=False)
    admit(reuse, "b", 100, 0)
    reuse.loaded("b", sources=[(0, 5, "file")], seconds=0.1, late=True)
    seen = table.moment().reuse
    assert seen.hit_tokens == {"pool": 30, "memory": 20, "file": 15}
    assert seen.saved_tokens == 65


def saved_s(table: UsageTable) -> float:
    return sum(table.moment().reuse.saved_seconds.values())


def test_a_saved_token_is_worth_what_a_computed_one_took_when_it_was_saved():
    table = UsageTable()
    reuse = Requests(table.see)
    admit(reuse, "a", 100, 40)  # before anybody knows what a token takes
    assert saved_s(table) == 0
    reuse.computed("a", tokens=60, seconds=0.6)
    assert saved_s(table) == pytest.approx(40 * 0.01)
    admit(reuse, "b", 100, 100)
    assert saved_s(table) == pytest.approx(140 * 0.01)
    reuse.computed("c", tokens=60, seconds=3.0)  # now it is 0.03 on average; what was, was
    assert saved_s(table) == pytest.approx(140 * 0.01)
    assert table.moment().reuse.computed_tokens == 120


def test_requests_that_ended_are_forgotten_and_strangers_do_no_harm():
    table = UsageTable()
    reuse = Requests(table.see)
    for number in range(1000):
        admit(reuse, str(number), 10, 5)
        end(reuse, str(number))
    assert not table._running
    reuse.loaded("nobody", sources=[(0, 1, "file")], seconds=0, late=False)
    end(reuse, "nobody")
    assert table.moment().reuse.hit_tokens == {"pool": 5000, "file": 1}


def test_names_of_tiers_are_bounded():
    table = UsageTable()
    reuse = Requests(table.see)
    for number in range(1000):
        reuse.loaded("a", sources=[(0, 1, f"tier {number}")], seconds=0, late=False)
    hits = table.moment().reuse.hit_tokens
    assert len(hits) < 40
    assert sum(hits.values()) == 1000


def test_many_threads_lose_no_token():
    table = UsageTable()
    reuse = Requests(table.see)

    def work(name: str) -> None:
        for number in range(500):
            admit(reuse, f"{name}{number}", 10, 4, name)
            reuse.computed(f"{name}{number}", tokens=6, seconds=0.006)
            end(reuse, f"{name}{number}")

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = table.moment().reuse
    assert (seen.saved_tokens, seen.computed_tokens) == (8000, 12_000)
    assert saved_s(table) == pytest.approx(8.0, rel=0.01)
