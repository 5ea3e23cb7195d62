"""Shares of tiers: whose block goes, beside a model of sums, and what a flooder can take."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from catalogue_machine import BLOCKS, BUDGET, SPACES, Clock, Machine, machine_of
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvkeep import InvalidValue
from kvkeep.core.eviction import LRU
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.core.returns import Wait
from kvkeep.store.tiers import tier_shares
from kvkeep.store.tiers.block_waits import BlockWaits, SharedReturns
from kvkeep.store.tiers.catalogue import Catalogue
from kvkeep.store.tiers.tier_shares import TenantWeights
from kvkeep.store.tiers.two_queues import tier_policies
from kvkeep.testing.backend_hooks import block_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WEIGHTS = {"a": 2.0, "b": 0.5}
NAMES = ["a", "b", "c", None]
_UNKNOWN = "?"


class SharesMachine(Machine):
    """The machine of a catalogue, with shares and announcements.

    A victim is a block of a tenant above its floor, if there is one, and in LRU of the one whose
    oldest block was used longest ago.
    """

    shares = TenantWeights(WEIGHTS, {SPACES[0]: "a"})

    def name_of(self, space: bytes) -> str | None:
        if not hasattr(self, "names"):
            self.names: dict[bytes, str | None] = {SPACES[0]: "a"}
        return self.names.get(space, _UNKNOWN)

    def tenant(self, block: bytes) -> object:
        space = block[:SPACE_BYTES]
        name = self.name_of(space)
        return space if name == _UNKNOWN or space in self.quotas else (name,)

    @rule(
        found=st.lists(
            st.tuples(st.sampled_from(BLOCKS), st.integers(1, 9), st.floats(900.0, 1000.0)),
            max_size=6,
            unique_by=lambda item: item[0],
        )
    )
    def fill(self, found: list[tuple[bytes, int, float]]) -> None:
        """Others use no block, so that the order is ours alone."""
        known = self.known
        super().fill([(b, s, known[b].used if b in known else used) for b, s, used in found])

    @rule(space=st.sampled_from(SPACES), name=st.sampled_from(NAMES))
    def announce(self, space: bytes, name: str | None) -> None:
        self.catalogue.announce(space, name)
        self.name_of(space)
        self.names[space] = name

    @rule(space=st.sampled_from(SPACES), limit=st.integers(1, 30))
    def set_quota(self, space: bytes, limit: int) -> None:
        self.catalogue.set_quota(space, limit)
        self.quotas[space] = limit

    @precondition(lambda self: hasattr(self, "catalogue"))
    @invariant()
    def time_passes(self) -> None:
        self.clock.now += 0.001

    @rule(needed=st.integers(0, 30), space=st.sampled_from([None, None, *SPACES]))
    def victims(self, needed: int, space: bytes | None) -> None:
        self.asked = space
        super().victims(needed, space)

    def check_order(self, gone: Sequence[bytes], possible: Sequence[bytes]) -> None:
        exact = self.name == "lru" and self.ordered is None
        if self.asked in self.quotas:
            assert not exact or gone == possible[: len(gone)]
            return
        known, candidates = set(self.known), list(possible)
        for block in gone:
            giver, above, others = self.tenant(block), *self.givers(known, candidates)
            assert giver in (above or others)
            if exact:
                mine = [one for one in candidates if self.tenant(one) == giver]
                assert block == mine[0]
                assert giver not in above or min(self.known[one].used for one in mine) == min(
                    self.known[one].used for one in candidates if self.tenant(one) in above
                )
            candidates.remove(block)
            known.remove(block)

    def givers(
        self, known: set[bytes], candidates: Sequence[bytes]
    ) -> tuple[set[object], set[object]]:
        """Return the tenants above their floors, and those that give if there are none."""
        weights: dict[object, float] = {}
        held: dict[object, int] = {}
        for block in known:
            tenant, name = self.tenant(block), self.name_of(block[:SPACE_BYTES])
            weights[tenant] = 0.0 if name is None else WEIGHTS.get(name, 1.0)
            held[tenant] = held.get(tenant, 0) + self.known[block].size
        here = {self.tenant(block) for block in candidates}
        levels = {one: held[one] / weights[one] for one in here if weights[one]}
        if not levels:
            return set(), here
        floor = 0.9 * BUDGET / sum(weights.values())
        most = max(levels.values())
        return (
            {one for one, level in levels.items() if level > floor},
            {one for one, level in levels.items() if level == most},
        )


globals().update({f"Test_{one}": machine_of(one, SharesMachine) for one in tier_policies()})


@pytest.mark.parametrize("name", sorted(tier_policies()))
@pytest.mark.parametrize("ordered", [None, 4])
def test_long_walks(name: str, ordered: int | None) -> None:
    """As the machine, with many blocks and many victims."""
    chance = random.Random(f"{name} {ordered}")
    for _ in range(12 if name == "lru" else 3):
        machine = type("Walk", (SharesMachine,), {"name": name})()
        machine.begin(ttl=chance.choice([None, 5.0]), ordered=ordered)
        for _ in range(250):
            walk(machine, chance)
            machine.it_adds_up()
            machine.what_is_pinned_is_counted()
            machine.time_passes()


def walk(machine: SharesMachine, chance: random.Random) -> None:
    """One step, with more of what fills and evicts."""
    some, space = chance.sample(BLOCKS, chance.randrange(1, 5)), chance.choice(SPACES)
    now, mine = machine.clock.now, [block for block in BLOCKS if block.startswith(space)]
    listed = [(block, one.size, one.used) for block, one in machine.known.items()]
    more = [(block, 3, now - chance.random()) for block in some if block not in machine.known]
    wants = chance.choice([None, None, space])
    steps: list[tuple[int, Callable[[], object]]] = [
        (40, lambda: [machine.add(block, chance.randrange(1, 10)) for block in some]),
        (20, lambda: machine.victims(chance.randrange(40), wants)),
        (10, lambda: machine.used(mine[: chance.randrange(6)], set(some))),
        (5, lambda: machine.hold_all(some)),
        (7, lambda: machine.free_all(BLOCKS)),
        (2, lambda: machine.pin(some, chance.uniform(0.01, 0.3), 40)),
        (2, lambda: machine.unpin(some)),
        (3, lambda: machine.forget(some[0])),
        (2, lambda: machine.fill(listed[chance.randrange(2) * len(listed) // 2 :] + more)),
        (2, lambda: machine.expire(chance.choice([1, 1000]))),
        (4, lambda: machine.announce(space, chance.choice(NAMES))),
        (1, lambda: machine.set_quota(space, chance.randrange(1, 30))),
    ]
    chance.choices([step for _, step in steps], [weight for weight, _ in steps])[0]()


# --- one by one ------------------------------------------------------------------------------


def blocks_of(space: int, count: int, first: int = 0) -> list[bytes]:
    return [block_id(number, space) for number in range(first, first + count)]


def space_of(number: int) -> bytes:
    return block_id(0, number)[:SPACE_BYTES]


def shared(
    weights: dict[str, float] | None = None,
    spaces: dict[bytes, str | None] | None = None,
    *,
    name: str = "lru",
    budget: int = 1000,
    ordered: int | None = None,
    clock: Clock | None = None,
) -> Catalogue:
    shares = TenantWeights(weights or {}, spaces or {})
    clock = clock or Clock()
    return Catalogue(
        tier_policies()[name], budget=budget, ordered=ordered, clock=clock, shares=shares
    )


def store(catalogue: Catalogue, blocks: Sequence[bytes], budget: int = 1000, size: int = 10) -> int:
    """A prompt: what is there is used, the rest is added; return how many were there."""
    catalogue._clock.now += 1  # type: ignore[attr-defined]
    found = catalogue.leading(blocks)
    for block in blocks[found:]:
        short = catalogue.total_bytes + size - budget
        if short > 0:
            catalogue.victims(short)
        catalogue.add(block, size)
    catalogue.used(blocks, new=set(blocks[found:]))
    return found


def flood(catalogue: Catalogue, space: int, prompts: int, first: int = 1000) -> None:
    for number in range(prompts):
        store(catalogue, blocks_of(space, 5, first + 5 * number))


def held(catalogue: Catalogue, space: int) -> int:
    return catalogue.spaces().get(space_of(space), 0)


@pytest.mark.parametrize("ordered", [None, 20])
@pytest.mark.parametrize("name", sorted(tier_policies()))
def test_a_flooder_evicts_its_own(name: str, ordered: int | None) -> None:
    catalogue = shared(name=name, ordered=ordered)
    for space in range(1, 5):
        store(catalogue, blocks_of(space, 15))
    flood(catalogue, 9, 60)
    catalogue.check()
    assert [catalogue.leading(blocks_of(space, 15)) for space in range(1, 5)] == [15] * 4
    assert held(catalogue, 9) == 400


def test_others_use_what_a_tenant_leaves_and_give_it_back() -> None:
    catalogue = shared({"a": 3.0}, {space_of(1): "a"})
    store(catalogue, blocks_of(1, 2))
    flood(catalogue, 9, 60)
    assert held(catalogue, 9) == 980
    flood(catalogue, 1, 60)
    assert 675 <= held(catalogue, 1) <= 780
    assert held(catalogue, 1) + held(catalogue, 9) == 1000
    catalogue.check()


def test_a_share_counts_all_spaces_of_a_tenant() -> None:
    catalogue = shared({}, {space_of(1): "a", space_of(2): "a", space_of(3): "b"})
    for _ in range(2):
        for space in (1, 2, 3):
            flood(catalogue, space, 30)
    assert 440 <= held(catalogue, 3) <= 560
    apart = shared({}, {})
    for _ in range(2):
        for space in (1, 2, 3):
            flood(apart, space, 30)
    assert held(apart, 3) <= 410, "three tenants of weight 1, until they are announced"
    for space, name in ((1, "a"), (2, "a"), (3, "b")):
        apart.announce(space_of(space), name)
        apart.check()
    for space in (1, 2, 3):
        flood(apart, space, 30, first=5000)
    assert 440 <= held(apart, 3) <= 560


@pytest.mark.parametrize("ordered", [None, 7])
def test_who_is_announced_late_keeps_the_order_of_uses(ordered: int | None) -> None:
    clock = Clock()
    catalogue = shared({}, {space_of(1): "a"}, ordered=ordered, clock=clock)
    blocks = [
        block for pair in zip(blocks_of(1, 20), blocks_of(2, 20), strict=True) for block in pair
    ]
    for block in blocks:
        clock.now += 1
        catalogue.add(block, 10)
    random.Random(1).shuffle(blocks)
    for block in blocks:
        clock.now += 1
        catalogue.used([block])
    catalogue.announce(space_of(2), "a")
    catalogue.check()
    assert [catalogue.victims(1)[0] for _ in blocks] == blocks


def test_the_order_is_the_same_with_a_bound() -> None:
    """Whoever's blocks are rows: of tenants above their shares, the oldest block goes."""
    chance, clock = random.Random(3), Clock()
    names: dict[bytes, str | None] = {space_of(space): str(space) for space in range(5)}
    plain, bounded = (
        shared({"1": 3.0, "2": 0.3}, names, budget=3000, ordered=ordered, clock=clock)
        for ordered in (None, 30)
    )
    for _ in range(1500):
        clock.now += 1
        some = blocks_of(min(4, int(chance.expovariate(1))), 3, chance.randrange(60))
        for catalogue in (plain, bounded):
            catalogue.add(some[0], 10)
            catalogue.used(some)
        short = max(0, plain.total_bytes - 1500)
        assert plain.victims(short) == bounded.victims(short)
    bounded.check()
    assert len(bounded._table.blocks) <= 31
    assert len(bounded) == len(plain) > 100


