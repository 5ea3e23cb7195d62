"""Shares of tiers: whose block goes, beside a model of sums, and what a flooder can take."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from index_machine import BLOCKS, BUDGET, SPACES, Machine, machine_of

from kvkeep import InvalidValue
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.tiers.tier_shares import TenantWeights
from kvkeep.store.tiers.two_queues import tier_policies

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WEIGHTS = {"a": 2.0, "b": 0.5}
NAMES = ["a", "b", "c", None]
_UNKNOWN = "?"


class SharesMachine(Machine):
    """The machine of an index, with shares and announcements.

    A victim is a block of a tenant above its floor, if there is one, and in LRU of the one whose
    next victim was used longest ago.
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
        self.index.announce(space, name)
        self.name_of(space)
        self.names[space] = name

    @rule(space=st.sampled_from(SPACES), limit=st.integers(1, 30))
    def set_quota(self, space: bytes, limit: int) -> None:
        self.index.set_quota(space, limit)
        self.quotas[space] = limit

    @precondition(lambda self: hasattr(self, "index"))
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
                first: dict[object, bytes] = {}
                for one in candidates:
                    first.setdefault(self.tenant(one), one)
                assert block == first[giver]
                assert giver not in above or self.known[block].used == min(
                    self.known[one].used for tenant, one in first.items() if tenant in above
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
        (10, lambda: machine.used(mine[: chance.randrange(6)], chance.random() < 0.5)),
        (5, lambda: machine.hold_all(some)),
        (7, lambda: machine.free_all(BLOCKS)),
        (2, lambda: machine.pin(some, chance.uniform(0.01, 0.3), 40)),
        (2, lambda: machine.unpin(some)),
        (3, lambda: machine.forget(some[0])),
        (2, lambda: machine.fill(listed[chance.randrange(2) * len(listed) // 2 :] + more)),
        (2, machine.expire),
        (4, lambda: machine.announce(space, chance.choice(NAMES))),
        (1, lambda: machine.set_quota(space, chance.randrange(1, 30))),
    ]
    chance.choices([step for _, step in steps], [weight for weight, _ in steps])[0]()


# --- one by one ------------------------------------------------------------------------------


def test_wrong_weights_are_refused() -> None:
    with pytest.raises(InvalidValue, match="the share of 'a'"):
        TenantWeights({"a": -1.0})
