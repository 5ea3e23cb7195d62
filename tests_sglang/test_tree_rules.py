"""kvkeep's tree inside SGLang: locks, resets, events, and what the scheduler is told."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
import torch
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.events import KvEventLoraNames
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from tree_scheduler import Scheduler, memory, request

from kvkeep.core.errors import IllegalStep
from kvkeep.core.eviction import policy as named
from kvkeep.integrations.sglang.tree import KVKeepTree

PAGE = 4


def made(pages: int = 64, policy: str = "lru", page: int = PAGE, **more: Any) -> Scheduler:
    params = memory(page, pages, **more)
    return Scheduler(KVKeepTree(params, lambda: named(policy)), params)


def row(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


def keep(one: Scheduler, tokens: list[int], **more: Any) -> None:
    req = one.admit(tokens, **more)
    assert req is not None
    one.finish(req)


def matched(one: Scheduler, tokens: list[int], **more: Any) -> Any:
    return one.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), **more)))


# --- matches and locks -------------------------------------------------------------------------


def test_a_match_changes_nothing() -> None:
    one = made()
    keep(one, row(0, 16))
    before = list(one.cache._tree.nodes())
    for length in range(17):
        assert matched(one, row(0, length)).device_prefix_len == length // PAGE * PAGE
    assert list(one.cache._tree.nodes()) == before


def test_locks_are_counted_and_tell_what_they_protect() -> None:
    one = made()
    keep(one, row(0, 16))
    handle = matched(one, row(0, 10)).last_device_node
    assert one.cache.inc_lock_ref(handle).delta == -8
    assert one.cache.inc_lock_ref(handle).delta == 0
    assert (one.cache.protected_size(), one.cache.evictable_size()) == (8, 8)
    assert one.evict(100) == 8
    assert one.cache.dec_lock_ref(handle).delta == 0
    assert one.cache.dec_lock_ref(handle).delta == 8
    with pytest.raises(IllegalStep, match="not locked"):
        one.cache.dec_lock_ref(handle)
    one.cache.check_integrity()


def test_a_match_that_was_evicted_cannot_be_locked() -> None:
    one = made()
    keep(one, row(0, 16))
    whole, part = matched(one, row(0, 16)), matched(one, row(0, 8))
    one.evict(8)
    with pytest.raises(IllegalStep, match="match again"):
        one.cache.lock(whole.last_device_node)
    with pytest.raises(IllegalStep, match="match again"):
        one.cache.path_device_indices(whole.last_device_node)
    one.cache.unlock(one.cache.lock(part.last_device_node))
    one.cache.check_integrity()


def test_other_tokens_in_the_place_of_a_match_are_not_taken_for_it() -> None:
    """Evicted, and stored with other tokens behind the same prefix, in the same run."""
    one = made()
    first = one.admit(row(0, 8))
    stale = matched(one, row(0, 8)).last_device_node
    assert first is not None
    one.finish(first)
    one.evict(4)
    other = one.admit([*row(0, 4), *row(90, 5)])
    assert other is not None
    with pytest.raises(IllegalStep, match="match again"):
        one.cache.lock(stale)
    one.finish(other)


def test_a_match_survives_splits_and_joins_of_its_path() -> None:
    one = made()
    keep(one, row(0, 32))
    handle = matched(one, row(0, 16)).last_device_node
    short = one.cache.lock(matched(one, row(0, 8)).last_device_node)
    assert one.cache.path_device_indices(handle).tolist() == one.match(row(0, 16))
    one.cache.unlock(short)
    keep(one, [*row(0, 12), *row(70, 9)])
    lock = one.cache.lock(handle)
    assert one.cache.path_device_indices(handle).tolist() == one.match(row(0, 16))
    one.cache.unlock(lock)
    one.cache.check_integrity()


def test_reset_forgets_what_is_locked_and_old_locks_end_silently() -> None:
    one = made()
    keep(one, row(0, 16))
    lock = one.cache.lock(matched(one, row(0, 16)).last_device_node)
    one.cache.reset()
    assert one.cache.total_size() == one.cache.protected_size() == 0
    one.cache.unlock(lock)
    assert matched(one, row(0, 16)).device_prefix_len == 0
    one.cache.check_integrity()


@pytest.mark.parametrize("stub", [False, True])
def test_tokens_that_change_behind_a_lock_are_not_stored(stub: bool) -> None:
    """Nothing of the path is stored twice, and everything is freed."""
    one = made()
    keep(one, row(0, 16))
    req = one.admit(row(0, 32), chunk=8)
    assert req is not None
    if stub:  # what SGLang makes of a prompt that it refuses
        req.full_untruncated_fill_ids = array("q", [1])
    else:
        req.full_untruncated_fill_ids[21] = 77
    one.cache.checkpoint(req, up_to=24)
    assert one.cache.checkpoints_refused == 1
    assert matched(one, row(0, 32)).device_prefix_len == 24
    one.cache.check_integrity()
    req.full_untruncated_fill_ids = array("q", row(0, 32))
    one.finish(req)
    one.evict(10**6)
    assert one.allocator.available_size() == one.total


def test_insert_tells_what_was_there() -> None:
    one = made()
    slots = one.allocator.alloc(24)
    done = one.cache.insert(InsertParams(key=RadixKey(array("q", row(0, 12))), value=slots[:12]))
    assert (done.prefix_len, done.total_len) == (0, 12)
    again = one.cache.insert(InsertParams(key=RadixKey(array("q", row(0, 15))), value=slots[8:]))
    assert (again.prefix_len, again.total_len) == (12, 12)
    assert one.cache.path_device_indices(again.last_device_node).equal(slots[:12])
    assert one.cache.all_values_flatten().equal(slots[:12])


def test_eviction_takes_no_more_than_it_is_asked_for() -> None:
    one = made()
    keep(one, row(0, 40))
    assert one.evict(5) == 8
    assert one.evict(0) == 0
    assert matched(one, row(0, 40)).device_prefix_len == 32
    assert one.evict(10**6) == 32
    assert one.evict(1) == 0


def test_a_use_is_counted_once_a_request() -> None:
    one = made(policy="priority")
    keep(one, row(0, 16))
    for _ in range(3):  # waiting: matched again and again, locked and given up
        handle = matched(one, row(0, 16)).last_device_node
        one.cache.unlock(one.cache.lock(handle))
    (node,) = [node for node, _ in one.cache._tree.nodes() if node.end]
    assert node.hits == 0
    req = one.admit(row(0, 40), chunk=8)
    assert req is not None
    one.compute(req, 8)
    assert sum(node.hits for node, _ in one.cache._tree.nodes()) == 1


def test_touching_a_prefix_keeps_it() -> None:
    one = made()
    keep(one, row(0, 8))
    keep(one, row(100, 8))
    one.cache.touch_prefix(RadixKey(array("q", row(0, 8))))
    one.evict(8)
    assert matched(one, row(0, 8)).device_prefix_len == 8
    one.cache.touch_prefix(RadixKey(array("q", row(500, 8))))
    one.cache.check_integrity()


def test_requests_are_ordered_by_the_weight_of_their_subtrees() -> None:
    prompts = [[*row(0, 8), *row(at, 8)] for at in (100, 200, 300)] + [row(900, 16), row(700, 8)]
    orders = []
    for kind in ("ours", "theirs"):
        params = memory(PAGE, 64)
        cache = KVKeepTree(params, lambda: named("lru")) if kind == "ours" else RadixCache(params)
        one = Scheduler(cache, params)
        for prompt in prompts[:4]:
            keep(one, prompt)
        nodes = [matched(one, prompts[at]).last_device_node for at in (3, 0, 4, 1, 2, 0)]
        orders.append(cache.dfs_weight_order(nodes))
    assert sorted(orders[0]) == sorted(orders[1]) == [0, 1, 2, 3, 4, 5]
    assert set(orders[0][:4]) == set(orders[1][:4]) == {1, 3, 4, 5}


def test_the_tree_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    one = made()
    keep(one, row(0, 16), cache_salt="b")
    one.cache.pretty_print()
    said = capsys.readouterr().out
    assert "tenant='b'" in said
    assert "#tokens: 16" in said


# --- events --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize(("page", "eagle"), [(1, False), (PAGE, False), (PAGE, True)])
def test_kv_events_are_those_of_sglang(page: int, eagle: bool, dynamo: bool) -> None:
    """Block for block: hashes, parents, tokens, salts and names, stored and removed."""
    names = KvEventLoraNames()
    names.register(request_of_adapter(), "an adapter")
    events: list[list[Any]] = []
    for kind in ("ours", "theirs"):
        params = memory(
            page, 4000, is_eagle=eagle, enable_kv_cache_events=True,
            dynamo_kv_event_format=dynamo, kv_event_lora_names=names,
        )  # fmt: skip
        cache = KVKeepTree(params, lambda: named("lru")) if kind == "ours" else RadixCache(params)
        one = Scheduler(cache, params)
        rng = random.Random(5)
        prompts = [row(0, 1)]
        for at in range(40):
            prompt = [*rng.choice(prompts), *(rng.randrange(4) for _ in range(9))]
            if at % 7 == 0:
                prompt[-3] = 1 << 40
            prompts.append(prompt)
            space = [{}, {"extra_key": "named"}, {"extra_key": "other", "cache_salt": "s"}][at % 3]
            keep(one, prompt, **space)
        one.evict(10**6)
        events.append(blocks(cache.take_events()))
        assert cache.take_events() == []
    assert len(events[0]) > 100
    assert events[0][0] == events[1][0] == ("cleared",)
    stores = [[event for event in some if event[0] == "stored"] for some in events]
    assert stores[0] == stores[1]
    removals = [sorted(event for event in some if event[0] == "removed") for some in events]
    assert removals[0] == removals[1]


def request_of_adapter() -> Any:
    req = request("a", [1])
    req.extra_key, req.lora_id = "named", "id"
    return req


def blocks(events: list[Any]) -> list[tuple[Any, ...]]:
    """One entry a block, as SGLang joins and splits events by its own runs."""
    found: list[tuple[Any, ...]] = []
    for event in events:
        if isinstance(event, AllBlocksCleared):
            found.append(("cleared",))
        elif isinstance(event, BlockRemoved):
            found += [("removed", name, event.medium) for name in event.block_hashes]
        elif isinstance(event, BlockStored):
            parent = event.parent_block_hash
            size = event.block_size
            for at, name in enumerate(event.block_hashes):
                tokens = tuple(event.token_ids[at * size : (at + 1) * size])
                found.append(
                    (
                        "stored",
                        name,
                        parent,
                        tokens,
                        event.cache_salt,
                        event.lora_name,
                        event.medium,
                    )
                )
                parent = name
    return found


def test_reset_is_an_event() -> None:
    one = made(enable_kv_cache_events=True)
    keep(one, row(0, 8))
    one.flush()
    assert isinstance(one.cache.take_events()[-1], AllBlocksCleared)


def test_without_kv_events_none_are_kept() -> None:
    one = made()
    keep(one, row(0, 8))
    assert one.cache.take_events() == []


def test_metrics_count_evicted_tokens() -> None:
    one = made()
    counted: list[int] = []

    class Collector:
        def observe_eviction_duration(self, seconds: float) -> None:
            assert seconds >= 0

        def increment_eviction_num_tokens(self, tokens: int) -> None:
            counted.append(tokens)

    one.cache.metrics_collector = Collector()
    keep(one, row(0, 16))
    one.cache.evict(EvictParams(num_tokens=3))
    assert counted == [4]


def test_slots_stay_in_the_dtype_of_sglang() -> None:
    one = made()
    keep(one, row(0, 8))
    found = matched(one, row(0, 8)).last_device_node
    assert one.cache.path_device_indices(found).dtype == torch.int64
    empty = one.cache.path_device_indices(one.cache.root_node_handle("x"))
    assert empty.dtype == torch.int64
    assert len(empty) == 0
