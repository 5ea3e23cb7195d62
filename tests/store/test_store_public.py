"""Public prefixes in a store: one copy of their blocks, and private blocks for each tenant."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from store_kv import GQA, MODEL, disk, given, numbers, open_store, plain

from kvkeep.core.public import FOLDED
from kvkeep.store import KVStore

if TYPE_CHECKING:
    from pathlib import Path

SYSTEM = list(range(100, 140))  # two blocks of 16, and half a block
BLOCK = 16


def store_with(*rows: list[int]) -> KVStore:
    store = KVStore(GQA, model=MODEL, block_tokens=BLOCK, tiers=["memory://64MiB"])
    store.public.declare(*rows)
    return store


def put(store: KVStore, tokens: list[int], tenant: str, *, tail: bool = True) -> int:
    """Store a prompt; return the tokens that were new."""
    return store.put(tokens, given(GQA, numbers(GQA, tokens)), tenant=tenant, tail=tail).tokens


def stored(store: KVStore) -> int:
    return sum(tier.blocks or 0 for tier in store.stats().tiers)


def test_256_tenants_hold_one_copy() -> None:
    with store_with(SYSTEM) as store:
        for number in range(256):
            tokens = [*SYSTEM, *[number] * 8]  # three blocks
            put(store, tokens, f"tenant {number}")
        assert stored(store) == 2 + 256
        for number in (0, 255):
            tokens = [*SYSTEM, *[number] * 8]
            kv, count = store.get(tokens, tenant=f"tenant {number}")
            assert count == 48
            right = given(GQA, numbers(GQA, tokens))
            assert torch.equal(kv.view(torch.int16), right.view(torch.int16))


def test_no_tenant_finds_the_blocks_or_tails_of_another() -> None:
    secret = [*SYSTEM, *range(1, 30)]
    for end in range(1, len(secret) + 1):
        with store_with(SYSTEM) as store:
            put(store, [*SYSTEM, 9], "somebody", tail=False)
            before = store.lookup(secret, tenant="attacker").tokens
            assert before == 32
            put(store, secret[:end], "victim")
            assert store.lookup(secret, tenant="attacker").tokens == before
            assert store.lookup(secret[:end], tenant="attacker").tokens == min(
                before, end // BLOCK * BLOCK if end >= 32 else 0
            )
            assert store.lookup(secret[:end], tenant="victim").tokens == end


def test_removing_and_clearing_leave_the_public_blocks() -> None:
    with store_with(SYSTEM) as store:
        tokens = [*SYSTEM, *[1] * 8]
        for tenant in "ab":
            put(store, tokens, tenant)
        assert store.remove(tokens, tenant="a").complete
        assert store.lookup(tokens, tenant="a").tokens == 32
        assert store.lookup(tokens, tenant="b").tokens == 48
        store.put(tokens, given(GQA, numbers(GQA, tokens)), tenant="b", replace=True)
        store.clear(tenant="b")
        assert store.lookup(tokens, tenant="b").tokens == 32


def test_a_tenant_that_stands_for_another_model_shares_nothing() -> None:
    with store_with(SYSTEM) as store:
        put(store, SYSTEM, "a")
        assert store.lookup(SYSTEM, tenant=FOLDED + "0" * 64).tokens == 0


def test_without_public_prefixes_names_are_as_before() -> None:
    plain = KVStore(GQA, model=MODEL, block_tokens=BLOCK, tiers=["memory://64MiB"])
    with plain, store_with() as store:
        row = np.array(SYSTEM, np.int32)
        names = [each._prompt(SYSTEM, 0, "a", None).names.full(row) for each in (plain, store)]
        assert names[0] == names[1]


def test_what_continues_a_public_prompt_goes_with_it() -> None:
    """Of the tenant alone, though the prompt that it removes is public as a whole."""
    with store_with(SYSTEM) as store:
        tokens = [*SYSTEM, *[1] * 24]
        for tenant in "ab":
            put(store, tokens, tenant)
        assert store.remove(SYSTEM[:32], tenant="a").complete
        assert store.lookup(tokens, tenant="a").tokens == 32
        assert store.lookup(tokens, tenant="b").tokens == 64


class _Model:
    """What may be stored: the public prefixes, and those of each tenant, by their tokens."""

    def __init__(self) -> None:
        self.public: set[tuple[int, ...]] = set()
        self.private: dict[str, set[tuple[int, ...]]] = {"a": set(), "b": set()}

    def put(self, tokens: list[int], tenant: str, public: int, *, tail: bool) -> None:
        ends = [*range(4, len(tokens) + 1, 4), *([len(tokens)] if tail else [])]
        for end in ends:
            where = self.public if end <= public else self.private[tenant]
            where.add(tuple(tokens[:end]))

    def remove(self, tokens: list[int], tenant: str) -> None:
        self.private[tenant] -= {tuple(tokens[:end]) for end in range(len(tokens) + 1)}

    def longest(self, tokens: list[int], tenant: str, public: int) -> int:
        end = 0
        while end + 4 <= len(tokens):
            where = self.public if end + 4 <= public else self.private[tenant]
            if tuple(tokens[: end + 4]) not in where:
                break
            end += 4
        tails = range(end, min(end + 4, len(tokens)) + 1)
        return max(
            one for one in tails if one == end or tuple(tokens[:one]) in self.private[tenant]
        )


@pytest.mark.parametrize("seed", range(6))
def test_a_removed_prompt_is_gone_whatever_was_or_is_declared(seed: int, tmp_path: Path) -> None:
    """Rows are declared and withdrawn (by a start without them) between puts and removals."""
    draw, model = random.Random(seed), _Model()
    rows = [list(range(100, 100 + length)) for length in (4, 6, 8, 13, 16)]
    prompts = []
    for row in rows * 3:
        own = [draw.randrange(3) for _ in range(draw.randrange(1, 12))]
        prompts.append([*row[: draw.randrange(len(row) + 1)], *own])
    tiers = ["memory://1MiB", disk(tmp_path / "a")]
    found = 0
    for _ in range(8):
        with open_store(*tiers, block_tokens=4) as store:
            store.public.declare(*draw.sample(rows, draw.randrange(3)))

            def public(prompt: list[int], store: KVStore = store) -> int:
                return store.public.length(np.array(prompt, np.int32), 4)

            for _ in range(draw.randrange(1, 12)):
                prompt, tenant = draw.choice(prompts), draw.choice("ab")
                what = draw.choice(("put", "put", "put", "remove", "declare"))
                if what == "put":
                    tail = draw.random() < 0.5
                    kv = given(GQA, numbers(GQA, prompt))
                    store.put(prompt, kv, tenant=tenant, tail=tail, wait=True)
                    model.put(prompt, tenant, public(prompt), tail=tail)
                elif what == "declare":
                    store.public.declare(draw.choice(rows))
                else:
                    other = "b" if tenant == "a" else "a"
                    before = [store.lookup(one, tenant=other).tokens for one in prompts]
                    assert store.remove(prompt, tenant=tenant).complete
                    model.remove(prompt, tenant)
                    after = [store.lookup(one, tenant=other).tokens for one in prompts]
                    assert after == before, "others lose nothing"
                for one in draw.sample(prompts, 4):
                    for name in "ab":
                        kv, count = store.get(one, tenant=name)
                        assert count <= model.longest(one, name, public(one))
                        found += count
                        if count:
                            assert np.array_equal(plain(GQA, kv), numbers(GQA, one)[:count])
    assert found
