"""Rows, states and checkpoints of single sequences, step by step."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from symbolic import BOTH, STATE, WINDOW, SymbolicEngine, prompt

from kvkeep import PagedCache
from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.core.groups import GroupLayout, StateCopy, StateSpec, WindowSpec

if TYPE_CHECKING:
    from kvkeep.core.prefix.node import Node


def test_a_plain_cache_has_no_groups() -> None:
    with PagedCache(8, 4).open([1, 2, 3]) as sequence:
        assert sequence.groups is None


# --- windows -----------------------------------------------------------------------------------


def test_a_long_prompt_holds_the_rows_of_its_window_alone() -> None:
    engine = SymbolicEngine(300, WINDOW)
    sequence = engine.cache.open(prompt(1, 400))
    most = 0
    for stop in range(8, 401, 8):
        engine.step(sequence, stop)
        most = max(most, engine.cache.stats().pages_used)
    rows = 2 * (8 // 4 + 2)  # those of a pass, and of the window before it
    assert most == 100 + rows
    (table,) = sequence.groups.tables
    assert (table[:96] == -1).all()
    sequence.close()
    engine.cache.check()


# --- states ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [52 * 4, 52 * 4 + 3])
def test_a_branch_is_found_by_the_second_prompt_and_reused_by_the_third(shared: int) -> None:
    """64 blocks of which 52 are shared; a state at the end lies in unshared tokens."""
    engine = SymbolicEngine(3000, STATE)
    reused = []
    for number in (1, 2, 3, 4):
        sequence = engine.run(prompt(0, shared) + prompt(number, 64 * 4 - shared), chunk=64)
        reused.append(sequence.num_cached // 4)
        sequence.close()
    assert reused == [0, 0, 52, 52]


def test_the_tail_serves_a_prompt_that_does_not_repeat_the_end() -> None:
    engine = SymbolicEngine(6000, STATE)
    engine.run(prompt(0, 4000) + prompt(1, 100), chunk=512).close()
    second = engine.run(prompt(0, 4000) + prompt(2, 100), chunk=512)
    assert second.num_cached == (4099 - 512) // 4 * 4
    second.close()
    third = engine.run(prompt(0, 4000) + prompt(3, 100), chunk=512)
    assert third.num_cached == 4000
    third.close()


def test_a_conversation_keeps_its_last_state() -> None:
    """Each turn's end replaces the one before: it goes first when the room is needed."""
    engine = SymbolicEngine(130, STATE)
    turns = prompt(1, 40)
    for turn in range(2, 12):
        sequence = engine.run(turns)
        if turn > 2:
            assert sequence.num_cached >= len(turns) - 40, "only what is new is computed"
        sequence.close()
        turns = turns + prompt(turn, 30)
    engine.cache.check()


@pytest.mark.parametrize("eviction", ["priority", "returns"])
def test_no_policy_keeps_what_no_request_can_use(eviction: str) -> None:
    """A turn's state goes when the next turn has one. Once that went, too, the KV is of no use."""
    chance, most = random.Random(1), 0
    engine = SymbolicEngine(200, STATE, eviction=eviction)
    chats: list[list[int]] = []
    for number in range(200):
        if not chats or chance.random() < 0.4:
            chats = [*chats[-11:], prompt(0, 8) + prompt(number + 1, 30)]
        at = chance.randrange(len(chats))
        engine.run(chats[at]).close()
        chats[at] = (chats[at] + prompt(1000 + number, 14))[:150]
        roots = engine.cache.tree.roots.values()
        most = max(most, sum(_useless(root)[0] for root in roots))
    engine.cache.check()
    assert most < 20, "a prompt's tail or two; about 35 if such runs wait for the policy"


def _useless(node: Node) -> tuple[int, bool]:
    """Return the pages with no checkpoint behind them, and whether there is one in the subtree."""
    below = [_useless(child) for child in node.children.values()]
    pages, any_behind = sum(one for one, _ in below), any(has for _, has in below)
    if node.parent is None:
        return pages, any_behind
    if not any_behind:
        pages += node.end - node.points[-1] if node.points else node.size
    return pages, any_behind or bool(node.points)


def test_a_checkpoint_survives_a_pass_before_it_is_published() -> None:
    """The rows that it needs leave the window; the sequence keeps them for it."""
    engine = SymbolicEngine(400, BOTH)
    sequence = engine.cache.open(prompt(1, 101))
    engine.step(sequence, 100)
    sequence.append(prompt(2, 40))
    for stop in range(104, 141, 4):
        engine.step(sequence, stop)
    sequence.publish()
    sequence.close()
    engine.cache.check()
    again = engine.cache.open(prompt(1, 101) + prompt(3, 9))
    assert again.num_cached == 100
    engine.finish(again)
    again.close()


# --- going back --------------------------------------------------------------------------------


def test_drafts_go_back_to_the_mark() -> None:
    engine = SymbolicEngine(200, BOTH)
    sequence = engine.run(prompt(1, 50))
    copy = sequence.groups.mark()
    assert isinstance(copy, StateCopy)
    engine.copy_state(copy)
    sequence.append([7, 8, 9])
    engine.step(sequence, 53)
    sequence.truncate(51)
    assert sequence.groups.position == 50
    engine.step(sequence, 51)
    sequence.close()
    engine.cache.check()


