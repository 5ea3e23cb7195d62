"""Reads from the end against an obviously right model: a dict of blocks with their bytes.

``KVKEEP_FUZZ=long`` runs more examples.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from store_kv import given, numbers, open_store, plain, quiet

from faults import FaultyBackend
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.tiers import Exclusive, Inclusive, PassThrough

if TYPE_CHECKING:
    from kvkeep.store import TailRead

LONG = os.environ.get("KVKEEP_FUZZ") == "long"
SIZE = 4
TEXTS = [
    list(range(1, 103)),  # more blocks than are read ahead
    [1, 2, 3, 4, 5, 6, 7, 8, 50, 51, 52, 53, 54, 55, 56, 57, 58],
    [70, 71, 72, 73, 74, 75, 76, 77, 78, 79],
]
POLICIES = [Inclusive, Exclusive, PassThrough]
ACTIONS = ["none", "remove", "stop", "replace", "cancel", "evict"]


class Handle:
    """A read to be made, and what the model said when it was found."""

    def __init__(self, tail: TailRead, text: list[int], start: int, found: int) -> None:
        self.tail, self.text, self.start, self.found = tail, text, start, found
        self.limit = 0
        self.disturbed = False  # blocks of it may have gone since


class TailMachine(RuleBasedStateMachine):
    """The model: for each stored block, by all tokens up to its end, the version of its bytes."""

    handles = Bundle("handles")

    @initialize(policy=st.sampled_from(POLICIES))
    def opened(self, policy: Any) -> None:
        self.faulty = FaultyBackend(MemoryBackend(64 << 20))
        self.store = open_store("memory://4MiB", self.faulty, policy=policy())
        self.blocks: dict[tuple[int, ...], int] = {}
        self.version = 0
        self.open: list[Handle] = []
        self.write(TEXTS[0], 102, replace=False)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.faulty.heal()
            quiet(self.store)
            self.store.check()
            assert not self.store._tiered._reader._reads
            assert self.store.cost.reading("faulty").queued == 0
            self.store.close()

    def data(self, text: list[int], version: int) -> np.ndarray:
        return numbers(self.store.geometry, text) ^ np.uint8(version * 29 % 256)

    def found(self, text: list[int], start: int) -> int:
        """Where what is stored ends, without a gap from the block of ``start`` on."""
        end = start // SIZE * SIZE
        while end + SIZE <= len(text) and tuple(text[: end + SIZE]) in self.blocks:
            end += SIZE
        return end

    def forget(self, text: list[int], start: int) -> None:
        """Remove as the store does: all blocks with a token from ``start`` on, and those behind."""
        first = start // SIZE * SIZE
        for held in list(self.blocks):
            begin = len(held) - SIZE
            same = held[: first + SIZE] == tuple(text[: first + SIZE])
            if same and begin >= first and len(text) >= first + SIZE:
                del self.blocks[held]
        for handle in self.open:
            handle.disturbed = True

    def write(self, text: list[int], length: int, *, replace: bool) -> None:
        tokens = text[:length]
        if replace:
            self.version += 1
            self.store.clear()  # else blocks of two versions would be one prompt's
            self.blocks.clear()
            for handle in self.open:
                handle.disturbed = True
        kv = given(self.store.geometry, self.data(tokens, self.version))
        put = self.store.put(tokens, kv, replace=replace, wait=True)
        assert put.dropped == 0
        for end in range(SIZE, length + 1, SIZE):
            self.blocks.setdefault(tuple(tokens[:end]), self.version)

    @rule(text=st.sampled_from(TEXTS), length=st.integers(0, 102), replace=st.booleans())
    def put(self, text: list[int], length: int, replace: bool) -> None:
        self.write(text, min(length, len(text)), replace=replace)

    @rule(text=st.sampled_from(TEXTS), start=st.integers(20, 60))
    def remove(self, text: list[int], start: int) -> None:
        start = min(start, len(text))
        self.store.remove(text, start)
        self.forget(text, start)

    @rule()
    def evict_from_memory(self) -> None:
        """Only what the tier has as well, so that nothing is lost."""
        quiet(self.store)
        memory, tier = self.store._tiered.memory, self.store._tiered.tiers[0]
        memory.remove([block for block in memory.catalogue.blocks() if tier.knows(block)])

    @rule(target=handles, text=st.sampled_from(TEXTS), start=st.integers(0, 9))
    def find(self, text: list[int], start: int) -> Handle:
        tail = self.store.load_tail(text, start)
        found = max(start, self.found(text, start))
        assert (tail.start, tail.stop) == (start, found)
        assert sum(tokens for _, tokens in tail.runs) == found - start
        assert sum(tail.tier_bytes(start, found).values()) == (
            (found - start) * self.store.geometry.bytes_per_token
        )
        handle = Handle(tail, text, start, found)
        self.open.append(handle)
        return handle

    @rule(handle=handles, token=st.integers(0, 104))
    def stop(self, handle: Handle, token: int) -> None:
        handle.tail.stop_before(token)
        handle.limit = max(handle.limit, token)

    @rule(
        target=handles, handle=consumes(handles), action=st.sampled_from(ACTIONS),
        at=st.integers(1, 4), fault=st.sampled_from(["", "", "", "flip", "fail", "truncate"]),
    )  # fmt: skip
    def read(self, handle: Handle, action: str, at: int, fault: str) -> Any:
        """Read, and do something in the middle, when the ``at``-th block comes."""
        if handle not in self.open:
            return multiple()
        self.open.remove(handle)
        if fault:
            getattr(self.faulty, fault)(*(["get"] if fault == "fail" else []), times=2)
        versions, ranges = set(), []
        limit = handle.limit

        def sink(start: int, stop: int, kv: Any) -> None:
            nonlocal limit
            bits = plain(self.store.geometry, kv)
            one = {
                version
                for version in range(self.version + 1)
                if np.array_equal(bits, self.data(handle.text, version)[start:stop])
            }
            assert one, "bytes that were never put"
            assert stop > limit, "computed before"
            versions.add(frozenset(one))
            ranges.append((start, stop))
            if len(ranges) != at:
                return
            if action == "remove":
                self.store.remove(handle.text, 0)
                self.forget(handle.text, 0)
                handle.disturbed = True
            elif action == "stop":
                limit = max(limit, start)
                handle.tail.stop_before(start)
            elif action == "cancel":
                limit = 999
                handle.tail.cancel()
            elif action == "replace":
                handle.disturbed = True
                self.write(handle.text, len(handle.text), replace=True)
            elif action == "evict":
                quiet_memory(self.store)

        delivered = handle.tail.read(sink)
        self.faulty.heal()
        quiet(self.store)
        assert len(versions) <= 1, "old and new bytes in one read"
        assert sorted(ranges) == [
            (max(handle.start, begin), begin + SIZE)
            for begin in sorted({(start // SIZE) * SIZE for start, _ in ranges})
        ], "a block twice"
        assert merged(ranges) == delivered == handle.tail.delivered
        assert all(handle.start <= a < b <= handle.found for a, b in delivered)
        whole = not (handle.disturbed or fault)
        if whole:
            first = max(handle.start, handle.limit // SIZE * SIZE)
            want = ((first, handle.found),) if first < handle.found else ()
            if action in ("stop", "cancel") and len(ranges) >= at:
                wanted = {token for token in spread(want) if token >= limit}
                assert wanted <= set(spread(delivered)) <= set(spread(want))
            else:
                assert delivered == want
        names = self.store._names.of(None)
        if fault:  # what is damaged is gone for good; what is not there was not lost by the model
            self.blocks = {
                held: version
                for held, version in self.blocks.items()
                if self.store._tiered.knows(names.full(np.array(held, np.int32))[-1])
            }
            for other in self.open:
                other.disturbed = True
        return multiple()

    @invariant()
    def nothing_is_left_over(self) -> None:
        if hasattr(self, "store"):
            assert self.store.cost.reading("faulty").running == 0


def quiet_memory(store: Any) -> None:
    """Evict from memory what the tier has, in the middle of a read."""
    memory, tier = store._tiered.memory, store._tiered.tiers[0]
    memory.remove([block for block in memory.catalogue.blocks() if tier.knows(block)])


def merged(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


def spread(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    return [token for start, stop in ranges for token in range(start, stop)]


TailMachine.TestCase.settings = settings(
    max_examples=500 if LONG else 40, stateful_step_count=40, deadline=None
)
TestTails = TailMachine.TestCase
