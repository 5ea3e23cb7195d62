"""Faults put into sessions and hints on purpose: the state machine must find each of them.

`Sessions.check` is switched off, so it is the model that finds them, page by page.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test
from paged_hints import HintedRadixMachine
from planted import SEARCH

from kvkeep.core.cache import Sequence
from kvkeep.core.cache.sessions import Sessions
from kvkeep.core.eviction import AgeQueue
from kvkeep.core.prefix.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Callable

Patch = pytest.MonkeyPatch


def the_dead_are_not_first(patch: Patch) -> None:
    patch.setattr(Tree, "_next", lambda self: self.policy.pop() or self._dead.pop())


def the_awaited_are_not_last(patch: Patch) -> None:
    following = Tree._next
    patch.setattr(Tree, "_next", lambda self: self._awaited.pop() or following(self))


def a_hit_does_not_revive(patch: Patch) -> None:
    def used(self: Sessions, hold: object, owner: object) -> None:
        while hold.owner is not None and hold.parent is not None:
            if hold.owner is not owner and not hold.owner.ended:
                self._disown(hold)
            hold = hold.parent

    patch.setattr(Sessions, "used", used)


def others_do_not_count(patch: Patch) -> None:
    used = Sessions.used
    patch.setattr(Sessions, "used", lambda self, hold, owner: used(self, hold, hold.owner))


def requests_of_no_session_do_not_count(patch: Patch) -> None:
    used = Sessions.used
    patch.setattr(Sessions, "used", lambda self, hold, owner: owner and used(self, hold, owner))


def forks_have_no_session(patch: Patch) -> None:
    fork = Sequence.fork

    def alone(self: Sequence) -> Sequence:
        other = fork(self)
        other.owner = None
        return other

    patch.setattr(Sequence, "fork", alone)


def the_front_of_a_cut_run_has_no_owner(patch: Patch) -> None:
    patch.setattr(Sessions, "split", lambda self, upper, lower: None)


def what_is_trimmed_still_counts(patch: Patch) -> None:
    patch.setattr(Sessions, "resized", lambda self, node, pages: None)


def sessions_leave_and_stay(patch: Patch) -> None:
    close = Sessions.close

    def lax(self: Sessions, key: object) -> int:
        line = self.owners.get(key)
        dead = close(self, key)
        if line is not None:
            line.ended = False
        return dead

    patch.setattr(Sessions, "close", lax)


def nobody_comes_back(patch: Patch) -> None:
    patch.setattr(Sessions, "_wake", lambda self, line: self._suspended.pop(line, None))


def the_away_may_have_all(patch: Patch) -> None:
    init = Sessions.__init__

    def generous(self: Sessions, *measures: object) -> None:
        init(self, *measures)
        self._most_awaited = 10**9

    patch.setattr(Sessions, "__init__", generous)


def hints_lose_what_may_go(patch: Patch) -> None:
    patch.setattr(Tree, "reordering", lambda self, nodes: nullcontext())
    patch.setattr(AgeQueue, "remove", lambda self, entry: self._line.pop(entry, None))


def what_is_stored_after_the_end_lives(patch: Patch) -> None:
    born = Sessions.born

    def alive(self: Sessions, leaf: object, pages: int) -> None:
        if leaf.owner is not None and leaf.owner.ended:
            leaf.owner = None
        born(self, leaf, pages)

    patch.setattr(Sessions, "born", alive)


FAULTS: list[Callable[[Patch], None]] = [
    value for value in list(globals().values())
    if callable(value) and getattr(value, "__annotations__", {}).get("patch") == "Patch"
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_hinted_machine_finds(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    monkeypatch.setattr(Sessions, "check", lambda self, nodes: None)
    fault(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):  # it may show in any way
        run_state_machine_as_test(
            seed(1)(HintedRadixMachine), settings=settings(SEARCH, max_examples=2_000)
        )
