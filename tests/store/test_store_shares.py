"""Shares in a store: what a flooding tenant can take from memory and from a disk tier."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from store_kv import GQA, MODEL, given, numbers

from kvkeep import InvalidValue
from kvkeep.core.public import SCOPE
from kvkeep.store import KVStore
from kvkeep.store.tiers import Exclusive, Inclusive

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 16
MEMORY, DISK = 80, 240  # blocks
_RECORD = GQA.bytes_per_token * BLOCK + 128
_UNIT = 4096  # bytes that each of them takes on disk


def store_in(place: Path, shares: dict[str, float] | None, **options: Any) -> KVStore:
    policy = options.pop("eviction", "lru")
    tiers = [
        f"memory://{MEMORY * _RECORD}B?policy={policy}",
        f"file://{place}?size={DISK * _UNIT}B&policy={policy}",
    ]
    options = {"tiers": tiers, **options}
    return KVStore(GQA, model=MODEL, block_tokens=BLOCK, shares=shares, **options)


def put(store: KVStore, tokens: list[int], tenant: str) -> None:
    store.put(tokens, given(GQA, numbers(GQA, tokens)), tenant=tenant, wait=True)


def prompt(number: int, blocks: int) -> list[int]:
    return [number, *range(1, blocks * BLOCK)]


def flood(store: KVStore, requests: int, first: int = 10_000, tenant: str = "flooder") -> None:
    for number in range(first, first + requests):
        put(store, prompt(number, 4), tenant)


def found(store: KVStore, tokens: list[int], tenant: str) -> int:
    return store.lookup(tokens, tenant=tenant).tokens // BLOCK


def held_by(store: KVStore, tenant: str) -> int:
    """Bytes of a tenant in both tiers."""
    space = store._names.of(tenant).space
    places = (store._tiered.memory, *store._tiered.tiers)
    return sum(one.catalogue.spaces().get(space, 0) for one in places)


@pytest.mark.parametrize("eviction", ["lru", "returns"])
@pytest.mark.parametrize("policy", [Inclusive, Exclusive])
def test_a_flooder_evicts_its_own(tmp_path: Path, policy: Any, eviction: str) -> None:
    mine = {f"t{number}": prompt(number, 14) for number in range(3)}
    kept: dict[bool, list[int]] = {}
    for shared in (False, True):
        place, shares = tmp_path / str(shared), {} if shared else None
        with store_in(place, shares, policy=policy(), eviction=eviction) as store:
            for tenant, tokens in mine.items():
                put(store, tokens, tenant)
            flood(store, 120)  # 480 blocks
            kept[shared] = [found(store, tokens, tenant) for tenant, tokens in mine.items()]
            store._tiered.check()
    assert kept[True] == [14, 14, 14]
    if eviction == "lru":
        assert kept[False] == [0, 0, 0]


def test_others_use_what_a_tenant_leaves_and_give_it_back(tmp_path: Path) -> None:
    with store_in(tmp_path / "without", None) as store:
        flood(store, 100)
        most = held_by(store, "flooder")
    with store_in(tmp_path / "with", {"a": 3.0}) as store:
        put(store, prompt(1, 4), "a")
        flood(store, 100)
        assert held_by(store, "flooder") >= most - 16 * _RECORD
        for number in range(80):
            put(store, prompt(number, 4), "a")
        assert held_by(store, "a") > 0.65 * most, "its share is three quarters"
        assert held_by(store, "flooder") > 0.2 * most
        store._tiered.check()


def test_shares_hold_after_a_restart(tmp_path: Path) -> None:
    """Blocks found on disk count for their tenants, whoever begins to store first."""
    mine, others = prompt(1, 60), prompt(2, 60)
    with store_in(tmp_path, {"a": 2.0}) as store:
        put(store, mine, "a")
        put(store, others, "unnamed")
        assert store.flush()
    with store_in(tmp_path, {"a": 2.0}) as store:
        assert found(store, mine, "a") == 60
        flood(store, 100)
        store._tiered.check()
        assert found(store, mine, "a") == 60, "its share is half, 120 blocks"
        assert found(store, others, "unnamed") >= 50, "a quarter, 54 of them guaranteed"
        put(store, prompt(3, 2), "unnamed")  # the space found has a name now
        store._tiered.check()
    with store_in(tmp_path, None) as store:
        flood(store, 100)
        assert found(store, mine, "a") == 0


def test_what_all_share_goes_last(tmp_path: Path) -> None:
    public = prompt(5, 10)
    with store_in(tmp_path, {}) as store:
        store.public.declare(public)
        put(store, [*public, *range(BLOCK)], "a")
        flood(store, 100)
        assert found(store, [*public, 7], "b") == 10
        space = store._names.shared().space
        shares = store._tiered.tiers[0].catalogue._shares
        assert shares is not None
        assert shares._claim_of(shares.owner(space)).public
        assert SCOPE == "public"


def test_a_quota_holds_beside_shares(tmp_path: Path) -> None:
    with store_in(tmp_path, {"small": 4.0}, quotas={"small": 10 * _RECORD}) as store:
        for number in range(20):
            put(store, prompt(number, 4), "small")
        assert held_by(store, "small") <= 2 * 10 * _RECORD
        flood(store, 100)
        assert held_by(store, "small") >= 2 * 7 * _RECORD
        store._tiered.check()


@pytest.mark.parametrize("shares", [None, {}])
@pytest.mark.parametrize("public", [1, 2, 6])
def test_a_quota_holds_behind_a_public_prefix(
    tmp_path: Path, public: int, shares: dict[str, float] | None
) -> None:
    with store_in(tmp_path, shares, quotas={"small": 4 * _RECORD}) as store:
        row = prompt(9, public)
        store.public.declare(row)
        put(store, [*row, *prompt(1, 20)], "small")
        for tier in (store._tiered.memory, *store._tiered.tiers):
            held = tier.catalogue.spaces()
            assert held.get(store._names.of("small").space, 0) <= 4 * _RECORD
        store.check()


def test_memory_of_several_processes_refuses_shares(tmp_path: Path) -> None:
    name = f"kvkeep-shares-{os.getpid()}"
    tiers = [f"shm://8MiB?name={name}", f"file://{tmp_path}?size=1MiB"]
    with pytest.raises(InvalidValue, match="leave shares out, or take memory://"):
        store_in(tmp_path, {"a": 1.0}, tiers=tiers)
    with store_in(tmp_path, None, tiers=tiers) as store:  # nothing stayed open
        put(store, prompt(1, 2), "a")
    os.unlink(f"/dev/shm/kvkeep-{os.geteuid()}-{name}")


@pytest.mark.parametrize("shares", [{"a": 0}, {"a": "3"}, {"a": None}, ["a"], {"a": float("nan")}])
def test_wrong_shares_are_refused(shares: Any) -> None:
    with pytest.raises(InvalidValue, match="share"):
        KVStore(GQA, model=MODEL, shares=shares)
