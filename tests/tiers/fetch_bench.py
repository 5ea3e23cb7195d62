"""Simulated and real tiers of conversations, whose mover does its rounds when a test says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from tier_bench import RAW, content

from kvkeep.bench.replay.tiers import Level, TierSimulator
from kvkeep.core.eviction import POLICIES
from kvkeep.core.keys import chain_keys
from kvkeep.core.returns import Ended
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.tiers import Chain, MemorySpec, TieredStore
from kvkeep.store.tiers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.store.tiers import TieringPolicy

PAGE = 4096
SPACE = bytes(16)
ROOT = SPACE + bytes(32)
SIZE = 16
FAST, LATER, NEVER = Ended("tool_use", 10), Ended("end_turn", 10), Ended("stop", 10)


def chain(*texts: int) -> Chain:
    """A prompt of whole blocks, each of one text."""
    row = np.repeat(np.array(texts, np.int32), SIZE)
    keys = [SPACE + key for key in chain_keys(bytes(32), row.tobytes(), SIZE * 4)]
    return Chain(ROOT, keys, SIZE, len(row), row)


def talk(number: int, blocks: int) -> Chain:
    return chain(number, *range(1, blocks))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Simulated:
    """Simulated tiers, a clock that stands still, and what is fetched back one by one."""

    def __init__(
        self,
        memory: int,
        tiering: TieringPolicy,
        below: int = 4000,
        clock: Clock | None = None,
        **more: Any,
    ) -> None:
        self.clock = clock or Clock()
        levels = [Level("memory", memory, "returns"), Level("disk", below, "returns")]
        self.tiers = TierSimulator(levels, tiering, self.clock, **more)

    def request(self, one: Chain, ended: Ended) -> list[int]:
        self.tiers.returns.requested(one)
        found = self.tiers.request(list(one.blocks))
        self.tiers.returns.ended(one, one.tokens, ended, "a")
        return found

    def teach(self, request: Callable[[Chain, Ended], object] | None = None) -> None:
        """Tool calls return after four seconds, answers after 64, and "stop" never."""
        request = request or self.request
        for number in range(100, 140):
            request(talk(number, 1), FAST)
            self.clock.now += 4
            request(talk(number, 2), LATER)
            self.clock.now += 64
            request(talk(number, 3), NEVER)
        self.clock.now += 500

    @property
    def memory(self) -> Any:
        return self.tiers.memory

    def counts(self) -> tuple[int, int, int]:
        memory = self.tiers.stats()[0]
        return memory.fetched, memory.fetched_hits, memory.fetched_evicted


class AtOnce(Workers):
    """No threads: a job is done by who submits it, so that the same comes of it each time."""

    def __init__(self) -> None:
        super().__init__("at once", 1, 1 << 40)

    def submit(
        self,
        job: Callable[[], object],
        cost: int = 1,
        wait: float | None = 0.0,
        given_up: Callable[[], object] | None = None,
    ) -> bool:
        job()
        return True


def memory(blocks: int, **more: Any) -> MemorySpec:
    return MemorySpec(MemoryBackend(blocks * PAGE), POLICIES["returns"], **more)


def ask(store: TieredStore, one: Chain, ended: Ended, wait: float = 5.0) -> list[str]:
    """Read a prompt, store the rest, and end; the tiers that it was read from.

    ``wait``: seconds that it waits until what it stores is written.
    """
    blocks = list(one.blocks)
    sizes = [RAW] * len(blocks)
    sources: list[str] = []

    def proven(at: int, raw: memoryview) -> None:
        assert bytes(raw) == content(blocks[at]), "another block's bytes"

    def fill(at: int, raw: memoryview) -> None:
        raw[:] = content(blocks[count + at])

    store.returns.requested(one)
    count = store.read(blocks, sizes, proven, sources=sources)
    store.write(blocks[count:], sizes[count:], fill, wait=wait)
    store.returns.ended(one, one.tokens, ended, "a")
    return sources


def tell(store: TieredStore, one: Chain, ended: Ended) -> None:
    """A request of which the store learns when it comes and ends; nothing is read or stored."""
    store.returns.requested(one)
    store.returns.ended(one, one.tokens, ended, "a")
