"""Public prefixes in a store: one copy of their blocks, and private blocks for each tenant."""

from __future__ import annotations

import numpy as np
import torch
from store_kv import GQA, MODEL, given, numbers

from kvkeep.core.public import FOLDED
from kvkeep.store import KVStore

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
