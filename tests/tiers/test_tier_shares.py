"""Shares of tiers: whose block goes, beside a model of sums, and what a flooder can take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from catalogue_machine import BLOCKS, BUDGET, SPACES, Machine, machine_of
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvkeep.core.eviction import POLICIES
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.tiers.tier_shares import TenantWeights

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        known, candidates = dict(self.known), list(possible)
        for block in gone:
            tenants = self.givers(known, candidates)
            assert self.tenant(block) in tenants
            if exact:
                oldest = {
                    tenant: min(known[b].used for b in candidates if self.tenant(b) == tenant)
                    for tenant in tenants
                }
                mine = [b for b in candidates if self.tenant(b) == self.tenant(block)]
                assert oldest[self.tenant(block)] == min(oldest.values())
                assert block == mine[0]
            candidates.remove(block)
            del known[block]

    def givers(self, known: dict[bytes, object], candidates: Sequence[bytes]) -> set[object]:
        """Return the tenants of which the next victim may be."""
        weights: dict[object, float] = {}
        held: dict[object, int] = {}
        for block in known:
            tenant, name = self.tenant(block), self.name_of(block[:SPACE_BYTES])
            weights[tenant] = 0.0 if name is None else WEIGHTS.get(name, 1.0)
            held[tenant] = held.get(tenant, 0) + self.known[block].size
        here = {self.tenant(block) for block in candidates}
        private = {tenant for tenant in here if weights[tenant]}
        if not private:
            return here
        levels = {tenant: held[tenant] / weights[tenant] for tenant in private}
        floor = 0.9 * BUDGET / sum(weights.values())
        most = max(levels.values())
        return {one for one, level in levels.items() if level > floor or level == most > floor} or {
            one for one, level in levels.items() if level == most
        }


globals().update({f"Test_{one}": machine_of(one, SharesMachine) for one in POLICIES})
