"""The budget of pins against a naive model: sets of prefixes, recounted for each step."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from kvkeep.core.keys import Namespace
from kvkeep.core.tokens import TOKEN_DTYPE
from kvkeep.serve.server.pin_budget import PinBudget

UNIT = 4


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Pinned:
    tokens: tuple[int, ...]
    tenant: str
    end: float


class Pins:
    """Notes the pins; those of ``lost`` find only so many tokens."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.pins: dict[object, Pinned] = {}
        self.lost: int | None = None

    def pin(self, kept, tokens, seconds):
        assert seconds > 0
        found = len(tokens) if self.lost is None else min(self.lost, len(tokens))
        found = found if found == len(tokens) else found // UNIT * UNIT
        row = tuple(tokens[:found].tolist())
        self.pins[kept] = Pinned(row, kept.namespace.tenant, self.clock.now + seconds)
        return found

    def unpin(self, kept, start):
        assert 0 <= start <= kept.tokens
        del self.pins[kept]

    def units(self, *, tails=False):
        """Return the units under pins, by tenant."""
        found: dict[str, set[tuple[int, ...]]] = {}
        for one in self.pins.values():
            if one.end <= self.clock.now:
                continue
            own = found.setdefault(one.tenant, set())
            ends = range(UNIT, len(one.tokens) + 1, UNIT)
            own |= {one.tokens[:end] for end in ends}
            if tails and len(one.tokens) % UNIT:
                own.add(one.tokens)
        return {tenant: units for tenant, units in found.items() if units}


def row(draw, length):
    """A prompt that has beginnings in common with others."""
    return np.array([draw.randrange(2) if at % 7 == 0 else at for at in range(length)], TOKEN_DTYPE)


@pytest.mark.parametrize("tails", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_ledger_is_what_the_pins_cover(seed, tails):
    draw = random.Random(seed)
    clock = Clock()
    pins = Pins(clock)
    weights = {"named": 4.0} if seed % 2 else {}
    budget = PinBudget(
        pins, unit=UNIT, most_each=20, most=50, clock=clock, weights=weights, tails=tails
    )
    tenants = ["named", "a", "b", *(f"made up {one}" for one in range(draw.choice([2, 30])))]
    for step in range(300):
        clock.now += draw.choice([0, 0, 1, 40, 200])
        budget.expire()
        before = {name: len(units) for name, units in pins.units(tails=tails).items()}
        assert budget.units == sum(before.values()) == sum(budget.by_tenant().values()), step
        tenant = draw.choice(tenants)
        tokens = row(draw, draw.randrange(1, 100))
        pins.lost = draw.choice([None] * 9 + [draw.randrange(0, 60)])
        ends = [draw.randrange(1, len(tokens) + 1), len(tokens)]
        wanted = [(at, draw.choice([60.0, 300.0, 3600.0])) for at in sorted(ends)]
        got = budget.keep(tokens, Namespace(tenant=tenant), wanted)
        budget.check()
        after = {name: len(units) for name, units in pins.units(tails=tails).items()}
        assert after == budget.by_tenant()
        assert sum(after.values()) <= 50
        assert max(after.values(), default=0) <= 20
        assert got <= len(tokens)
        if pins.lost is not None:
            continue
        last = -(-len(tokens) // UNIT) if tails else len(tokens) // UNIT
        covered = got / UNIT if not tails else -(-got // UNIT)
        own = after.get(tenant, 0)
        if covered < last and own < 20:  # the common bound: then nobody alike has much more
            others = [name for name in after if (name in weights) == (tenant in weights)]
            if tenant not in weights:
                assert max(after[name] for name in others) <= own + 1
            assert sum(after.values()) == 50
        for name, units in before.items():
            if name != tenant and after.get(name, 0) < units:
                assert before_share(before, name, weights) > before_share(before, tenant, weights)
    clock.now += 4000
    budget.expire()
    budget.check()
    assert budget.units == 0
    assert pins.units() == {}
    assert len(budget._due) <= 64


def before_share(units, tenant, weights):
    """The units of a tenant by weight, of all unnamed ones together if there are named ones."""
    return units.get(tenant, 0) if not weights else group(units, tenant, weights)


def group(units, tenant, weights):
    if tenant in weights:
        return units.get(tenant, 0) / weights[tenant] + 0.5
    others = sum(count for name, count in units.items() if name not in weights)
    return others + units.get(tenant, 0) / 1000
