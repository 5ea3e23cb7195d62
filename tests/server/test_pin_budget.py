"""The budget of pins against a naive model: sets of prefixes, recounted for each step."""

from __future__ import annotations

import random
from collections import Counter
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


def naive(before, tenant, wanted, known, weights, *, each=20, most=50):
    """Return the units of all tenants after ``tenant`` asked for ``wanted``, ``known`` before."""
    units = Counter(before)

    def level(names):
        named = [name for name in names if name in weights]
        return sum(units[name] for name in names) / (weights[named[0]] if named else 1.0)

    def group(name):
        if name in weights:
            return [name]
        return [one for one in {*units, tenant} if one not in weights]

    for _ in range(known, wanted):
        if units[tenant] >= each:
            break
        if units.total() >= most:
            own = group(tenant)
            mine = 1 / weights.get(tenant, 1.0)
            others = [name for name in units if name not in weights][:1]  # first among equals
            top = max((group(name) for name in (*others, *weights)), key=level)
            one = 1 / weights.get(top[0], 1.0)
            if set(top) == set(own) or level(top) - one < level(own) + mine - 1e-9:
                top = own
            giver = max(top, key=lambda name: units[name])
            same = set(top) == set(own)
            if giver == tenant or (same and units[giver] - 1 < units[tenant] + 1):
                break
            units[giver] -= 1
        units[tenant] += 1
    return +units


def shape(counts, weights):
    """The counts without the names of those who are alike: equal ones may give in any order."""
    named = {name: count for name, count in counts.items() if name in weights}
    return named, sorted(count for name, count in counts.items() if name not in weights)


WEIGHTS = ({}, {"named": 4.0}, {"named": 0.4, "b": 1.5})


@pytest.mark.parametrize("tails", [False, True])
@pytest.mark.parametrize("seed", range(18))
def test_the_ledger_is_what_the_pins_cover_and_shares_are_fair(seed, tails):
    draw = random.Random(seed)
    clock = Clock()
    pins = Pins(clock)
    weights = WEIGHTS[seed % 3]
    budget = PinBudget(
        pins, unit=UNIT, most_each=20, most=50, clock=clock, weights=weights, tails=tails
    )
    tenants = ["named", "a", "b", *(f"made up {one}" for one in range(draw.choice([2, 30])))]
    displaced = 0
    for step in range(300):
        clock.now += draw.choice([0, 0, 1, 40, 200])
        budget.expire()
        held = pins.units(tails=tails)
        before = {name: len(units) for name, units in held.items()}
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
        path = [tuple(tokens[:end].tolist()) for end in range(UNIT, len(tokens) + 1, UNIT)]
        if tails and len(tokens) % UNIT:
            path.append(tuple(tokens.tolist()))
        known = 0
        while known < len(path) and path[known] in held.get(tenant, ()):
            known += 1
        expected = naive(before, tenant, len(path), known, weights)
        assert shape(after, weights) == shape(expected, weights), step
        displaced += any(after.get(name, 0) < units for name, units in before.items())
    assert displaced > 5
    assert len(pins.pins) <= budget.units
    clock.now += 4000
    budget.expire()
    budget.check()
    assert budget.units == 0
    assert pins.units() == {}
    assert len(budget._due) <= 64


def one_budget(most_each, most):
    clock = Clock()
    pins = Pins(clock)
    return PinBudget(pins, unit=UNIT, most_each=most_each, most=most, clock=clock), pins, clock


def tokens_of(begin, units):
    return np.arange(begin, begin + units * UNIT, dtype=TOKEN_DTYPE)


def test_a_conversation_that_grows_has_one_pin():
    budget, pins, clock = one_budget(100, 100)
    for turn in range(1, 50):
        clock.now += 1
        row = tokens_of(0, turn)
        assert budget.keep(row, Namespace(tenant="a"), [(len(row), 300.0)]) == len(row)
        assert len(pins.pins) == 1
    assert budget.units == 49


def test_what_was_asked_for_longest_ago_gives_way_from_its_end():
    budget, pins, clock = one_budget(10, 10)
    a, b = Namespace(tenant="a"), Namespace(tenant="b")
    for begin in (0, 1000):
        clock.now += 1
        budget.keep(tokens_of(begin, 5), a, [(5 * UNIT, 300.0)])
    clock.now += 1
    budget.keep(tokens_of(0, 5), a, [(5 * UNIT, 300.0)])  # again: the other one is older
    assert budget.keep(tokens_of(0, 3), b, [(3 * UNIT, 60.0)]) == 3 * UNIT
    own = sorted(one.tokens for one in pins.pins.values() if one.tenant == "a")
    assert own == [tuple(range(5 * UNIT)), tuple(range(1000, 1000 + 2 * UNIT))]
    assert budget.given_tokens == 3 * UNIT
    ends = {one.tokens[0]: one.end for one in pins.pins.values() if one.tenant == "a"}
    assert ends[1000] == pytest.approx(1002 + 300)  # a shortened pin ends when it would have
    clock.now += 1
    assert budget.keep(tokens_of(0, 3), Namespace(tenant="c"), [(3 * UNIT, 60.0)]) == 3 * UNIT
    own = [len(one.tokens) for one in pins.pins.values() if one.tenant == "a"]
    assert own == [4 * UNIT], "the shortened one is still the oldest"
    clock.now += 61
    budget.expire()
    assert budget.by_tenant() == {"a": 4}


def test_nobody_takes_what_would_only_change_places():
    budget, _, _ = one_budget(10, 9)
    a, b = Namespace(tenant="a"), Namespace(tenant="b")
    budget.keep(tokens_of(0, 5), a, [(5 * UNIT, 300.0)])
    assert budget.keep(tokens_of(0, 6), b, [(6 * UNIT, 300.0)]) == 4 * UNIT
    assert budget.by_tenant() == {"a": 5, "b": 4}