def test_a_space_with_a_quota_has_a_share_of_its_own() -> None:
    catalogue = shared({"a": 3.0}, {space_of(1): "a", space_of(2): "a"})
    catalogue.set_quota(space_of(1), 200)
    for space in (1, 2, 9):
        store(catalogue, blocks_of(space, 15))
    flood(catalogue, 9, 60)
    assert [catalogue.leading(blocks_of(space, 15)) for space in (1, 2)] == [15, 15]
    assert catalogue.over_quota(space_of(1), 100) == 50
    assert all(block.startswith(space_of(1)) for block in catalogue.victims(50, space_of(1)))
    assert held(catalogue, 1) == 100
    catalogue.check()


def test_spaces_that_come_and_go_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_shares, "_MOST_SPACES", 1 << 10)
    catalogue = shared({"named": 2.0}, {space_of(0): "named"}, name="2q", ordered=10)
    tenants = catalogue._table.order.tenants
    assert tenants is not None
    for number in range(1, 3_000):
        store(catalogue, [block_id(0, number)])
        if number % 7 == 0:
            catalogue.announce(space_of(number), f"tenant {number}")
    catalogue.check()
    assert len(tenants._spaces) <= 1 << 10
    assert len(tenants._named) <= (1 << 10) // 7 + 100
    assert tenants.tenant(space_of(0)).name == "named"
    assert len(catalogue._table.packed._queues) <= 100


