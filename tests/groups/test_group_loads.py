"""Sequences whose beginning is read from elsewhere, on memory of tags."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from symbolic import SymbolicEngine
from test_machine import LAYOUTS

from kvkeep.core.errors import IllegalStep, InvalidValue, OutOfPages
from kvkeep.core.groups import GroupLayout, StateSpec, WindowSpec

if TYPE_CHECKING:
    from kvkeep import Sequence


def load(engine: SymbolicEngine, seq: Sequence, position: int) -> None:
    """Fill what computing on from ``position`` reads and nothing else, as from a store."""
    groups = seq.groups
    assert groups is not None
    engine.make(seq)
    groups.load(position)
    tokens, salt = seq.tokens.tolist(), str(seq.namespace)
    for at in range(position):
        page, offset = divmod(at, engine.size)
        if at >= seq.num_published:
            engine.slots[seq.pages[page], offset] = engine.tag("base", tokens, at, salt)
            engine.states.pop(int(seq.pages[page]), None)
        for window, table in enumerate(groups.tables):
            for part in table[page].tolist():
                if part >= 0:
                    engine.states.pop(part, None)
                    read = at >= engine.layout.windows[window].first_token(position)
                    tag = engine.tag(window, tokens, at, salt) if read else None
                    engine.slots[part, offset] = tag
    if groups.state is not None:
        engine.write_state(groups.state, engine.tag("state", tokens, position - 1, salt))


@pytest.mark.parametrize("name", LAYOUTS)
def test_prompts_that_are_loaded_in_part(name: str) -> None:
    layout, rng, loads = LAYOUTS[name], random.Random(name), 0
    kept: list[Sequence] = []
    engine = SymbolicEngine(400, layout)
    step = layout.grid * layout.page_size
    prompts = [[rng.randrange(3) for _ in range(rng.randrange(1, 40))] for _ in range(6)]
    for _ in range(120):
        trunk = rng.choice(prompts)
        prompt = [*trunk[: rng.randrange(1, len(trunk) + 1)], *rng.choices(range(3), k=7)]
        prompts[rng.randrange(6)] = prompt
        try:
            seq = engine.cache.open(prompt)
        except OutOfPages:
            continue
        assert seq.groups is not None
        last = len(prompt) - 1
        position = last // step * step if layout.state is not None else rng.randrange(last + 1)
        if position > seq.groups.position:
            load(engine, seq, position)
            loads += 1
            if position % step == 0:
                copy = seq.groups.checkpoint(position)
                if copy is not None:
                    engine.copy_state(copy)
            engine.cache.check()
            seq.publish(position)
        engine.finish(seq, rng.randrange(1, 30))
        engine.cache.check()
        kept.append(seq)
        if len(kept) > 2:
            kept.pop(rng.randrange(3)).close()
    assert loads > 50


def test_what_was_loaded_is_found_again() -> None:
    for layout in LAYOUTS.values():
        engine = SymbolicEngine(120, layout)
        prompt = list(range(25))
        seq = engine.cache.open(prompt)
        load(engine, seq, 24)
        assert seq.groups is not None
        copy = seq.groups.checkpoint(24)
        if copy is not None:
            engine.copy_state(copy)
        seq.publish(24)
        seq.close()
        assert engine.cache.match(prompt).num_tokens == 24
        engine.finish(engine.cache.open(prompt))
        engine.cache.check()


def test_a_load_that_does_not_fit_changes_nothing() -> None:
    layout = GroupLayout(4, (WindowSpec(64),))
    engine = SymbolicEngine(24, layout)
    seq = engine.cache.open(list(range(80)))
    assert seq.groups is not None
    with pytest.raises(OutOfPages):
        seq.groups.load(79)
    assert seq.groups.position == 0
    engine.cache.check()
    groups = seq.groups
    seq.close()
    with pytest.raises(IllegalStep, match="closed"):
        groups.load(4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_positions_that_a_sequence_does_not_have(name: str) -> None:
    engine = SymbolicEngine(60, LAYOUTS[name])
    engine.run(list(range(12))).close()
    seq = engine.cache.open(list(range(24)))
    groups = seq.groups
    assert groups is not None
    before, free = groups.position, engine.cache.stats().pages_free
    with pytest.raises(InvalidValue, match="position to load"):
        groups.load(before)
    for wrong in (-1, "8", None, 1.5, 25, 64, 10**6, 2**63, 10**30, -(10**30)):
        for step in (groups.load, groups.reach, groups.checkpoint):
            with pytest.raises((InvalidValue, IllegalStep)):  # copies wait, and belong before
                step(wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidValue, match="position to load"):
            groups.load(wrong)  # type: ignore[arg-type]
        assert (groups.position, engine.cache.stats().pages_free) == (before, free)
        engine.cache.check()
    engine.finish(seq)
    with pytest.raises(InvalidValue, match="all 24 tokens are computed"):
        groups.load(24)
    groups.expect(10**30)
    seq.close()
    engine.cache.check()


def test_a_refused_load_drops_no_copy_that_waits() -> None:
    """The state is copied from a checkpoint before anything is computed."""
    engine = SymbolicEngine(36, GroupLayout(4, (WindowSpec(64),), StateSpec(2)))
    engine.run(list(range(9))).close()
    seq = engine.cache.open(list(range(80)))
    assert seq.groups is not None
    assert seq.groups.position == 8
    with pytest.raises(OutOfPages):
        seq.groups.load(76)
    engine.step(seq, 12)


def test_a_load_forgets_the_mark() -> None:
    """The rows of the mark's windows are gone, so nothing can be computed from there on."""
    engine = SymbolicEngine(120, LAYOUTS["a window and a state"])
    seq = engine.cache.open(list(range(60)))
    assert seq.groups is not None
    engine.step(seq, 10)
    copy = seq.groups.mark()
    assert copy is not None
    engine.copy_state(copy)
    load(engine, seq, 50)
    seq.truncate(49)
    engine.cache.check()
    engine.finish(seq, 8)


@pytest.mark.parametrize("span", [5, 6, 7, 8, 9, 12])
def test_a_prompt_that_branches_in_front_of_what_was_loaded(span: int) -> None:
    """The first row that was loaded begins inside its page, and is replaced by a whole one."""
    engine = SymbolicEngine(200, GroupLayout(4, (WindowSpec(span, 2),)))
    trunk = list(range(100))
    loaded = engine.cache.open(trunk)
    load(engine, loaded, 80)
    loaded.publish(80)
    for cut in (79, 78, 77, 76, 75):
        other = engine.cache.open([*trunk[:cut], 1000 + cut, 1001, 1002, 1003, 1004])
        assert other.groups is not None
        for stop in (40, 76, other.num_tokens):
            if stop > other.groups.position:
                engine.step(other, stop)
                other.publish(stop)
                engine.cache.check()
        engine.finish(other, 12)
        other.close()
        engine.cache.check()
    engine.finish(loaded, 12)
    loaded.close()
    again = engine.cache.open(trunk[:82])
    assert again.num_cached == 80
    engine.finish(again, 12)


def test_an_engine_of_other_pages_left_what_was_loaded() -> None:
    """A load ends inside a page: no prompt resumes before it, where the window is not whole."""
    engine = SymbolicEngine(200, GroupLayout(16, (WindowSpec(8),)))
    trunk = list(range(200))
    loaded = engine.cache.open(trunk)
    load(engine, loaded, 100)
    loaded.publish(100)
    other = engine.cache.open(trunk[:99])
    assert other.num_cached == 0
    engine.finish(other)
    engine.finish(loaded, 16)
    assert engine.cache.match(trunk).num_tokens >= 112
    engine.cache.check()
