"""Stores that learn of conversations by notes know what one knows that sees the requests."""

from __future__ import annotations

import pickle
import random
import time
from typing import Any

import numpy as np
import pytest

from kvkeep.core.keys import Namespace, chain_keys, root_key
from kvkeep.core.returns import Ended
from kvkeep.store.blocks import BlockReturns, BlockStore, ReturnRecorder
from kvkeep.store.tiers import conversations

SIZE = 4
TIERS = ["memory://1MiB?policy=returns"]


def keys_of(row: Any, tenant: str = "") -> list[bytes]:
    return chain_keys(root_key(Namespace(tenant=tenant)), row.tobytes(), SIZE * 4)


class Talks:
    """The same requests, seen by one store, and noted for another one."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seen = BlockStore("seen", tiers=TIERS)
        self.told = BlockStore("told", tiers=TIERS)
        self.direct: BlockReturns = self.seen.returns(SIZE)
        self.recorder = ReturnRecorder(SIZE)
        self.texts: dict[str, list[int]] = {}
        self.keys: set[bytes] = set()

    def turn(self, *, asked: bool) -> None:
        rng = self.rng
        name = rng.choice("abcdef")
        prompt = self.texts.get(name, [])[: rng.choice((None, None, None, 9))]
        prompt = prompt + [rng.randrange(1000) for _ in range(rng.randrange(1, 12))]
        answer = [rng.randrange(1000) for _ in range(rng.randrange(20))]
        tenant, ended = name.upper(), Ended(rng.choice(("tool", "stop")))
        row = np.array(prompt + answer, np.int32)
        keys = keys_of(row, tenant)
        self.keys |= set(keys)
        for one in (self.direct, self.recorder):
            if asked:
                beginning = row[: len(prompt)]
                one.requested(beginning, keys[: len(prompt) // SIZE], tenant=tenant)
            one.ended(row, keys, prompt=len(prompt), ended=ended, tenant=tenant)
        self.texts[name] = prompt + (answer if rng.random() < 0.5 else [])
        if len(self.texts[name]) > 80:
            del self.texts[name]

    def pass_on(self) -> None:
        self.told.replay(pickle.loads(pickle.dumps(self.recorder.take())))

    def close(self) -> None:
        self.seen.close()
        self.told.close()


def waits(store: BlockStore, key: bytes) -> list[tuple[Any, ...]]:
    """The conversations that wait at a block: what is known of each."""
    known = store._tiered.conversations.waits
    assert known is not None
    return sorted(
        (wait.turns, wait.kind, len(wait.gaps))
        for wait in known._at.get(store._space + key, ())
        if wait.turns and not wait.over
    )


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_both_stores_know_the_same(seed: int, *, asked: bool) -> None:
    talks = Talks(seed)
    for _ in range(120):
        talks.turn(asked=asked)
        if talks.rng.random() < 0.4:
            talks.pass_on()
    talks.pass_on()
    assert talks.recorder.take() == []
    assert any(waits(talks.seen, key) for key in talks.keys)
    for key in talks.keys:
        assert waits(talks.seen, key) == waits(talks.told, key)
    seen, told = (one._tiered.conversations.returns for one in (talks.seen, talks.told))
    assert len(seen) == len(told)
    seen.study(0.0)
    told.study(0.0)
    assert sum(seen._returns) == pytest.approx(sum(told._returns))
    talks.close()


def test_a_pause_is_as_long_though_it_was_noted_late() -> None:
    """An idle engine runs no step, and sends the end of a request with the next one."""
    recorder = ReturnRecorder(SIZE)
    row = np.arange(40, dtype=np.int32)
    with BlockStore("told", tiers=TIERS) as store:
        recorder.ended(row[:30], keys_of(row[:30]), prompt=20, ended=Ended("stop"))
        time.sleep(0.3)
        recorder.requested(row, keys_of(row))
        recorder.ended(row, keys_of(row), prompt=36, ended=Ended("stop"))
        store.replay(recorder.take())
        (wait,) = store._tiered.conversations.returns
        assert wait.turns == 2
        assert wait.gaps[0] >= 0.3


def test_a_message_is_bounded_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "_MOST_BLOCKS", 12)
    recorder = ReturnRecorder(SIZE)
    for talk in range(5):
        row = np.arange(100 * talk, 100 * talk + 20, dtype=np.int32)
        recorder.ended(row, keys_of(row), prompt=10, ended=Ended("stop"))
    messages = [recorder.take() for _ in range(4)]
    assert [sum(len(note.keys) for note in notes) for notes in messages] == [10, 10, 5, 0]
    assert [note.number for notes in messages for note in notes] == [1, 2, 3, 4, 5]


def test_a_store_that_does_not_order_by_waits_follows_nothing() -> None:
    recorder = ReturnRecorder(SIZE)
    row = np.arange(40, dtype=np.int32)
    recorder.ended(row, keys_of(row), prompt=20, ended=Ended("stop"))
    with BlockStore("told", tiers=["memory://1MiB"]) as store:
        store.replay(recorder.take())
        assert len(store._tiered.conversations.returns) == 0


def test_a_return_names_the_blocks_that_it_left_behind() -> None:
    recorder = ReturnRecorder(SIZE)
    row = np.arange(40, dtype=np.int32)
    recorder.ended(row, keys_of(row), prompt=20, ended=Ended("stop"))
    other = np.concatenate((row[:20], row[:20] + 1000))
    recorder.requested(other, keys_of(other))
    pause, over = recorder.take()
    assert isinstance(over, conversations.ReturnNote)
    assert (over.number, over.came) == (pause.number, True)
    assert over.keys == keys_of(row)[20 // SIZE :]
