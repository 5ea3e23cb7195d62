"""Faults put into the cache on purpose: the state machine must find each of them.

`PagedCache.check` is switched off, so it is the model that finds them: by contents, by events, or
by an answer that is not the right one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from paged_machine import ChainMachine, RadixMachine
from planted import SEARCH

from kvkeep import PagedCache
from kvkeep.core.cache import Sequence
from kvkeep.core.cache import sequence as sequence_module
from kvkeep.core.cache.copies import Claims
from kvkeep.core.errors import IllegalStep
from kvkeep.core.events import Stored
from kvkeep.core.keys import as_namespace
from kvkeep.core.pages import PagePool
from kvkeep.core.prefix import Tree
from kvkeep.core.prefix.chain import ChainIndex, _KeyEncoder
from kvkeep.core.prefix.trails import Trails

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.prefix.node import Node

Patch = pytest.MonkeyPatch


def writes_to_shared_pages(patch: Patch) -> None:
    patch.setattr(Claims, "may_write", lambda *_: True)


def writes_to_published_pages(patch: Patch) -> None:
    def may_write(self: Sequence, at: int, offset: int) -> bool:
        return self._cache.claims.may_write(self._table[at], offset)

    patch.setattr(Sequence, "_may_write", may_write)


def copies_what_need_not_be_copied(patch: Patch) -> None:
    def may_write(self: Claims, page: int, offset: int) -> bool:
        return int(self._pool.references[page]) == 1

    patch.setattr(Claims, "may_write", may_write)


def writes_over_what_is_to_be_copied(patch: Patch) -> None:
    def may_write(self: Claims, page: int, offset: int) -> bool:
        claims = sum(map(len, self._pages.get(page, {}).values()))
        return int(self._pool.references[page]) - claims == 1

    patch.setattr(Claims, "may_write", may_write)


def publishes_before_copies_are_made(patch: Patch) -> None:
    permit = sequence_module.permit

    def lax(state: object, step: str) -> None:
        try:
            permit(state, step)
        except IllegalStep:
            if step != "publish" or state is sequence_module.CLOSED:
                raise

    patch.setattr(sequence_module, "permit", lax)


def publishes_the_page_that_is_not_full(patch: Patch) -> None:
    publish = Sequence._publish

    def more(self: Sequence, start: int, stop: int) -> None:
        publish(self, start, min(stop + 1, len(self.tokens) // self._cache.page_size))

    patch.setattr(Sequence, "_publish", more)


def forks_do_not_follow_a_publish(patch: Patch) -> None:
    publish = Sequence._publish

    def alone(self: Sequence, start: int, stop: int) -> None:
        self._part()
        publish(self, start, stop)

    patch.setattr(Sequence, "_publish", alone)


def forks_are_forgotten_after_a_publish(patch: Patch) -> None:
    publish = Sequence._publish

    def once(self: Sequence, start: int, stop: int) -> None:
        sharers = self.sharers
        publish(self, start, stop)
        for other in sharers:
            other.sharers = {}

    patch.setattr(Sequence, "_publish", once)


def forks_that_part_stay_together(patch: Patch) -> None:
    patch.setattr(Sequence, "_part", lambda *_: None)


def claims_on_published_pages_hold_nothing(patch: Patch) -> None:
    patch.setattr(Claims, "now_stored", lambda *_: None)


def sources_of_copies_are_let_go(patch: Patch) -> None:
    copies = Sequence.copies

    def hasty(self: Sequence) -> object:
        made = copies(self)
        self._finish_copies()
        return made

    patch.setattr(Sequence, "copies", hasty)


def copies_are_handed_to_every_fork(patch: Patch) -> None:
    copies, fork = Sequence.copies, Sequence.fork
    inherited: dict[Sequence, list[object]] = {}

    def fork_with_copies(self: Sequence) -> Sequence:
        other = fork(self)
        inherited[other] = [claim.copy for claim in other._waiting]
        return other

    def handed_again(self: Sequence) -> object:
        again = inherited.pop(self, [])
        made = copies(self)
        return [copy for copy in again if copy not in made] + made

    patch.setattr(Sequence, "fork", fork_with_copies)
    patch.setattr(Sequence, "copies", handed_again)


def evicts_what_is_held(patch: Patch) -> None:
    patch.setattr(Tree, "dequeue", lambda self, leaf: None)
    patch.setattr(Tree, "enqueue", lambda self, leaf: self.policy.add(leaf))


def a_fork_holds_nothing(patch: Patch) -> None:
    patch.setattr(Tree, "retain", lambda self, hold: hold)


def a_match_is_not_held(patch: Patch) -> None:
    hold = Tree.hold

    def careless(self: Tree, match: object, namespace: object, **how: object) -> object:
        end, source = hold(self, match, namespace, **how)
        if source is not None:
            self.release(source, used=False)
            source = self.retain(end)
        return end, source

    patch.setattr(Tree, "hold", careless)


def a_hold_counts_its_last_run_alone(patch: Patch) -> None:
    protect = Tree._protect

    def short(self: Tree, node: Node) -> None:
        before = self.num_evictable
        protect(self, node)
        if self.num_evictable < before:
            self.num_evictable = before - node.size

    patch.setattr(Tree, "_protect", short)


def evicts_one_page_too_many(patch: Patch) -> None:
    evict = Tree.evict
    patch.setattr(Tree, "evict", lambda self, count: evict(self, count + (count == 2)))


def partial_matches_are_a_token_too_long(patch: Patch) -> None:
    match_head = Tree._match_head

    def longer(self: Tree, head: bytes, match: object) -> None:
        match_head(self, head, match)
        if match.source is not None and match.partial_tokens * 4 < len(head):
            match.partial_tokens += 1

    patch.setattr(Tree, "_match_head", longer)


def partial_matches_are_a_token_too_short(patch: Patch) -> None:
    follow = Trails.follow

    def shorter(self: Trails, *args: object) -> object:
        match = follow(self, *args)
        if match.more_bytes > 4:
            match.more_bytes -= 4
        return match

    patch.setattr(Trails, "follow", shorter)


def namespaces_are_one(patch: Patch) -> None:
    match, hold = Tree.match, Tree.hold
    one = as_namespace("")
    patch.setattr(Tree, "match", lambda self, symbols, _: match(self, symbols, one))
    patch.setattr(Tree, "hold", lambda self, found, _, **how: hold(self, found, one, **how))


def keys_of_rejected_tokens_stay(patch: Patch) -> None:
    patch.setattr(_KeyEncoder, "cut", lambda self, pages: None)


def keys_know_no_namespace(patch: Patch) -> None:
    encoder = ChainIndex.encoder
    patch.setattr(ChainIndex, "encoder", lambda self, _: encoder(self, as_namespace("")))


def evicts_before_it_is_known_to_be_enough(patch: Patch) -> None:
    make_room = PagedCache._make_room

    def eager(self: PagedCache, count: int) -> None:
        self._evict(1, "pressure")
        make_room(self, count)

    patch.setattr(PagedCache, "_make_room", eager)


def a_use_is_forgotten(patch: Patch) -> None:
    release = Tree.release
    patch.setattr(Tree, "hit", lambda *_: None)
    patch.setattr(Tree, "release", lambda self, hold, used=True: release(self, hold, used=False))


def pins_are_forgotten(patch: Patch) -> None:
    patch.setattr(Tree, "enqueue", lambda self, leaf: self.policy.add(leaf))
    patch.setattr(Tree, "dequeue", lambda self, leaf: self.policy.discard(leaf))


def events_name_the_wrong_parent(patch: Patch) -> None:
    def wrong(
        sequence: int, namespace: object, parent: int, pages: object, tokens: object
    ) -> object:
        return Stored(sequence, namespace, -1, pages, tokens)

    patch.setattr(sequence_module, "Stored", wrong)


def duplicates_are_not_freed(patch: Patch) -> None:
    def keeping(self: Sequence, start: int, own: object, existing: object) -> None:
        self._table.values[start : start + len(existing)] = existing

    patch.setattr(Sequence, "_exchange", keeping)


def pages_are_free_while_they_are_used(patch: Patch) -> None:
    retain = PagePool.retain

    def forgetful(self: PagePool, pages: object) -> None:
        if len(pages) != 2:
            retain(self, pages)

    patch.setattr(PagePool, "retain", forgetful)


RADIX_ONLY = {partial_matches_are_a_token_too_long, partial_matches_are_a_token_too_short,
              a_match_is_not_held}  # fmt: skip
CHAIN_ONLY = {keys_of_rejected_tokens_stay, keys_know_no_namespace}
FAULTS: list[Callable[[Patch], None]] = [
    value for value in list(globals().values())
    if callable(value) and getattr(value, "__annotations__", {}).get("patch") == "Patch"
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_machine_finds(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    monkeypatch.setattr(PagedCache, "check", lambda self: None)
    fault(monkeypatch)
    machine = ChainMachine if fault in CHAIN_ONLY else RadixMachine
    with pytest.raises((Exception, pytest.fail.Exception)):  # it may show in any way
        run_state_machine_as_test(seed(1)(machine), settings=SEARCH)


def test_the_machine_finds_nothing_where_nothing_is_wrong(monkeypatch: Patch) -> None:
    monkeypatch.setattr(PagedCache, "check", lambda self: None)
    few = settings(SEARCH, max_examples=50, phases=[Phase.reuse, Phase.generate])
    run_state_machine_as_test(seed(1)(RadixMachine), settings=few)
