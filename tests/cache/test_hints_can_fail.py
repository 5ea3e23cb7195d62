"""Faults put into sessions and hints on purpose: the state machine must find each of them.

`Owners.check` is switched off, so it is the model that finds them, page by page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test
from paged_hints import HintedRadixMachine
from planted import SEARCH

from kvkeep.core.cache.sequence import Sequence
from kvkeep.core.cache.sessions import SessionBoard
from kvkeep.core.eviction.hints import Hinted
from kvkeep.core.eviction.queues import AgeQueue
from kvkeep.core.prefix.owners import Owners

if TYPE_CHECKING:
    from collections.abc import Callable

Patch = pytest.MonkeyPatch


def the_dead_are_not_first(patch: Patch) -> None:
    def pop(self: Hinted) -> object:
        entry = self.inner.pop()
        return self._dead.pop() if entry is None else entry

    patch.setattr(Hinted, "pop", pop)


def the_awaited_are_not_last(patch: Patch) -> None:
    pop = Hinted.pop
    patch.setattr(Hinted, "pop", lambda self: self._awaited.pop() or pop(self))


def a_hit_does_not_revive(patch: Patch) -> None:
    def used(self: Owners, hold: object, owner: object) -> None:
        while hold.owner is not None and hold.parent is not None:
            if hold.owner is not owner and not hold.died:
                self._share(hold)
            hold = hold.parent

    patch.setattr(Owners, "used", used)


def others_do_not_count(patch: Patch) -> None:
    used = Owners.used
    patch.setattr(Owners, "used", lambda self, hold, owner: used(self, hold, hold.owner))


def requests_of_no_session_do_not_count(patch: Patch) -> None:
    used = Owners.used
    patch.setattr(Owners, "used", lambda self, hold, owner: owner and used(self, hold, owner))


def forks_have_no_session(patch: Patch) -> None:
    fork = Sequence.fork

    def alone(self: Sequence) -> Sequence:
        other = fork(self)
        other.owner = None
        return other

    patch.setattr(Sequence, "fork", alone)


def the_front_of_a_cut_run_has_no_owner(patch: Patch) -> None:
    patch.setattr(Owners, "split", lambda self, upper, lower: None)


def what_is_trimmed_still_counts(patch: Patch) -> None:
    patch.setattr(Owners, "resized", lambda self, node, pages: None)


def sessions_leave_and_stay(patch: Patch) -> None:
    close = SessionBoard.close

    def lax(self: SessionBoard, key: object) -> int:
        line = self.states.get(key)
        dead = close(self, key)
        if line is not None:
            line.left = False
        return dead

    patch.setattr(SessionBoard, "close", lax)


def nobody_comes_back(patch: Patch) -> None:
    patch.setattr(SessionBoard, "_wake", lambda self, line: None)


def the_away_may_have_all(patch: Patch) -> None:
    init = SessionBoard.__init__

    def generous(self: SessionBoard, *measures: object) -> None:
        init(self, *measures)
        self._most_awaited = 10**9

    patch.setattr(SessionBoard, "__init__", generous)


def hints_lose_what_may_go(patch: Patch) -> None:
    def change(self: Owners, node: object, died: int, due: float | None) -> None:
        self._set(node, died, due)

    patch.setattr(Owners, "_change", change)
    patch.setattr(AgeQueue, "remove", lambda self, entry: self._line.pop(entry, None))


def what_hangs_from_the_dead_lives(patch: Patch) -> None:
    born = Owners.born

    def alive(self: Owners, leaf: object, owner: object) -> None:
        parent, leaf.parent = leaf.parent, None
        born(self, leaf, owner)
        leaf.parent = parent

    patch.setattr(Owners, "born", alive)


FAULTS: list[Callable[[Patch], None]] = [
    value for value in list(globals().values())
    if callable(value) and getattr(value, "__annotations__", {}).get("patch") == "Patch"
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_hinted_machine_finds(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    monkeypatch.setattr(Owners, "check", lambda self, roots: None)
    monkeypatch.setattr(SessionBoard, "check", lambda self: None)
    fault(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):  # it may show in any way
        run_state_machine_as_test(
            seed(1)(HintedRadixMachine), settings=settings(SEARCH, max_examples=2_000)
        )
