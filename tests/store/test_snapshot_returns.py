"""Conversations of models with windows and states: what waits for their next prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from snapshot_kv import GEOMETRIES, SIZE, first_of, get, open_snapshots, snapshot

from kvkeep.core.returns import Ended

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvkeep.store import KVStore

FAST, NEVER = Ended("tool_use"), Ended("end_turn")


def needed(store: KVStore, tokens: Sequence[int]) -> set[bytes]:
    """The ids of all records that going on behind ``tokens`` reads, by the definition."""
    names = store._prompt(tokens, 0, None, None)
    forms = names.forms
    count, found = len(tokens), set[bytes]()
    if forms.base is not None:
        found |= {piece.id for piece in names.base_pieces(count)}
    windows = [group for group in store.geometry.groups if group.span is not None]
    for number, group in enumerate(windows):
        first = first_of(group, count)
        for block in range(first // SIZE, -(-count // SIZE)):
            begin, stop = block * SIZE, min(count, (block + 1) * SIZE)
            cut = names.window_piece(number, max(begin, first), stop).id
            whole = names.window_piece(number, begin, stop).id
            found.add(whole if store._tiered.known([whole]) else cut)
    if forms.states is not None:
        found.add(names.state(count))
    return found


@pytest.mark.parametrize("prompt", [8, 13])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_all_that_the_next_prompt_may_read_waits_for_it(
    name: str, prompt: int, tmp_path: Path
) -> None:
    """The next prompt goes on where the answer ended, or where it began."""
    disk = f"file://{tmp_path}/tier?size=8MiB&policy=returns"
    with open_snapshots(name, "memory://4MiB", disk) as store:
        text = list(range(100, 123))
        for end in (prompt, len(text)):
            store.put_snapshot(text[:end], snapshot(store, text[:end]))
        store.ended(text, prompt=prompt, ended=FAST)
        waits = store._tiered.conversations.waits
        assert waits is not None
        for end in (prompt, len(text)):
            records = needed(store, text[:end])
            assert records
            for record in records:
                assert store._tiered.known([record])
                wait, _ = waits.best(record)
                assert wait is not None
                assert wait.turns, "a wait of this conversation, not of a request that runs"
        assert store.flush()
        store.check()


@pytest.mark.parametrize("name", ["state", "windows"])
def test_a_full_tier_keeps_conversations_that_return(name: str, tmp_path: Path) -> None:
    """Tool calls return next, final answers never: what stays is of tool calls."""
    chance = np.random.default_rng(4)

    def request(store: KVStore, text: list[int], ended: Ended) -> int:
        found = get(store, text)
        answered = [*text, *chance.integers(10, 30_000, 6).tolist()]
        store.put_snapshot(answered, snapshot(store, answered), wait=True)
        store.ended(answered, prompt=len(text), ended=ended)
        text[:] = answered
        return found

    def hits(policy: str) -> int:
        nonlocal chance
        chance = np.random.default_rng(4)
        now = [1000.0]
        disk = f"file://{tmp_path}/{policy}?size=512KiB&policy={policy}"
        with open_snapshots(name, f"memory://128KiB?policy={policy}", disk) as store:
            conversations = store._tiered.conversations
            conversations._clock = lambda: now[0]
            if conversations.waits is not None:
                conversations.waits.clock = lambda: now[0]
            paused: list[list[int]] = []
            total = 0
            for talk in range(150):
                new = chance.integers(10, 30_000, 20).tolist()
                request(store, new, FAST if talk % 3 == 0 else NEVER)
                now[0] += 1
                if talk % 3 == 0:
                    paused.append(new)
                if len(paused) > 6:
                    back = paused.pop(0)
                    back += chance.integers(10, 30_000, 4).tolist()
                    total += request(store, back, NEVER)
                    now[0] += 1
            assert store.flush()
            store.check()
            conversations.check()
            evicted = sum(tier.counters.get("evictions", 0) for tier in store.stats().tiers)
            assert evicted > 0
        return total

    assert hits("returns") > hits("lru")
