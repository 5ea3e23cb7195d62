"""The state machine of a place's index, beside a model that is too simple to be wrong."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.tiers.index import Index
from kvkeep.store.tiers.two_queues import tier_policies
from kvkeep.testing.backend_hooks import block_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvkeep.store.tiers.tier_shares import TenantWeights

BUDGET = 40
SPACES = [number.to_bytes(SPACE_BYTES, "big") for number in range(3)]
BLOCKS = [block_id(number, space) for space in range(3) for number in range(5)]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Known:
    size: int
    order: int
    used: float
    held: int = 0
    pinned: float = 0.0


class Machine(RuleBasedStateMachine):
    """Every method of the index; what may go is said by the model, in LRU also what does."""

    name = "lru"
    shares: TenantWeights | None = None

    @initialize(ttl=st.sampled_from([None, None, 50.0]), ordered=st.sampled_from([None, 1, 4]))
    def begin(self, ttl: float | None, ordered: int | None) -> None:
        self.ordered = ordered
        self.clock = Clock()
        self.ttl = ttl
        self.index = Index(
            tier_policies()[self.name],
            ttl=ttl,
            clock=self.clock,
            budget=BUDGET,
            ordered=ordered,
            shares=self.shares,
        )
        self.known: dict[bytes, Known] = {}
        self.quotas: dict[bytes, int] = {}
        self.reserved: list[tuple[bytes, int]] = []
        self.away: dict[bytes, int] = {}  # holds of blocks that were forgotten
        self.order = 0

    # --- the model ---------------------------------------------------------------------------

    def next(self) -> int:
        self.order += 1
        return self.order

    def may_go(self, space: bytes | None = None) -> list[bytes]:
        """Oldest first. Only where a pin is asked about does it end."""
        blocks = [
            block
            for block, one in self.known.items()
            if not one.held and one.pinned <= self.clock.now
            if space not in self.quotas or block.startswith(space or b"")
        ]
        return sorted(blocks, key=lambda block: self.known[block].order)

    def expired(self, block: bytes) -> bool:
        one = self.known[block]
        old = self.ttl is not None and one.used + self.ttl < self.clock.now
        return old and one.pinned < self.clock.now

    def bytes_of(self, blocks: Iterable[bytes]) -> int:
        return sum(self.known[block].size for block in blocks)

    def lose(self, block: bytes) -> None:
        one = self.known.pop(block)
        if one.held:
            self.away[block] = self.away.get(block, 0) + one.held

    # --- steps -------------------------------------------------------------------------------

    @rule(block=st.sampled_from(BLOCKS), size=st.integers(1, 9))
    def add(self, block: bytes, size: int) -> None:
        self.index.add(block, size)
        self.added(block, size)

    def added(self, block: bytes, size: int) -> None:
        one = self.known.get(block) or Known(0, 0, 0.0)
        one.size, one.order, one.used = size, self.next(), self.clock.now
        one.held += self.away.pop(block, 0)
        self.known[block] = one

    @rule(
        found=st.lists(
            st.tuples(st.sampled_from(BLOCKS), st.integers(1, 9), st.floats(900.0, 1000.0)),
            max_size=6,
            unique_by=(lambda item: item[0], lambda item: item[2]),  # equal times: any order
        )
    )
    def fill(self, found: list[tuple[bytes, int, float]]) -> None:
        if self.quotas:  # of several policies the block last used is compared
            found = [(b, s, self.known[b].used if b in self.known else u) for b, s, u in found]
        gone = self.index.fill(iter(found))
        assert set(gone) == self.known.keys() - {block for block, _, _ in found}
        for block in gone:
            self.lose(block)
        for block, size, used in sorted(found, key=lambda item: item[2]):
            one = self.known.setdefault(block, Known(size, -1, used))
            if one.order < 0:
                one.order = self.next()
            one.used = max(used, one.used)

    @rule(
        blocks=st.lists(st.sampled_from(BLOCKS), max_size=6, unique=True),
        stored=st.booleans(),
    )
    def used(self, blocks: list[bytes], stored: bool) -> None:
        tell = self.index.used(blocks, grain=0.0, stored=stored)
        assert tell == [block for block in reversed(blocks) if block in self.known]
        for block in tell:
            self.known[block].order = self.next()
            self.known[block].used = self.clock.now
        assert self.index.unnoted() == []

    @rule(blocks=st.lists(st.sampled_from(BLOCKS), max_size=6))
    def hold_all(self, blocks: list[bytes]) -> None:
        held: list[bytes] = []
        self.index.hold(blocks, held)
        assert held == [block for block in blocks if block in self.known]
        for block in held:
            self.known[block].held += 1

    @rule(blocks=st.lists(st.sampled_from(BLOCKS), max_size=6))
    def free_all(self, blocks: list[bytes]) -> None:
        self.index.free(blocks)
        for block in blocks:
            if self.away.get(block):
                self.away[block] -= 1
            elif block in self.known:
                self.known[block].held = max(0, self.known[block].held - 1)

    @rule(block=st.sampled_from(BLOCKS))
    def forget(self, block: bytes) -> None:
        assert self.index.forget(block) == (block in self.known)
        if block in self.known:
            self.lose(block)

    @rule(needed=st.integers(0, 30), space=st.sampled_from([None, None, *SPACES]))
    def victims(self, needed: int, space: bytes | None) -> None:
        possible = self.may_go(space)
        gone = self.index.victims(needed, space)
        assert len(set(gone)) == len(gone)
        assert set(gone) <= set(possible)
        freed = self.bytes_of(gone)
        assert freed >= needed or set(gone) == set(possible), "as much as is asked for, or all"
        assert not gone or self.bytes_of(gone[:-1]) < needed, "and not more than that"
        self.check_order(gone, possible)
        for block in gone:
            self.lose(block)

    def check_order(self, gone: Sequence[bytes], possible: Sequence[bytes]) -> None:
        if self.name == "lru" and self.ordered is None:
            assert gone == possible[: len(gone)]

    @rule()
    def expire(self) -> None:
        old = {block for block in self.known if self.expired(block)}
        gone = self.index.expired()
        assert set(gone) == old
        assert len(gone) == len(old)
        for block in gone:
            self.lose(block)

    @rule(seconds=st.floats(0.0, 30.0))
    def time_goes_by(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(
        blocks=st.lists(st.sampled_from(BLOCKS), max_size=5),
        seconds=st.floats(1.0, 60.0),
        most=st.integers(0, 40),
    )
    def pin(self, blocks: list[bytes], seconds: float, most: int) -> None:
        held = self.bytes_of(b for b, one in self.known.items() if one.pinned > self.clock.now)
        expected = []
        for block in blocks:
            one = self.known.get(block)
            if one is None or self.expired(block):
                continue
            if one.pinned <= self.clock.now:
                if held + one.size > most:
                    break
                held += one.size
            one.pinned = max(one.pinned, self.clock.now + seconds)
            expected.append(block)
        assert self.index.pin(blocks, seconds, most) == expected

    @rule(blocks=st.lists(st.sampled_from(BLOCKS), max_size=5))
    def unpin(self, blocks: list[bytes]) -> None:
        pinned = self.index.unpin(blocks)
        now, expected = self.clock.now, []
        for block in blocks:
            one = self.known.get(block)
            if one is not None and one.pinned > now:
                one.pinned = 0.0
                expected.append(block)
        assert pinned == expected

    @precondition(lambda self: self.name == "lru" or not self.quotas)
    @rule(space=st.sampled_from(SPACES), limit=st.integers(0, 30))
    def set_quota(self, space: bytes, limit: int) -> None:
        self.index.set_quota(space, limit)
        self.quotas[space] = limit

    @rule(space=st.sampled_from(SPACES), more=st.integers(1, 9))
    def reserve(self, space: bytes, more: int) -> None:
        over = self.index.over_quota(space, more)
        assert self.index.reserve(space, more) == over
        if not over:
            self.reserved.append((space, more))

    @precondition(lambda self: self.reserved)
    @rule(added=st.booleans())
    def end_reservation(self, added: bool) -> None:
        space, more = self.reserved.pop()
        if not added:
            self.index.unreserve(space, more)
            return
        block = next(block for block in BLOCKS if block.startswith(space))
        self.index.add_reserved([block], [more])
        self.added(block, more)

    # --- what always holds -------------------------------------------------------------------

    @invariant()
    def it_adds_up(self) -> None:
        if not hasattr(self, "index"):
            return
        index, known = self.index, self.known
        index.check()
        assert set(index.blocks()) == set(known)
        assert len(index) == len(known)
        assert index.total_bytes == self.bytes_of(known)
        there = [block for block in BLOCKS if block in known and not self.expired(block)]
        assert [block for block in BLOCKS if block in index] == there
        assert [b for b in BLOCKS if index.expired_at(b) is not None] == [
            b for b in BLOCKS if b in known and b not in there
        ]
        missing = next((i for i, b in enumerate(BLOCKS) if b not in there), len(BLOCKS))
        assert index.leading(BLOCKS) == missing
        for space in SPACES:
            mine = {block for block in known if block.startswith(space)}
            assert set(index.blocks(space)) == mine
            held = self.bytes_of(mine)
            assert index.spaces().get(space, 0) == held
            limit = self.quotas.get(space)
            over = index.over_quota(space, 7)
            more = 7 + sum(size for where, size in self.reserved if where == space)
            expected = 0 if limit is None else -1 if limit < more else max(0, held + more - limit)
            assert over == expected

    @invariant()
    def what_is_pinned_is_counted(self) -> None:
        if hasattr(self, "index"):
            pinned = [b for b, one in self.known.items() if one.pinned > self.clock.now]
            assert self.index.pinned_bytes == self.bytes_of(pinned)


def machine_of(policy: str, kind: type[Machine] = Machine) -> Any:
    """Return the test case of a machine with one eviction policy."""
    kind = type(policy.upper(), (kind,), {"name": policy})
    case = kind.TestCase
    long = os.environ.get("KVKEEP_FUZZ") == "long"
    case.settings = settings(
        max_examples=1000 if long else 60 if policy == "lru" else 20,
        stateful_step_count=30,
        deadline=None,
    )
    return case
