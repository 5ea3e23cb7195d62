"""What requests reuse, what that saves, and who asks for most."""

from __future__ import annotations

import threading

import pytest

from kvkeep.core.errors import InvalidValue
from kvkeep.observe.telemetry import ReuseCounter, Shares


def admit(reuse: ReuseCounter, id: str, prompt: int, cached: int, namespace: str = "") -> None:
    reuse.begun(id, kind="chat", model="m", headers={})
    reuse.admitted(
        id, namespace=namespace, prompt_tokens=prompt, cached_tokens=cached, match_s=0.001
    )


def end(reuse: ReuseCounter, id: str) -> None:
    reuse.ended(id, outcome="done", generated=1, ttft_s=0.1)


def test_tokens_are_counted_where_they_were():
    reuse = ReuseCounter()
    admit(reuse, "a", 100, 30)
    reuse.loaded("a", sources=[(30, 50, "memory"), (50, 60, "file")], seconds=0.1, late=False)
    admit(reuse, "b", 100, 0)
    reuse.loaded("b", sources=[(0, 5, "file")], seconds=0.1, late=True)
    seen = reuse.snapshot()
    assert seen.hit_tokens == {"pool": 30, "memory": 20, "file": 15}
    assert seen.saved_tokens == 65


def test_a_saved_token_is_worth_what_a_computed_one_took_when_it_was_saved():
    reuse = ReuseCounter()
    admit(reuse, "a", 100, 40)  # before anybody knows what a token takes
    assert reuse.snapshot().saved_seconds == 0
    reuse.computed("a", tokens=60, seconds=0.6)
    assert reuse.snapshot().saved_seconds == pytest.approx(40 * 0.01)
    admit(reuse, "b", 100, 100)
    assert reuse.snapshot().saved_seconds == pytest.approx(140 * 0.01)
    reuse.computed("c", tokens=60, seconds=3.0)  # now it is 0.03 on average; what was, was
    seen = reuse.snapshot()
    assert seen.saved_seconds == pytest.approx(140 * 0.01)
    assert (seen.computed_tokens, seen.computed_seconds) == (120, pytest.approx(3.6))


def test_requests_that_ended_are_forgotten_and_strangers_do_no_harm():
    reuse = ReuseCounter()
    for number in range(1000):
        admit(reuse, str(number), 10, 5)
        end(reuse, str(number))
    assert not reuse._spaces
    reuse.loaded("nobody", sources=[(0, 1, "file")], seconds=0, late=False)
    end(reuse, "nobody")
    assert reuse.snapshot().hit_tokens == {"pool": 5000, "file": 1}


def test_names_of_tiers_are_bounded():
    reuse = ReuseCounter()
    for number in range(1000):
        reuse.loaded("a", sources=[(0, 1, f"tier {number}")], seconds=0, late=False)
    hits = reuse.snapshot().hit_tokens
    assert len(hits) < 40
    assert sum(hits.values()) == 1000


def test_many_threads_lose_no_token():
    reuse = ReuseCounter()

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
    seen = reuse.snapshot()
    assert (seen.saved_tokens, seen.computed_tokens) == (8000, 12_000)
    assert seen.saved_seconds == pytest.approx(8.0, rel=0.01)
    assert sum(share.prompt for share in seen.shares) == pytest.approx(1)


# --- namespaces ------------------------------------------------------------------------------


def test_the_largest_have_names_and_the_rest_is_one():
    shares = Shares()
    for number in range(50):
        shares.add(f"t{number:02}", 100 + number, 10)
    top = shares.top(20)
    assert [share.name for share in top[:3]] == ["t49", "t48", "t47"]
    assert len(top) == 21
    assert top[-1].name is None
    assert sum(share.prompt for share in top) == pytest.approx(1)
    assert top[0].reused == pytest.approx(10 / 149)


def test_late_tokens_weigh_more():
    now = [0.0]
    shares = Shares(half_life_s=10, clock=lambda: now[0])
    shares.add("old", 400, 0)
    now[0] = 20.0
    shares.add("new", 300, 300)
    new, old = shares.top()
    assert (new.name, old.name) == ("new", "old")
    assert new.prompt == pytest.approx(300 / 400)
    assert (new.reused, old.reused) == (1, 0)


@pytest.mark.parametrize("seconds", [2_100.0, 30_000.0, 1e12])
def test_a_long_time_does_not_overflow(seconds):
    now = [0.0]
    shares = Shares(half_life_s=10, clock=lambda: now[0])
    for _ in range(5):
        shares.add("a", 10, 5)
        now[0] += seconds
        shares.add("b", 30, 0)
        top = {share.name: share for share in shares.top()}
        assert top["b"].prompt == pytest.approx(1)
        assert sum(share.prompt for share in top.values()) == pytest.approx(1)


def test_names_without_number_are_not_kept():
    shares = Shares(names=100)
    for number in range(10_000):
        shares.add(f"salt {number}", 1, 0)
        if number % 10 == 0:
            shares.add("big", 50, 25)
    assert len(shares._names) <= 100
    top = shares.top(20)
    assert top[0].name == "big"
    assert top[0].reused == pytest.approx(0.5)
    assert sum(share.prompt for share in top) == pytest.approx(1)


def test_what_was_forgotten_is_still_part_of_all():
    shares = Shares(names=4)
    for number in range(6):
        shares.add(str(number), 10, 5)
    top = shares.top(20)
    assert top[-1].name is None
    assert sum(share.prompt for share in top) == pytest.approx(1)
    assert top[-1].prompt == pytest.approx((6 - len(top) + 1) / 6)
    assert top[-1].reused == pytest.approx(0.5)


def test_nothing_before_the_first_token():
    shares = Shares()
    assert shares.top() == []
    shares.add("a", 0, 0)
    assert shares.top() == []


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_half_life_is_a_time(seconds):
    with pytest.raises(InvalidValue, match="half_life_s"):
        Shares(half_life_s=seconds)
