"""`SlotCache` against a naive model that keeps whole token lists and writes real contents.

Each position of a fake KV memory holds a tag of everything before it (namespace and tokens), as
real KV does. A fake engine makes the copies that are named and computes the rest on top of what it
finds, so a wrong prefix, a source overwritten too early or a stale slot leaves a wrong tag.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvkeep.core.errors import IllegalStep, NotCached, OutOfSlots
from kvkeep.core.slots import SlotCache

if TYPE_CHECKING:
    from kvkeep.core.slots import SlotLease, SlotPin

MAX_TOKENS = 12
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_TOKENS)
spaces = st.sampled_from(["a", "a", "a", "b"])
fractions = st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0])
picks = st.integers(0, 7)


def tag(previous: object, token: int) -> int:
    return hash((previous, token))


def tags(space: str, tokens: list[int]) -> list[int]:
    result: list[int] = []
    for token in tokens:
        result.append(tag(result[-1] if result else space, token))
    return result


def common(left: list[int], right: list[int]) -> int:
    n = 0
    while n < min(len(left), len(right)) and left[n] == right[n]:
        n += 1
    return n


@dataclass
class Slot:
    space: str = ""
    tokens: list[int] = field(default_factory=list)
    published: int = 0
    computed: int = 0  # positions whose content the engine put there
    lease: SlotLease | None = None
    used: int = 0

    @property
    def idle(self) -> bool:
        return self.lease is None and self.published > 0

    def shared(self, space: str, prompt: list[int]) -> int:
        return common(self.tokens[: self.published], prompt) if self.space == space else 0


@dataclass
class Pin:
    pin: SlotPin
    slot: int
    space: str
    tokens: list[int]
    hard: bool
    expires: float


class SlotMachine(RuleBasedStateMachine):
    now = 0.0

    @initialize(num_slots=st.sampled_from([1, 2, 3, 3, 4, 5]))
    def start(self, num_slots: int) -> None:
        self.now = 0.0
        self.cache = SlotCache(num_slots, MAX_TOKENS, clock=lambda: self.now)
        self.kv: list[list[object]] = [[None] * MAX_TOKENS for _ in range(num_slots)]
        self.slots = [Slot() for _ in range(num_slots)]
        self.pins: list[Pin] = []
        self.over: list[SlotLease] = []
        self.ended_pins: list[SlotPin] = []
        self.time = 0
        self.hits = self.asked = 0

    # -- the model's own answers ----------------------------------------------------------------

    def running(self) -> list[int]:
        return [i for i, slot in enumerate(self.slots) if slot.lease is not None]

    def readers(self, index: int) -> int:
        copies = [slot.lease.copy for slot in self.slots if slot.lease and slot.lease.copy]
        return max((copy.tokens for copy in copies if copy.src == index), default=0)

    def pinned(self, index: int, *, only_hard: bool) -> int:
        held = [p for p in self.pins if p.slot == index and (p.hard or not only_hard)]
        return max((len(p.tokens) for p in held), default=0)

    def locked(self, index: int) -> int:
        return max(self.readers(index), self.pinned(index, only_hard=True))

    def guarded(self, index: int) -> int:
        return max(self.readers(index), self.pinned(index, only_hard=False))

    def expected_slot(self, space: str, prompt: list[int]) -> tuple[int, int] | None:
        """The slot and the tokens kept in it, after the rules in the module's docstring."""
        limit = len(prompt) - 1
        idle = [i for i, slot in enumerate(self.slots) if slot.idle]
        kept = {i: min(self.slots[i].shared(space, prompt), limit) for i in idle}
        whole = [
            i
            for i in idle
            if 0 < self.slots[i].published == self.slots[i].shared(space, prompt)
            and self.guarded(i) <= kept[i]
        ]
        if whole:
            best = max(whole, key=lambda i: (self.slots[i].published, -i))
            return best, kept[best]
        for i, slot in enumerate(self.slots):
            if slot.lease is None and not slot.idle:
                return i, 0
        by_age = sorted(idle, key=lambda i: self.slots[i].used)
        for guard in (self.guarded, self.locked):
            for i in by_age:
                if guard(i) <= kept[i]:
                    return i, kept[i]
        return None

    def touch(self, index: int) -> None:
        self.time += 1
        self.slots[index].used = self.time

    def give_way(self, index: int, kept: int) -> None:
        for pin in [p for p in self.pins if p.slot == index and len(p.tokens) > kept]:
            assert not pin.hard
            assert not pin.pin.held
            self.pins.remove(pin)
            self.ended_pins.append(pin.pin)

    def pick(self, indices: list[int], which: int) -> int:
        return indices[which % len(indices)]

    # -- rules ----------------------------------------------------------------------------------

    @rule(space=spaces, prompt=prompts, like=picks, reuse=fractions, publish=fractions)
    def acquire(
        self, space: str, prompt: list[int], like: int, reuse: float, publish: float
    ) -> None:
        # Most prompts begin as one of the slots does: random ones have little in common.
        seen = self.slots[self.pick(list(range(len(self.slots))), like)]
        front = seen.tokens[: round(reuse * len(seen.tokens))]
        index = self.start_request(seen.space or space, (front + prompt)[:MAX_TOKENS])
        if index is not None and publish:
            self.compute(index, publish)

    @rule(space=spaces, prompt=prompts)
    def serve(self, space: str, prompt: list[int]) -> None:
        """A request from beginning to end, so that there is something to find and to evict."""
        index = self.start_request(space, prompt)
        if index is not None:
            self.compute(index, 1.0)
            self.end_request(index)

    def start_request(self, space: str, prompt: list[int]) -> int | None:
        stored = [slot.shared(space, prompt) for slot in self.slots]
        longest = min(max(stored), len(prompt) - 1)
        expected = self.expected_slot(space, prompt)
        before = self.cache.stats()
        if expected is None:
            with pytest.raises(OutOfSlots):
                self.cache.acquire(prompt, space)
            assert self.cache.stats() == before
            return None
        lease = self.cache.acquire(prompt, space)
        index, kept = expected
        assert lease.slot == index
        assert lease.num_cached == longest < len(prompt)
        if lease.copy is None:
            assert kept == longest
        else:
            source = lease.copy.src
            assert (lease.copy.dst, lease.copy.tokens, lease.copy.start) == (index, longest, kept)
            assert source != index
            assert stored[source] >= longest
        assert self.slots[index].lease is None
        self.give_way(index, kept)
        self.slots[index] = Slot(space, list(prompt), kept, kept, lease)
        if lease.copy:
            self.touch(lease.copy.src)
        self.hits += longest
        self.asked += len(prompt)
        return index

    @precondition(lambda self: self.running())
    @rule(which=picks)
    def copy(self, which: int) -> None:
        slot = self.slots[self.pick(self.running(), which)]
        lease = slot.lease
        assert lease is not None
        if lease.copy is None:
            with pytest.raises(IllegalStep):
                lease.copied()
            return
        copy = lease.copy
        self.make(lease)
        lease.copied()
        assert lease.copy is None
        slot.published = slot.computed = copy.tokens

    def make(self, lease: SlotLease) -> None:
        copy = lease.copy
        assert copy is not None
        span = slice(copy.start, copy.tokens)
        self.kv[copy.dst][span] = self.kv[copy.src][span]

    @precondition(lambda self: self.running())
    @rule(which=picks, much=fractions)
    def compute_and_publish(self, which: int, much: float) -> None:
        self.compute(self.pick(self.running(), which), much)

    def compute(self, index: int, much: float) -> None:
        slot = self.slots[index]
        lease = slot.lease
        assert lease is not None
        n = round(much * len(slot.tokens))
        copy = lease.copy
        if copy is not None:
            if n < copy.tokens:
                with pytest.raises(IllegalStep):
                    lease.publish(n)
                return
            self.make(lease)
            slot.computed = copy.tokens
        memory = self.kv[lease.slot]
        for at in range(slot.computed, n):
            memory[at] = tag(memory[at - 1] if at else slot.space, slot.tokens[at])
        slot.computed = max(slot.computed, n)
        lease.publish(n)
        slot.published = max(slot.published, n)

    @precondition(lambda self: self.running())
    @rule(which=picks, more=st.lists(st.integers(0, 1), max_size=3))
    def extend(self, which: int, more: list[int]) -> None:
        slot = self.slots[self.pick(self.running(), which)]
        assert slot.lease is not None
        more = more[: MAX_TOKENS - len(slot.tokens)]
        slot.lease.extend(more)
        slot.tokens += more

    @precondition(lambda self: self.running())
    @rule(which=picks)
    def release(self, which: int) -> None:
        self.end_request(self.pick(self.running(), which))

    def end_request(self, index: int) -> None:
        slot = self.slots[index]
        assert slot.lease is not None
        slot.lease.release()
        self.over.append(slot.lease)
        slot.lease = None
        del slot.tokens[slot.published :]
        self.touch(index)
        if not slot.published:
            self.slots[index] = Slot()

    @rule(
        which=picks,
        much=st.sampled_from([0.3, 0.7, 0.95, 1.0]),
        ttl=st.sampled_from([None, None, 2.0, 5.0]),
        hard=st.booleans(),
    )
    def pin(self, which: int, much: float, ttl: float | None, *, hard: bool) -> None:
        slot = self.slots[self.pick(list(range(len(self.slots))), which)]
        tokens = slot.tokens[: round(much * (slot.published + (much == 1)))]  # or one too many
        if not tokens:
            return
        holders = [
            i for i, s in enumerate(self.slots) if s.shared(slot.space, tokens) == len(tokens)
        ]
        if not holders:
            with pytest.raises(NotCached):
                self.cache.pin(tokens, slot.space, ttl=ttl, hard=hard)
            return
        hard_slots = {p.slot for p in self.pins if p.hard} | {holders[0]}
        if hard and len(hard_slots) > len(self.slots) - 1:
            with pytest.raises(IllegalStep):
                self.cache.pin(tokens, slot.space, ttl=ttl, hard=hard)
            return
        pin = self.cache.pin(tokens, slot.space, ttl=ttl, hard=hard)
        assert pin.slot == holders[0]
        expires = float("inf") if ttl is None else self.now + ttl
        self.pins.append(Pin(pin, pin.slot, slot.space, tokens, hard, expires))

    @precondition(lambda self: self.pins)
    @rule(which=picks)
    def unpin(self, which: int) -> None:
        pin = self.pins.pop(self.pick(list(range(len(self.pins))), which)).pin
        assert self.cache.unpin(pin)
        with pytest.raises(IllegalStep):
            self.cache.unpin(pin)

    @precondition(lambda self: self.ended_pins)
    @rule()
    def unpin_what_ended(self) -> None:
        assert not self.cache.unpin(self.ended_pins.pop())

    @rule(seconds=st.sampled_from([1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for pin in [p for p in self.pins if p.expires <= self.now]:
            self.pins.remove(pin)
            self.ended_pins.append(pin.pin)

    @precondition(lambda self: self.over)
    @rule(which=picks)
    def use_a_lease_that_is_over(self, which: int) -> None:
        lease = self.over[self.pick(list(range(len(self.over))), which)]
        before = self.cache.stats()
        for step in (
            lambda: lease.extend([1]),
            lambda: lease.publish(1),
            lease.release,
            lease.copied,
        ):
            with pytest.raises(IllegalStep):
                step()
        assert self.cache.stats() == before

    @precondition(lambda self: self.time % 10 == 3)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.over += [slot.lease for slot in self.slots if slot.lease is not None]
        self.ended_pins += [pin.pin for pin in self.pins]
        self.pins.clear()
        self.slots = [Slot() for _ in self.slots]
        self.touch(0)

    # -- what always holds ------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        for index, slot in enumerate(self.slots):
            own = slot.tokens[: slot.published]
            assert self.kv[index][: slot.published] == tags(slot.space, own)
            assert self.cache.match(slot.tokens, slot.space) == max(
                other.shared(slot.space, slot.tokens) for other in self.slots
            )
            if slot.lease is not None:
                assert slot.lease.running
                assert slot.lease.tokens.tolist() == slot.tokens
                assert slot.lease.published == slot.published
                if slot.lease.copy:  # what is to be copied is still there
                    copy = slot.lease.copy
                    source = self.kv[copy.src][: copy.tokens]
                    assert source == tags(slot.space, slot.tokens[: copy.tokens])
        for pin in self.pins:
            assert pin.pin.held
            assert self.slots[pin.slot].shared(pin.space, pin.tokens) == len(pin.tokens)
        stats = self.cache.stats()
        assert stats.running == len(self.running())
        assert stats.idle == sum(slot.idle for slot in self.slots)
        assert stats.empty + stats.idle + stats.running == stats.num_slots
        assert stats.cached_tokens == sum(slot.published for slot in self.slots)
        assert stats.pinned == len({pin.slot for pin in self.pins})
        assert stats.hard_pinned == len({pin.slot for pin in self.pins if pin.hard})
        assert (stats.hit_tokens, stats.prompt_tokens) == (self.hits, self.asked)


TestSlotsAgainstModel = SlotMachine.TestCase
TestSlotsAgainstModel.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
