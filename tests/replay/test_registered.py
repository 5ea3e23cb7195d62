"""A policy that a user registers is named everywhere, like those that are shipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from replaying import workload

from kvkeep import InvalidValue, PagedCache
from kvkeep.bench.replay.advising import PlannedMemory
from kvkeep.bench.replay.simulate import Stage
from kvkeep.core.eviction import LRU, POLICIES, QueuePolicy

if TYPE_CHECKING:
    from kvkeep.bench.replay.workload import Workload


class MostRecent(QueuePolicy):
    name = "mru"

    def age(self, entry):
        return -entry.last_used


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, MostRecent.name, MostRecent)


@pytest.fixture
def work() -> Workload:
    return workload([[at, at + 1] for at in range(4)])


def test_a_cache_takes_its_name() -> None:
    cache = PagedCache(4, 1, eviction="mru")
    for prompt in ([1], [2], [3]):
        with cache.open(prompt) as sequence:
            sequence.publish()
    cache.evict(1)
    assert [cache.match([token]).num_tokens for token in (1, 2, 3)] == [1, 1, 0]
    with pytest.raises(InvalidValue, match="returns, mru"):
        PagedCache(4, 1, eviction="nru")


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize(("policy", "at_once"), [(LRU, True), (MostRecent, False)])
def test_a_replay_publishes_answers_as_its_order_allows(work, policy, at_once, as_object) -> None:
    given = policy() if as_object else policy.name
    stage = Stage(work, 4096, given, page_tokens=None)
    assert stage.at_once is at_once


def test_a_plan_tries_it(work: Workload) -> None:
    tried = {run.policy for run in PlannedMemory(1024).runs(work)}
    assert tried == {"lru", "returns", "mru", "belady", "infinite"}