def test_going_back_to_a_checkpoint_forgets_a_mark_before_it() -> None:
    engine = SymbolicEngine(200, BOTH)
    sequence = engine.cache.open(prompt(1, 40))
    groups = sequence.groups
    engine.step(sequence, 10)
    engine.copy_state(groups.mark())
    engine.step(sequence, 16)
    engine.copy_state(groups.checkpoint(16))
    engine.step(sequence, 30)
    sequence.publish(30)
    sequence.truncate(20)
    assert groups.position == 16, "at the checkpoint, without the rows of the mark"
    sequence.truncate(12)
    engine.finish(sequence)
    engine.cache.check()


def test_a_hook_finds_a_mark_complete_that_made_room() -> None:
    cache = PagedCache(6, GroupLayout(4, state=StateSpec(pages=1)))
    with cache.open(range(5)) as cached:
        cached.groups.reach(5)
        cached.publish()
    sequence = cache.open([9] * 16)
    cache.subscribe(lambda _: cache.check())
    sequence.groups.mark()
    assert (cache.stats().evictions, cache.stats().hook_errors) == (1, 0)


# --- pins --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [WINDOW, STATE, BOTH])
def test_a_hard_pin_keeps_what_resuming_needs(layout: GroupLayout) -> None:
    engine = SymbolicEngine(120, layout)
    engine.run(prompt(1, 41)).close()
    pin = engine.cache.pin(prompt(1, 41), hard=True)
    for number in range(2, 9):
        engine.run(prompt(number, 120), chunk=16).close()
    engine.cache.evict(1000)
    assert engine.cache.match([*prompt(1, 41), 7]).num_tokens == 40
    engine.cache.check()
    engine.cache.unpin(pin)
    engine.cache.evict(1000)
    assert engine.cache.stats().pages_used == 0


def test_a_soft_pin_keeps_it_longest() -> None:
    engine = SymbolicEngine(140, STATE)
    engine.run(prompt(1, 41)).close()
    engine.cache.pin(prompt(1, 41))
    for number in range(2, 9):
        engine.run(prompt(number, 120), chunk=16).close()
    assert engine.cache.match([*prompt(1, 41), 7]).num_tokens == 40
    engine.cache.evict(1000)
    assert engine.cache.stats().pages_used == 0


# --- room --------------------------------------------------------------------------------------


def test_a_prompt_that_does_not_fit_beside_its_checkpoint_is_computed_anew() -> None:
    engine = SymbolicEngine(22, GroupLayout(4, (), StateSpec(8)))
    engine.run(prompt(1, 20)).close()
    assert engine.cache.num_available == 22
    sequence = engine.cache.open(prompt(1, 20) + prompt(2, 8))
    assert sequence.num_cached == 0
    assert engine.cache.stats().groups.resumes_given_up > 0
    sequence.close()
    engine.cache.check()


def test_a_long_chat_without_states_keeps_one_end() -> None:
    """What later turns have replaced makes room before anything that they use."""
    engine = SymbolicEngine(4000, WINDOW)
    sequence = engine.cache.open(prompt(1, 300))
    engine.finish(sequence)
    sequence.close()
    turns = prompt(1, 300)
    for turn in range(2, 8):
        turns = turns + prompt(turn, 300)
        engine.run(turns).close()
    assert engine.cache.stats().groups.checkpoints == 1
    cached = engine.cache.stats().pages_cached
    engine.cache.evict(engine.cache.stats().groups.loose_rows * 2)
    assert engine.cache.stats().pages_cached == cached
    assert engine.cache.match([*turns, 7]).num_tokens == len(turns)


# --- mistakes ----------------------------------------------------------------------------------


def test_illegal_steps_change_nothing() -> None:
    engine = SymbolicEngine(60, BOTH)
    engine.run(prompt(1, 21)).close()
    sequence = engine.cache.open(prompt(1, 21) + prompt(2, 9))
    groups = sequence.groups
    for step in (lambda: groups.reach(24), groups.mark, lambda: groups.checkpoint(20)):
        with pytest.raises(IllegalStep, match="copies wait"):
            step()
    engine.make(sequence)
    with pytest.raises(InvalidValue, match="the end of the pass"):
        groups.reach(4)
    groups.reach(24)
    with pytest.raises(IllegalStep, match="needs a pass that ends there; the last one ended at 24"):
        groups.checkpoint(20)
    groups.reach(26)
    with pytest.raises(InvalidValue, match="must be a multiple of 4"):
        groups.checkpoint(26)
    sequence.close()
    for step in (
        groups.copies,
        groups.mark,
        lambda: groups.reach(30),
        lambda: groups.checkpoint(4),
    ):
        with pytest.raises(IllegalStep, match="it is closed"):
            step()
    engine.cache.check()


def test_a_cache_without_reuse_keeps_nothing() -> None:
    engine = SymbolicEngine(60, BOTH, reuse=False)
    sequence = engine.run(prompt(1, 21))
    assert sequence.groups.stops == []
    sequence.groups.reach(21)
    sequence.close()
    assert engine.cache.stats().pages_used == 0


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: GroupLayout(4), "no groups are given"),
        (lambda: GroupLayout(0, (WindowSpec(4),)), "page_size is 0"),
        (lambda: WindowSpec(0), "the span of a window, in tokens, is 0"),
        (lambda: WindowSpec(4, 0), "the pages of a row is 0"),
        (lambda: StateSpec(0), "the pages of a state is 0"),
        (lambda: StateSpec(1, 0), "the grid of a state, in tokens, is 0"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(make: object, text: str) -> None:
    with pytest.raises(InvalidValue, match=text):
        make()  # type: ignore[operator]