def test_waits_order_the_blocks_of_each_tenant() -> None:
    """A tenant above its share gives what its conversations have left behind."""
    clock = Clock()
    catalogue = shared(name="returns", clock=clock)
    waits = BlockWaits(SharedReturns(), clock)
    catalogue.waiting.attend(waits)
    for space in (1, 2):
        for first in (0, 10):
            blocks = blocks_of(space, 10, first)
            clock.now += 1
            for block in blocks:
                catalogue.add(block, 10)
            waits.used(blocks)
            wait = Wait(0, clock.now, 1, (), waits.returns.tenant(None))
            waits.begin(blocks, wait)
            catalogue.used(blocks)
            if first == 10:
                wait.over = True
            catalogue.waiting.changed(blocks)
    gone = catalogue.victims(200)
    assert set(gone) == {*blocks_of(1, 10, 10), *blocks_of(2, 10, 10)}
    catalogue.check()


def test_without_shares_an_announcement_does_nothing() -> None:
    catalogue = Catalogue(LRU, budget=100)
    catalogue.announce(space_of(1), "a")
    assert catalogue._table.order.tenants is None
    assert catalogue.policy == "lru"


def test_wrong_weights_are_refused() -> None:
    with pytest.raises(InvalidValue, match="the share of 'a'"):
        TenantWeights({"a": -1.0})
