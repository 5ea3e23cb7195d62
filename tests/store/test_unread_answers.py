"""What of answers is never read again is not written, as soon as the store has learned it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from store_kv import GQA, MODEL, given, numbers

from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.core.returns import Ended
from kvkeep.store import KVStore

if TYPE_CHECKING:
    from pathlib import Path

    from kvkeep.store import Put

BLOCK = 16
STOP, CALL = Ended("stop"), Ended("tool_use")


class Chats:
    """Conversations over a store, as an engine serves them."""

    def __init__(self, store: KVStore, seed: int = 0, tenant: str = "") -> None:
        self.store, self.tenant = store, tenant
        self.chance = np.random.default_rng(seed)
        self.hits = 0

    def tokens(self, count: int) -> np.ndarray:
        return self.chance.integers(10, 30_000, count).astype(np.int32)

    def put(self, tokens: np.ndarray, start: int, prompt: int, ended: Ended) -> Put:
        data = numbers(GQA, tokens.tolist(), self.tenant)
        return self.store.put(
            tokens, given(GQA, data[start:]), start, tail=True, tenant=self.tenant,
            answer=prompt, ended=ended,
        )  # fmt: skip

    def turn(
        self, prompt: np.ndarray, answer: int = 100, ended: Ended = STOP
    ) -> tuple[np.ndarray, Put]:
        """Serve a prompt; return it with its answer."""
        _, hit = self.store.get(prompt, tenant=self.tenant)
        self.hits += hit
        self.put(prompt, 0, len(prompt), ended)
        tokens = np.concatenate((prompt, self.tokens(answer)))
        put = self.put(tokens, 0, len(prompt), ended)
        self.store.ended(tokens, prompt=len(prompt), ended=ended, tenant=self.tenant)
        return tokens, put

    def talk(self, turns: int, *, thinks: int, ended: Ended = STOP) -> list[Put]:
        """A conversation whose answers begin with ``thinks`` tokens that later prompts lack."""
        prompt, puts = self.tokens(50), []
        for _ in range(turns):
            tokens, put = self.turn(prompt, thinks + 40, ended)
            puts.append(put)
            said = tokens[len(prompt) + thinks :]
            prompt = np.concatenate((prompt, said, self.tokens(20)))
        return puts


def opened(tmp_path: Path | None = None) -> KVStore:
    tiers = ["memory://32MiB"]
    if tmp_path is not None:
        tiers.append(f"file://{tmp_path}/tier?size=64MiB")
    return KVStore(GQA, model=MODEL, tiers=tiers, block_tokens=BLOCK)


def test_reasoning_is_not_written_once_it_is_known(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        chats = Chats(store)
        for _ in range(20):
            chats.talk(3, thinks=100)
        before = store.stats()
        puts = [put for _ in range(10) for put in chats.talk(3, thinks=100)]
        after = store.stats()
        assert all((put.tokens, put.unread) == (0, 140) for put in puts)
        assert after.unread_tokens - before.unread_tokens == 30 * 140
        assert after.put_tokens - before.put_tokens < 30 * 140
        hits = chats.hits
        chats.talk(3, thinks=100)
        assert chats.hits - hits == 50 + 50 + 60  # all of each prompt before the last
        assert store.flush()
        store.check()


def test_nothing_is_left_out_of_answers_that_are_read() -> None:
    with opened() as store:
        chats = Chats(store)
        for _ in range(20):
            assert all(put.unread == 0 for put in chats.talk(3, thinks=0))
        assert store.stats().unread_tokens == 0


def test_how_an_answer_ended_tells_them_apart() -> None:
    with opened() as store:
        chats = Chats(store)
        for _ in range(40):
            chats.talk(3, thinks=100, ended=STOP)
            chats.talk(3, thinks=0, ended=CALL)
        assert store.worth(140, ended=STOP) == 0
        assert store.worth(40, ended=CALL) == 40
        assert store.worth(30) == 0  # what it will be is not known yet
        assert store.worth(1000, ended=STOP, tenant="other") == 1000


def test_how_an_answer_begins_tells_them_apart() -> None:
    """A model that reasons before some answers: what they begin with is known before they end."""
    with opened() as store:
        chats = Chats(store)
        for turn in range(120):
            first, thinks = chats.tokens(50), turn % 4
            answer = chats.tokens(100)
            answer[0] = 7 if thinks else 1000 + turn
            tokens = np.concatenate((first, answer))
            store.ended(tokens, prompt=50, ended=STOP)
            said = answer[60:] if thinks else answer
            store.get(np.concatenate((first, said, chats.tokens(20))))
        assert store.worth(100, ended=STOP, first=7) == 0
        assert store.worth(100, ended=STOP, first=5000) == 100
        kv = given(GQA, numbers(GQA, tokens.tolist()))
        tokens[50] = 7
        assert store.put(tokens, kv, answer=50, ended=STOP).unread == 100
        tokens[50] = 5000
        assert store.put(tokens, kv, answer=50, ended=STOP).unread == 0


def test_a_few_answers_that_are_read_again_teach_it() -> None:
    """A new model behind the same name: each miss says that its answer would have been read."""
    with opened() as store:
        chats = Chats(store)
        for _ in range(40):
            chats.talk(3, thinks=100)
        assert store.worth(140, ended=STOP) == 0
        turns = 0
        while store.worth(140, ended=STOP) < 140:
            prompt, _ = chats.turn(chats.tokens(50), 140)
            chats.turn(np.concatenate((prompt, chats.tokens(20))), 140)
            turns += 1
        assert 2 <= turns <= 25
        tokens, put = chats.turn(chats.tokens(50), 140)
        assert put.unread == 0
        assert store.get(tokens)[1] == 190


def test_why_says_so() -> None:
    with opened() as store:
        chats = Chats(store)
        for _ in range(30):
            chats.talk(3, thinks=100)
        tokens, _ = chats.turn(chats.tokens(48), 100)
        found = store.lookup(tokens).tokens
        assert found == 48
        (miss, *_) = store.why(tokens, found)
        assert (miss.start, miss.what, miss.detail) == (48, "refused", "unread")


def test_ends_are_learned_without_any_get() -> None:
    """An engine whose own memory has all prompts asks for nothing."""
    with opened() as store:
        chats = Chats(store)
        for _ in range(30):
            first, answer = chats.tokens(40), chats.tokens(100)
            store.ended(np.concatenate((first, answer)), prompt=40, ended=STOP)
            second = np.concatenate((first, answer[60:], chats.tokens(9)))
            store.ended(np.concatenate((second, answer)), prompt=len(second), ended=STOP)
        assert store.worth(100, ended=STOP) == 0


def test_a_new_store_begins_anew_and_finds_everything(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        chats = Chats(store)
        for _ in range(30):
            chats.talk(3, thinks=100)
        tokens, _ = chats.turn(chats.tokens(48), 100)
        assert store.flush()
    with opened(tmp_path) as store:
        assert store.lookup(tokens).tokens == 48
        assert store.worth(100, ended=STOP) == 100
        store.check()


def test_cleared_tenants_are_forgotten() -> None:
    with opened() as store:
        conversations = store._tiered.conversations
        for tenant in ("a", "b"):
            Chats(store, tenant=tenant).talk(2, thinks=10)
        assert len(conversations) == 2
        store.clear(tenant="a")
        assert len(conversations) == 1
        tokens = Chats(store, seed=3).turn(np.arange(40, dtype=np.int32))[0]
        store.remove(tokens)
        assert len(conversations) == 1
        conversations.check()


def test_a_hostile_tenant_teaches_only_itself() -> None:
    with opened() as store:
        good, bad = Chats(store, tenant="good"), Chats(store, seed=1, tenant="bad")
        for _ in range(30):
            bad.talk(3, thinks=200)
            good.talk(3, thinks=0)
        assert store.worth(240, ended=STOP, tenant="bad") == 0
        assert store.worth(240, ended=STOP, tenant="good") == 240


def test_mistakes() -> None:
    with opened() as store:
        tokens = np.arange(40, dtype=np.int32)
        kv = given(GQA, numbers(GQA, tokens.tolist()))
        with pytest.raises(InvalidValue, match="prompt"):
            store.ended(tokens, prompt=41)
        with pytest.raises(InvalidValue, match="answer"):
            store.put(tokens, kv, answer=41)
        with pytest.raises(InvalidValue, match="answer"):
            store.worth(-1)
        with pytest.raises(InvalidValue):
            store.put(tokens, given(GQA, numbers(GQA, range(39))), answer=20)
    with pytest.raises(IllegalStep):
        store.ended(tokens, prompt=3)
    with pytest.raises(IllegalStep):
        store.worth(3)
