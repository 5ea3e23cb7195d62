"""Any steps in any order, with tags for memory: each pass reads what a real model would read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from event_mirror import EventMirror
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from symbolic import SymbolicEngine, brute_force

from kvkeep.core.errors import InvalidValue, NotCached, OutOfPages
from kvkeep.core.groups import GroupLayout, StateSpec, WindowSpec
from kvkeep.core.returns import Ended

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep import Pin, Sequence

LAYOUTS = {
    "a window": GroupLayout(4, (WindowSpec(6, 2),)),
    "the token alone": GroupLayout(4, (WindowSpec(1),)),
    "chunks": GroupLayout(3, (WindowSpec(6, chunked=True),)),
    "a state": GroupLayout(4, (), StateSpec(3)),
    "a state on a grid": GroupLayout(4, (), StateSpec(2, 8)),
    "a window and a state": GroupLayout(4, (WindowSpec(7),), StateSpec(2, 6)),
    "all of them": GroupLayout(2, (WindowSpec(5), WindowSpec(8, 2, chunked=True)), StateSpec(2, 4)),
}
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=24)
SPACES = st.sampled_from(["", "", "", "b"])
LONG = os.environ.get("KVKEEP_FUZZ") == "long"


class GroupMachine(RuleBasedStateMachine):
    """A cache with groups; `brute_force` says what each prompt may reuse."""

    layout = LAYOUTS["all of them"]

    @initialize(
        pages=st.sampled_from([20, 40, 80, 160]),
        eviction=st.sampled_from(["lru", "lru", "priority", "returns"]),
        prefix=st.sampled_from(["radix", "radix", "chain"]),
        first=TOKENS,
    )
    def begin(self, pages: int, eviction: str, prefix: str, first: list[int]) -> None:
        self.now = 0.0
        self.engine = SymbolicEngine(
            pages, self.layout, eviction=eviction, prefix=prefix, hard_pin_pages=10,
            clock=lambda: self.now,
        )  # fmt: skip
        self.cache = self.engine.cache
        self.mirror = EventMirror(self.layout)
        self.cache.subscribe(self.mirror.see)
        self.running: list[Sequence] = []
        self.pins: list[Pin] = []
        self.prompts = [first]

    def pick(self, chosen: int) -> Sequence:
        return self.running[chosen % len(self.running)]

    def given_up(self) -> int:
        groups = self.cache.stats().groups
        assert groups is not None
        return groups.resumes_given_up

    def known(self, chosen: int, length: int) -> list[int]:
        prompt = self.prompts[chosen % len(self.prompts)]
        return prompt[: 1 + length % len(prompt)]

    # --- requests --------------------------------------------------------------------------------

    @rule(
        chosen=st.integers(0, 7),
        length=st.integers(0, 60),
        more=TOKENS,
        space=SPACES,
        session=st.sampled_from([None, None, "one", "other"]),
    )
    def open(
        self, chosen: int, length: int, more: list[int], space: str, session: str | None
    ) -> None:
        prompt = self.known(chosen, length) + more
        expected = brute_force(self.engine, prompt, space)
        assert self.mirror.resume(prompt, space) == expected, "what the events say"
        assert self.cache.match([*prompt, 0], space).num_tokens >= expected
        given_up = self.given_up()
        try:
            sequence = self.cache.open(prompt, space, session=session)
        except OutOfPages:
            return
        if self.given_up() == given_up:
            assert sequence.num_cached == expected
        else:  # there was no room beside the checkpoint
            assert sequence.num_cached < expected
        self.running.append(sequence)
        self.prompts = [*self.prompts[-7:], prompt]

    @precondition(lambda self: self.running)
    @rule(chosen=st.integers(0, 9), chunk=st.sampled_from([1, 3, 8, 64]))
    def finish(self, chosen: int, chunk: int) -> None:
        """Compute all of it, as a scheduler would."""
        self.tried(lambda: self.engine.finish(self.pick(chosen), chunk))

    @precondition(lambda self: self.running)
    @rule(
        chosen=st.integers(0, 9),
        count=st.integers(1, 12),
        at_stops=st.booleans(),
        published=st.none() | st.integers(0, 60),
    )
    def step(self, chosen: int, count: int, at_stops: bool, published: int | None) -> None:
        """One pass, which may run over a stop; then publish all, or less."""
        sequence = self.pick(chosen)
        groups = sequence.groups
        assert groups is not None
        ends = [stop for stop in groups.stops if at_stops and stop > groups.position]
        stop = min([groups.position + count, sequence.num_tokens, *ends])
        if self.tried(lambda: self.engine.step(sequence, stop)):
            part = groups.position if published is None else published % (groups.position + 1)
            sequence.publish(part)

    @precondition(lambda self: self.running)
    @rule(chosen=st.integers(0, 9), tokens=st.lists(st.integers(0, 2), max_size=5))
    def append(self, chosen: int, tokens: list[int]) -> None:
        sequence = self.pick(chosen)
        self.engine.make(sequence)
        self.tried(lambda: sequence.append(tokens))

    @precondition(lambda self: self.running)
    @rule(chosen=st.integers(0, 9))
    def fork(self, chosen: int) -> None:
        self.tried(lambda: self.running.append(self.pick(chosen).fork()))

    @precondition(lambda self: self.running)
    @rule(chosen=st.integers(0, 9))
    def mark(self, chosen: int) -> None:
        """As before drafts that may be rejected."""
        sequence = self.pick(chosen)
        self.engine.make(sequence)

        def marked() -> None:
            assert sequence.groups is not None
            copy = sequence.groups.mark()
            if copy is not None and sequence.groups.position:
                self.engine.copy_state(copy)

        self.tried(marked)

    @precondition(lambda self: self.running)
    @rule(chosen=st.integers(0, 9), length=st.integers(0, 60))
    def truncate(self, chosen: int, length: int) -> None:
        sequence = self.pick(chosen)
        assert sequence.groups is not None
        length %= sequence.num_tokens + 1
        before = sequence.groups.position
        sequence.truncate(length)
        assert sequence.groups.position <= length
        assert sequence.groups.position <= before
        if not length:
            self.tried(lambda: sequence.append(1))

    @precondition(lambda self: self.running)
    @rule(
        chosen=st.integers(0, 9),
        keep=st.sampled_from([True, True, True, False]),
        ended=st.sampled_from([None, Ended("tool"), Ended("stop")]),
    )
    def close(self, chosen: int, keep: bool, ended: Ended | None) -> None:
        sequence = self.running.pop(chosen % len(self.running))
        if sequence.num_tokens:
            self.prompts = [*self.prompts[-7:], sequence.tokens.tolist()[:60]]
        sequence.close(keep=keep, ended=ended)

    @rule(seconds=st.sampled_from([1.0, 60.0, 4000.0]))
    def wait(self, seconds: float) -> None:
        """Conversations wait: the policy `returns` orders by how long."""
        self.now += seconds

    @rule(
        session=st.sampled_from(["one", "other"]),
        space=SPACES,
        hint=st.sampled_from(["suspend", "close"]),
    )
    def hint(self, session: str, space: str, hint: str) -> None:
        """`check` recounts the pages of sessions."""
        one = self.cache.session(session, space)
        state = self.cache.sessions.owners.get((one.namespace, session))
        own = 0 if state is None else sum(node.weight for node in state.nodes)
        assert one.num_pages == own
        if hint == "suspend":
            assert one.suspend(eta=60) in {0, own}
        else:
            assert one.close() == own

    # --- memory ----------------------------------------------------------------------------------

    @rule(pages=st.integers(0, 30))
    def evict(self, pages: int) -> None:
        free, there = self.cache.stats().pages_free, self.cache.num_available
        self.freed(lambda: self.cache.evict(pages))
        assert self.cache.num_available == there, "eviction frees what could be had before"
        assert self.cache.stats().pages_free >= min(free + pages, there)

    @rule(chosen=st.integers(0, 7), length=st.integers(0, 60), hard=st.booleans())
    def pin(self, chosen: int, length: int, hard: bool) -> None:
        self.tried(
            lambda: self.pins.append(self.cache.pin(self.known(chosen, length), hard=hard)),
            NotCached,
            InvalidValue,
        )

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.tried(lambda: self.cache.unpin(self.pins.pop()), NotCached)

    @rule(space=st.sampled_from([None, "", "b"]))
    def clear(self, space: str | None) -> None:
        self.freed(lambda: self.cache.clear(space))
        if space is None and not self.running and not any(pin.hard for pin in self.pins):
            assert self.cache.stats().pages_used == 0, "nothing is in use"

    @rule(chosen=st.integers(0, 7), length=st.integers(0, 60))
    def remove(self, chosen: int, length: int) -> None:
        prompt = self.known(chosen, length)
        self.freed(lambda: self.cache.remove(prompt).pages)
        left = self.cache.remove(prompt)
        assert left.pages == 0, "what is in use stays"

    # --- always ----------------------------------------------------------------------------------

    def freed(self, step: Callable[[], int]) -> None:
        """Assert that a step returns, and its events say, how many pages it freed."""
        before, said = self.cache.stats().pages_free, self.mirror.freed
        count = step()
        assert self.cache.stats().pages_free - before == count
        assert self.mirror.freed - said == count

    def tried(self, step: Callable[[], Any], *others: type[Exception]) -> bool:
        try:
            step()
        except (OutOfPages, *others):
            return False
        return True

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for sequence in self.running:
            sequence.close()
        for pin in self.pins:
            self.tried(lambda pin=pin: self.cache.unpin(pin), NotCached)
        self.cache.check()
        self.cache.evict(10**6)
        assert self.cache.stats().pages_used == 0, "a page was lost"


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_steps_in_any_order(name: str) -> None:
    machine = type(f"Machine of {name}", (GroupMachine,), {"layout": LAYOUTS[name]})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=1500 if LONG else 40,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
