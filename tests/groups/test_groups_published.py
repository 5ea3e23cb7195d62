"""KV events of a cache with groups: a reader finds no more than a request could resume."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from symbolic import BOTH, GRID, STATE, WINDOW, SymbolicEngine, prompt

from kvkeep.core.errors import OutOfPages
from kvkeep.core.prefix.node import descend
from kvkeep.serve.kv_events import BlockStored, CacheBlocks

if TYPE_CHECKING:
    from kvkeep.core.groups import GroupLayout


class Reader:
    """Blocks by hash, as a router keeps them: each has its parent."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: dict[Any, tuple[int, ...]] = {}  # hash → all tokens to its end

    def read(self, events: list[Any]) -> None:
        for event in events:
            if not isinstance(event, BlockStored):
                for one in event.block_hashes:
                    del self.blocks[one]
                continue
            parent = event.parent_block_hash
            before = () if parent is None else self.blocks[parent]
            for at, one in enumerate(event.block_hashes):
                before += tuple(event.token_ids[at * self.size : (at + 1) * self.size])
                assert one not in self.blocks
                self.blocks[one] = before


def resumable(engine: SymbolicEngine) -> set[tuple[int, ...]]:
    """The tokens of all blocks with a checkpoint at their end or behind it."""
    index, size = engine.cache.tree, engine.size
    found: set[tuple[int, ...]] = set()
    for run in engine.cache.runs():
        assert run.tokens is not None
    for root in index.roots.values():
        for node, _ in descend(root):
            for point in node.points:
                _, symbols = node.before()
                tokens = tuple(memoryview(symbols + bytes(node.run)).cast("i"))[: point * size]
                found |= {tokens[:end] for end in range(size, len(tokens) + 1, size)}
    return found


def all_runs(engine: SymbolicEngine) -> list[Any]:
    return [(space, engine.cache.runs(space)) for space in engine.cache.namespaces()]


@pytest.mark.parametrize("layout", [STATE, WINDOW, BOTH, GRID])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_are_published_up_to_checkpoints(layout: GroupLayout, seed: int) -> None:
    chance = random.Random(seed)
    engine = SymbolicEngine(140, layout)
    mirror, reader = CacheBlocks(4, groups=True), Reader(4)
    engine.cache.subscribe(lambda event: reader.read(mirror.take(event)))
    seen = [prompt(0, 9)]
    for number in range(1, 60):
        base = chance.choice(seen)
        tokens = base[: chance.randrange(len(base) + 1)] + prompt(number, chance.randrange(1, 50))
        seen.append(tokens)
        try:
            engine.run(tokens[:120]).close(keep=chance.random() > 0.1)
        except OutOfPages:
            for sequence in list(engine.cache.sequences.values()):
                sequence.close()
        if chance.random() < 0.2:
            engine.cache.evict(chance.randrange(30))
        if chance.random() < 0.05:
            engine.cache.clear()
        if chance.random() < 0.1:
            engine.cache.remove(tokens)
        assert set(reader.blocks.values()) == resumable(engine)
        late = Reader(4)
        late.read(CacheBlocks(4, groups=True).reconcile(all_runs(engine)))
        assert late.blocks == reader.blocks
        if number % 20 == 0:  # events were lost
            mirror, reader = CacheBlocks(4, groups=True), Reader(4)
            reader.read(mirror.reconcile(all_runs(engine)))
    before = dict(reader.blocks)
    engine.cache.evict(10)
    reader.read(mirror.reconcile(all_runs(engine)))
    assert reader.blocks.keys() <= before.keys()
    assert set(reader.blocks.values()) == resumable(engine)


def test_events_that_were_missed_leave_no_stale_counts() -> None:
    engine = SymbolicEngine(900, STATE)
    events: list[Any] = []
    engine.cache.subscribe(events.append)
    for number in (1, 2):
        engine.run(prompt(0, 20) + prompt(number, 20)).close()
    engine.cache.clear()
    engine.run(prompt(5, 60)).close()
    for lost in range(len(events)):
        mirror, reader = CacheBlocks(4, groups=True), Reader(4)
        for at, event in enumerate(events):
            if at != lost:
                reader.read(mirror.take(event))
        reader.read(mirror.reconcile(all_runs(engine)))
        assert set(reader.blocks.values()) == resumable(engine), lost
