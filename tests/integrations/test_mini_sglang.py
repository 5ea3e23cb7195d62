"""The prefix cache for mini-sglang, driven as its scheduler drives one."""

from __future__ import annotations

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

from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.integrations.mini_sglang import Handle, PrefixCache

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

    @initialize(size=st.sampled_from([1, 2, 3, 4]), policy=st.sampled_from(["lru", "lfu", "slru"]))
    def start(self, size: int, policy: str) -> None:
        self.size = size
        self.cache = PrefixCache("cpu", size, policy=policy)
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


def test_a_part_of_what_is_stored_is_locked_alone() -> None:
    cache = PrefixCache("cpu", 1)
    cache.insert_prefix(ids([1, 2, 3, 4]), ids([10, 11, 12, 13]))
    one = cache.match_prefix(ids([1, 2, 3, 9])).cuda_handle
    other = cache.match_prefix(ids([1, 9])).cuda_handle
    cache.lock_handle(one)
    cache.lock_handle(other)
    assert cache.size_info == (1, 3)
    cache.lock_handle(one, unlock=True)
    assert cache.size_info == (3, 1)
    assert sorted(cache.evict(3).tolist()) == [11, 12, 13]
    assert other.get_matched_indices().tolist() == [10]


def test_what_is_used_again_goes_last() -> None:
    cache = PrefixCache("cpu", 1)
    for first in (10, 20, 30):
        cache.insert_prefix(ids([first, first + 1]), ids([first, first + 1]))
    used = cache.match_prefix(ids([10, 11])).cuda_handle
    cache.lock_handle(used)
    cache.lock_handle(used, unlock=True)
    assert cache.evict(4).tolist() == [20, 21, 30, 31]


def test_there_is_room_for_any_number_of_pages() -> None:
    cache = PrefixCache("cpu", 2)
    slots = torch.randperm(6000, dtype=torch.int32)[:, None] * 2 + torch.arange(2)
    slots = slots.flatten().int()
    for start in range(0, 12000, 1200):
        tokens = torch.arange(start, start + 1200, dtype=torch.int32)
        cache.insert_prefix(tokens, slots[start : start + 1200])
    found = cache.match_prefix(torch.arange(3600, 4800)).cuda_handle
    assert torch.equal(found.get_matched_indices(), slots[3600:4800])
    assert torch.equal(torch.sort(cache.evict(12000)).values, torch.arange(12000).int())
    cache.check_integrity()


def test_steps_that_are_refused() -> None:
    cache = PrefixCache("cpu", 1)
    _, handle = cache.insert_prefix(ids([1, 2]), ids([4, 5]))
    with pytest.raises(IllegalStep, match="is not locked"):
        cache.lock_handle(handle, unlock=True)
    cache.evict(1)
    with pytest.raises(IllegalStep, match="evicted since; match again"):
        cache.lock_handle(handle)
    cache.insert_prefix(ids([1, 2]), ids([4, 7]))  # there again, elsewhere
    cache.lock_handle(handle)
    assert handle.get_matched_indices().tolist() == [4, 7]
    cache.lock_handle(handle, unlock=True)
    with pytest.raises(InvalidValue, match="2 indices for 3 tokens"):
        cache.insert_prefix(ids([1, 2, 3]), ids([4, 5]))
    cache.lock_handle(found := cache.match_prefix(ids([1])).cuda_handle)
    with pytest.raises(IllegalStep, match="1 tokens are locked"):
        cache.reset()
    cache.lock_handle(found, unlock=True)
    cache.reset()
    assert cache.size_info.total_size == 0


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"page_size": 0}, "page_size"),
        ({"page_size": 1, "policy": "newest"}, "no eviction policy 'newest'"),
        ({"page_size": 1, "policy": "2q"}, "history of requests, which mini-sglang does not"),
    ],
)
def test_settings_that_are_refused(how: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        PrefixCache("cpu", **how)  # type: ignore[arg-type]


def test_it_works_where_nothing_is_learned() -> None:
    """The scheduler runs in inference mode, where tensors cannot be changed outside of it."""
    with torch.inference_mode():
        cache = PrefixCache("cpu", 1)
        cache.insert_prefix(ids([1, 2]), ids([4, 5]))
        assert cache.match_prefix(ids([1, 2])).cuda_handle.get_matched_indices().tolist() == [4, 5]
