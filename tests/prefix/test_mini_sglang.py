"""`examples/mini_sglang.py`, driven as mini-sglang's scheduler drives a prefix cache."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvkeep.core.errors import IllegalStep

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from mini_sglang import Handle, PrefixCache

TOKENS = st.lists(st.integers(0, 2), min_size=2, max_size=14)


def ids(tokens: list[int]) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int32)


class Request:
    def __init__(self, tokens: list[int], handle: Handle) -> None:
        self.tokens = tokens
        self.handle = handle
        self.slots: list[int] = []


class Scheduler(RuleBasedStateMachine):
    """Pages, a page table and what is in every slot: the tokens up to there, as KV depends on them.

    A request takes the slots of what is found, pages of its own for the rest, and hands all of it
    to the cache when it was computed; then it decodes, and hands over what it had at its end.
    """

    pages = 24

    @initialize(size=st.sampled_from([1, 2, 3, 4]))
    def start(self, size: int) -> None:
        self.size = size
        self.cache = PrefixCache("cpu", size)
        self.free = [page * size for page in range(self.pages)]  # first slots
        self.kv: dict[int, tuple[int, ...]] = {}
        self.running: list[Request] = []

    @rule(tokens=TOKENS)
    def admit(self, tokens: list[int]) -> None:
        handle = self.cache.match_prefix(ids(tokens[:-1])).cuda_handle
        assert handle.cached_len % self.size == 0
        needed = -(-len(tokens) // self.size) * self.size - handle.cached_len
        self.cache.lock_handle(handle)
        if needed > self.available():
            self.cache.lock_handle(handle, unlock=True)
            return
        request = Request(tokens, handle)
        request.slots = self.read(tokens, handle)
        self.compute(request)
        self.keep(request, finished=False)
        self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0), token=st.integers(0, 2))
    def decode(self, which: int, token: int) -> None:
        request = self.running[which % len(self.running)]
        if len(request.slots) % self.size == 0 and not self.available():
            return
        request.tokens = [*request.tokens, token]
        self.compute(request)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0))
    def finish(self, which: int) -> None:
        self.keep(self.running.pop(which % len(self.running)), finished=True)

    @rule(size=st.integers(0, 9))
    def evict(self, size: int) -> None:
        before = self.cache.size_info
        if size > before.evictable_size:
            with pytest.raises(IllegalStep, match="cannot evict"):
                self.cache.evict(size)
            assert self.cache.size_info == before
            return
        self.give_back(self.cache.evict(size))
        pages = -(-size // self.size)
        assert self.cache.size_info.evictable_size == before.evictable_size - pages * self.size
        assert self.cache.size_info.protected_size == before.protected_size

    @rule()
    def reset(self) -> None:
        if self.cache.size_info.protected_size:
            with pytest.raises(IllegalStep, match="are locked"):
                self.cache.reset()
            return
        self.cache.reset()
        assert self.cache.size_info == (0, 0)
        own = {slot // self.size for request in self.running for slot in request.slots}
        self.free = [page * self.size for page in range(self.pages) if page not in own]

    # --- what the scheduler of mini-sglang does between its calls ---------------------------------

    def available(self) -> int:
        return self.cache.size_info.evictable_size + len(self.free) * self.size

    def read(self, tokens: list[int], handle: Handle) -> list[int]:
        """The slots of a handle, which must hold the KV of these tokens."""
        slots = handle.get_matched_indices()
        assert slots.dtype == torch.int32
        assert len(slots) == handle.cached_len
        for at, slot in enumerate(slots.tolist()):
            assert self.kv[slot] == tuple(tokens[: at + 1]), "the KV of other tokens"
        return slots.tolist()

    def compute(self, request: Request) -> None:
        while len(request.slots) < len(request.tokens):
            if len(request.slots) % self.size == 0:
                if not self.free:
                    self.give_back(self.cache.evict(self.size))
                first = self.free.pop(0)
                for slot in range(first, first + self.size):
                    self.kv.pop(slot, None)
                page = first
            else:
                page = request.slots[-1] // self.size * self.size
            at = len(request.slots)
            self.kv[page + at % self.size] = tuple(request.tokens[: at + 1])
            request.slots.append(page + at % self.size)

    def keep(self, request: Request, *, finished: bool) -> None:
        old, slots = request.handle, ids(request.slots)
        cached, handle = self.cache.insert_prefix(ids(request.tokens), slots)
        assert handle.cached_len == len(request.tokens) // self.size * self.size
        assert cached >= old.cached_len
        slots.zero_()  # a row of the page table: it is the next request's soon
        self.cache.lock_handle(old, unlock=True)
        self.give_back(torch.tensor(request.slots[old.cached_len : cached]))
        if finished:
            self.give_back(torch.tensor(request.slots[handle.cached_len :]))
            return
        self.cache.lock_handle(handle)
        request.handle = handle
        request.slots = self.read(request.tokens, handle) + request.slots[handle.cached_len :]

    def give_back(self, slots: torch.Tensor) -> None:
        firsts = slots[:: self.size].tolist()
        assert all(first % self.size == 0 for first in firsts)
        used = {slot for request in self.running for slot in request.slots}
        assert not used & set(slots.tolist()), "a running request's slots were given away"
        assert not set(firsts) & set(self.free), "a page is free twice"
        self.free += firsts

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        own = sum(
            -(-(len(request.slots) - request.handle.cached_len) // self.size)
            for request in self.running
        )
        total = self.cache.size_info.total_size
        assert total + (len(self.free) + own) * self.size == self.pages * self.size
        for request in self.running:
            self.read(request.tokens, request.handle)


Scheduler.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestScheduler = Scheduler.TestCase


def test_what_it_gives_has_the_names_that_are_asked_for() -> None:
    cache = PrefixCache("cpu", 2)
    assert cache.evict(0).dtype == torch.int32
    found = cache.match_prefix(ids([1, 2, 3]))
    assert found.host_handle is None
    assert found.cuda_handle.cached_len == 0
    assert found.cuda_handle.get_matched_indices().tolist() == []
    slots = ids([6, 7, 2, 3, 8])
    there, handle = cache.insert_prefix(ids([1, 2, 3, 4, 5]), slots)  # unpacked, as it is there
    assert (there, handle.cached_len) == (0, 4)
    assert handle.get_matched_indices().tolist() == [6, 7, 2, 3]
    assert cache.size_info == (4, 0)
    cache.lock_handle(handle)
    cache.lock_handle(handle, unlock=False)
    assert cache.size_info._asdict() == {"evictable_size": 0, "protected_size": 4}
    assert cache.size_info.total_size == 4
    cache.lock_handle(handle, unlock=True)
    assert cache.size_info.protected_size == 4
    cache.lock_handle(handle, unlock=True)
    assert cache.evict(1).tolist() == [2, 3]  # a page at least, and the last one
    with pytest.raises(RuntimeError, match="cannot evict 3 tokens"):
        cache.evict(3)
    assert cache.evict(2).tolist() == [6, 7]
