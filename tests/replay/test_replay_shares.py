"""Replays in which tenants share memory and tiers by weight."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from replaying import Chained, Listed, request

from kvkeep.bench.replay import ReplayRun, Workload, replay
from kvkeep.core.cost import PrefillCost
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from kvkeep.bench.traces import TraceRequest

UNIT = 4


def traffic(seed: int) -> list[TraceRequest]:
    """Requests of three tenants that extend earlier ones, some with answers."""
    chance = random.Random(seed)
    chained = Chained()
    talks: dict[str, list[list[object]]] = {}
    made = []
    for second in range(300):
        tenant = chance.choice(("", "a", "b"))
        mine = talks.setdefault(tenant, [])
        path = [*chance.choice(mine)] if mine and chance.random() < 0.7 else [tenant, second]
        path += range(1 + chance.randrange(6))
        answer = [*path, "said"] if chance.random() < 0.3 else path
        mine.append(answer)
        ids = chained.ids(answer)
        one = request(float(second), ids[: len(path)], unit=UNIT, namespace=tenant)
        said = np.array(ids[len(path) :], np.int64)
        made.append(replace(one, answer=said) if len(said) else one)
    return made


@pytest.mark.parametrize(("policy", "below"), [("lru", ()), ("returns", ()), ("lru", (120,))])
def test_a_share_protects_from_those_who_ask_for_much(policy: str, below: tuple[int, ...]) -> None:
    """A tenant that comes back to a few prompts, among another's that are never seen again."""
    chained = Chained()
    paths = [("steady", [at % 5, 1, 2]) if at % 6 == 0 else ("flood", [at, 1, 2, 3])
             for at in range(600)]  # fmt: skip
    requests = [
        request(float(at), chained.ids([who, *path]), unit=UNIT, namespace=who)
        for at, (who, path) in enumerate(paths)
    ]
    work = Workload.read(Listed(requests, UNIT))
    plain = ReplayRun(policy, 40 * UNIT, below=below)
    shared = replace(plain, shares=(("steady", 1.0), ("flood", 0.2)))
    (tokens, hits), (_, with_shares) = (
        run.on(work).namespaces["steady"] for run in (plain, shared)
    )
    assert with_shares > 0.8 * tokens
    assert with_shares >= hits


def test_a_run_with_shares_is_another_run() -> None:
    work = Workload.read(Listed(traffic(2), UNIT))
    plain = ReplayRun("returns", 200)
    runs = [plain, replace(plain, shares=(("a", 2.0),)), replace(plain, shares=(("a", 3.0),))]
    found = dict(replay(work, runs))
    assert [found[run].policy for run in runs] == ["returns", "returns+shares", "returns+shares"]
    assert [run.name for run in runs] == ["returns", "returns+shares", "returns+shares"]
    hits = [found[run].namespaces["a"][1] for run in runs]
    assert hits == sorted(hits)
    below = ReplayRun("2q", 100, below=(200,), tiering="exclusive", shares=(("a", 2.0),))
    assert below.name == dict(replay(work, [below]))[below].policy == "2q+shares/exclusive"


def test_what_shares_do_not_go_with_is_refused() -> None:
    shares = (("a", 2.0),)
    with pytest.raises(InvalidValue, match="without a bound"):
        ReplayRun("belady", 200, shares=shares)
    cost = PrefillCost(seconds_per_token=0.001)
    with pytest.raises(InvalidValue, match="without times"):
        ReplayRun("lru", 200, below=(400,), cost=cost, shares=shares)
    with pytest.raises(InvalidValue, match="without times"):
        ReplayRun("lru", 200, cost=cost, shares=shares)
    with pytest.raises(InvalidValue, match="the share of 'a'"):
        ReplayRun("lru", 200, shares=(("a", 0.0),))
    work = Workload.read(Listed(traffic(0), UNIT))
    with pytest.raises(InvalidValue, match="'c', but listed has no such tenant; it has 3"):
        ReplayRun("lru", 200, shares=(("c", 1.0),)).check(work)
    ReplayRun("lru", 200, shares=(("", 1.0),)).check(work)
