"""What goes first when a cache with groups needs room, and that nothing is looked at twice."""

from __future__ import annotations

import pytest
from symbolic import BOTH, STATE, WINDOW, SymbolicEngine, prompt

from kvkeep.core.errors import InvalidValue
from kvkeep.core.groups import GroupLayout, StateSpec, WindowSpec


def test_unpinned_states_go_before_prompts_with_pins() -> None:
    engine = SymbolicEngine(60, STATE)
    engine.run(prompt(1, 17)).close()
    engine.cache.pin(prompt(1, 17))
    running = engine.run(prompt(2, 17))  # holds its path: its checkpoint is in no leaf to evict
    engine.cache.evict(5)
    assert engine.cache.match([*prompt(1, 17), 7]).num_tokens == 16
    assert engine.cache.match([*prompt(2, 17), 7]).num_tokens == 0
    running.close()
    engine.cache.check()


def test_a_place_where_prompts_branch_does_not_go_first() -> None:
    engine = SymbolicEngine(4000, STATE)
    for number in (1, 2):
        engine.run(prompt(0, 40) + prompt(number, 40)).close()
    engine.cache.evict(5)
    for number in (2, 3):
        assert engine.cache.match([*prompt(0, 40), *prompt(number, 40), 7]).num_tokens >= 40


def test_loose_rows_go_first_and_those_in_use_are_kept() -> None:
    engine = SymbolicEngine(600, GroupLayout(4, (WindowSpec(16, 2), WindowSpec(16, 3))))
    engine.run(prompt(1, 80)).close()
    running = engine.run(prompt(2, 80))
    groups = engine.cache.stats().groups
    assert groups is not None
    assert groups.loose_rows == groups.rows - 2 * 2 * 4, "four of each window are needed at an end"
    assert engine.cache.evict(7) == 8, "rows of two pages and of three"
    assert engine.cache.match([*prompt(1, 80), 7]).num_tokens == 80
    engine.cache.check()
    loose = (2 * 16 - 4) * 5 - 8  # four are in use until the next pass
    assert engine.cache.evict(loose) == loose
    assert engine.cache.stats().pages_cached == 40, "no run was evicted"
    engine.finish(running)
    engine.cache.check()
    running.close()


# --- pins --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hard", [False, True])
def test_a_pin_where_no_checkpoint_is_keeps_rows_until_it_ends(hard: bool) -> None:
    engine = SymbolicEngine(160, WINDOW)
    engine.run(prompt(1, 64)).close()
    pin = engine.cache.pin(prompt(1, 32), hard=hard)
    assert (pin.num_tokens, pin.num_resumable) == (32, 32)
    for number in range(2, 9):
        engine.run(prompt(number, 120), chunk=16).close()
    assert engine.cache.match([*prompt(1, 32), 7]).num_tokens == 32
    assert pin.num_resumable == 32
    engine.cache.check()
    engine.cache.unpin(pin)
    assert pin.num_resumable == 0
    engine.cache.evict(10**6)
    assert engine.cache.stats().pages_used == 0


@pytest.mark.parametrize("layout", [STATE, BOTH])
def test_a_pin_says_where_a_request_can_resume(layout: GroupLayout) -> None:
    engine = SymbolicEngine(400, layout)
    engine.run(prompt(1, 43)).close()
    assert engine.cache.pin(prompt(1, 43)).num_resumable == 40
    pin = engine.cache.pin(prompt(1, 24))
    assert (pin.num_tokens, pin.num_resumable) == (24, 0), "no state was kept there"


# --- mistakes ----------------------------------------------------------------------------------


def test_a_pass_ends_within_the_tokens() -> None:
    engine = SymbolicEngine(100, BOTH)
    sequence = engine.cache.open(prompt(1, 21))
    engine.make(sequence)
    with pytest.raises(InvalidValue, match=r"the end of the pass.* is 22; .* in 0 … 21 is needed"):
        sequence.groups.reach(22)
    sequence.append([1])
    engine.step(sequence, 22)
    fork = sequence.fork()
    fork.append([2, 3])
    engine.make(fork)
    with pytest.raises(InvalidValue, match="is 23"):
        sequence.groups.reach(23)
    engine.step(fork, 24)
    fork.truncate(22)
    with pytest.raises(InvalidValue, match="is 23"):
        fork.groups.reach(23)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: GroupLayout(4, WindowSpec(4)), "windows is WindowSpec"),
        (lambda: GroupLayout(4, (5,)), r"windows is \(5,\); a tuple of WindowSpec"),
        (lambda: GroupLayout(4, 5), "windows is 5"),
        (lambda: GroupLayout(4, (), 3), r"state is 3; StateSpec\(pages=…, grid=…\) or None"),
        (lambda: GroupLayout("4", (), StateSpec(1)), "page_size is '4'"),
        (lambda: WindowSpec("8"), "the span of a window, in tokens, is '8'"),
        (lambda: WindowSpec(8, chunked=1), "chunked is 1; True or False is needed"),
        (lambda: StateSpec(None), "the pages of a state is None"),
    ],
)
def test_wrong_types_are_named(make: object, text: str) -> None:
    with pytest.raises(InvalidValue, match=text):
        make()


# --- sessions ----------------------------------------------------------------------------------


def test_suspended_sessions_keep_half_of_the_pool_with_their_states() -> None:
    engine = SymbolicEngine(60, GroupLayout(4, (), StateSpec(12)))
    for number, name in enumerate("abc"):
        with engine.cache.open(prompt(number, 9), session=name) as sequence:
            engine.finish(sequence)
        engine.cache.session(name).suspend(eta=60)
    assert engine.cache.stats().pages_awaited == 28, "two of them, of 14 pages each"


# --- slots -------------------------------------------------------------------------------------
