"""A scheduler that makes SGLang's own calls of a prefix cache, over symbolic memory.

Requests, pools, allocators, and the functions that match, checkpoint, evict and release are
SGLang's. The memory holds no KV: each slot remembers the tokens that the KV in it would depend on.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import (
    checkpoint_kv_cache,
    evict_from_tree_cache,
    release_kv_cache,
)
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

ROWS, ROW = 16, 512


def memory(page: int, pages: int, **more: Any) -> CacheInitParams:
    """What SGLang makes a cache of, on the CPU."""
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=page))
    if page == 1:
        allocator: Any = TokenToKVPoolAllocator(pages, torch.bfloat16, "cpu", None, False)
    else:
        allocator = PagedTokenToKVPoolAllocator(
            pages * page, page, torch.bfloat16, "cpu", None, False
        )
        allocator.debug_mode = True  # frees are compared with what they should free
    rows = ReqToTokenPool(
        size=more.pop("rows", ROWS),
        max_context_len=more.pop("row", ROW),
        device="cpu",
        enable_memory_saver=False,
    )
    return CacheInitParams(
        disable=False,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        page_size=page,
        **more,
    )


def request(rid: str, tokens: list[int], **more: Any) -> Req:
    space = {name: more.pop(name, None) for name in ("extra_key", "cache_salt", "priority")}
    sampling = SamplingParams(temperature=0, max_new_tokens=64, **more)
    return Req(rid, "", array("q", tokens), sampling, **space)


class Scheduler:
    """Drives one cache; every method checks what the cache answered."""

    def __init__(self, cache: BasePrefixCache, params: CacheInitParams) -> None:
        self.cache = cache
        self.page = params.page_size
        self.allocator = params.token_to_kv_pool_allocator
        self.rows = params.req_to_token_pool.req_to_token
        self.pool = params.req_to_token_pool
        self.pairs = params.is_eagle
        self.total = self.allocator.available_size()
        self.kv: dict[int, tuple[Any, ...]] = {}
        self.running: list[Req] = []
        self.matched: list[int] = []
        self.made = 0
        self.freed: set[int] = set()
        """Slots that were given back since someone last emptied this."""
        free_segment = self.allocator.free_segment

        def freeing(slots: torch.Tensor, *, start_pos: int) -> None:
            held = {
                slot
                for req in self.running
                for slot in self.rows[req.kv.req_pool_idx, : req.kv.cache_protected_len].tolist()
            }
            assert held.isdisjoint(slots.tolist()), "a locked page was evicted"
            self.freed.update(slots.tolist())
            free_segment(slots, start_pos=start_pos)

        self.allocator.free_segment = freeing

    # --- SGLang's steps ---------------------------------------------------------------------------

    def admit(self, tokens: list[int], chunk: int = 10_000, **more: Any) -> Req | None:
        """Match, lock, allocate and compute the first chunk; None if there is no room."""
        self.made += 1
        req = request(f"r{self.made}", tokens, **more)
        return req if self.resume(req, chunk) else None

    def resume(self, req: Req, chunk: int = 10_000) -> bool:
        req.init_next_round_input(self.cache)
        self.matched.append(req.prefix_len)
        want = len(req.full_untruncated_fill_ids)
        if self.paged(want) - req.prefix_len > self.room(req):
            return False
        req.lock = self.cache.lock(req.last_node)
        if self.paged(want) - req.prefix_len > self.available():
            self.cache.unlock(req.lock)
            req.lock = None
            return False
        self.pool.alloc([req])
        prefix = self.cache.prefix_device_indices(req)
        assert len(prefix) == req.prefix_len
        self.pool.write((req.kv.req_pool_idx, slice(0, req.prefix_len)), prefix.to(torch.int32))
        req.kv.kv_committed_len = req.kv.kv_allocated_len = req.prefix_len
        self.check_row(req)
        self.running.append(req)
        self.compute(req, chunk)
        return True

    def compute(self, req: Req, chunk: int = 10_000) -> None:
        """Compute up to ``chunk`` more tokens of a prompt, and publish them as SGLang does."""
        stop = min(len(req.full_untruncated_fill_ids), req.kv.kv_committed_len + chunk)
        need = self.paged(stop) - self.paged(req.kv.kv_committed_len)
        if stop <= req.kv.kv_committed_len or need > self.available():
            return
        self.extend(req, stop)
        req.extend_end = stop
        checkpoint_kv_cache(req, self.cache)
        assert req.kv.cache_protected_len % self.page == 0
        self.check_row(req)

    def prefilled(self, req: Req) -> bool:
        return req.kv.kv_committed_len >= len(req.full_untruncated_fill_ids)

    def decode(self, req: Req, token: int) -> bool:
        """Compute the KV of the newest token and sample another one."""
        if self.paged(req.kv.kv_committed_len + 1) > self.paged(req.kv.kv_committed_len) and not (
            self.available()
        ):
            return False
        req.output_ids.append(token)
        req.refresh_fill_ids()
        self.extend(req, len(req.full_untruncated_fill_ids))
        return True

    def finish(self, req: Req) -> None:
        self.running.remove(req)
        req.finished_reason = FINISH_LENGTH(length=0)
        release_kv_cache(req, self.cache, checkpoint=True)

    def retract(self, req: Req) -> None:
        self.running.remove(req)
        release_kv_cache(req, self.cache, checkpoint=False)
        req.reset_for_retract()

    def flush(self) -> None:
        """What the scheduler does for ``/flush_cache``, when nothing runs."""
        assert not self.running
        self.cache.reset()
        self.pool.clear()
        self.allocator.clear()

    def evict(self, tokens: int) -> int:
        return self.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted

    def match(self, tokens: list[int], **space: Any) -> list[int]:
        """The slots of the longest stored prefix, which must have the KV of these tokens."""
        key = RadixKey(
            array("q", tokens), space.get("extra_key"), cache_salt=space.get("cache_salt")
        )
        found = self.cache.match_prefix(MatchPrefixParams(key=key))
        slots = self.cache.path_device_indices(found.last_device_node).tolist()
        assert len(slots) == found.device_prefix_len
        for at, slot in enumerate(slots):
            assert self.kv[slot] == self.history(tokens, at, space), "the KV of other tokens"
        return slots

    # --- memory -----------------------------------------------------------------------------------

    def extend(self, req: Req, stop: int) -> None:
        have = req.kv.kv_committed_len
        more = self.paged(stop) - self.paged(have)
        row = self.rows[req.kv.req_pool_idx]
        if more:
            evict_from_tree_cache(self.cache, more)
            slots = self.allocator.alloc(more)
            assert slots is not None, "evicted less than was promised"
            end = min(self.paged(have) + more, stop)
            self.pool.write(
                (req.kv.req_pool_idx, slice(self.paged(have), end)),
                slots[: end - self.paged(have)].to(torch.int32),
            )
            for slot in slots.tolist():
                self.kv.pop(slot, None)
        if have % self.page:  # the rest of the last page
            end = min(stop, self.paged(have))
            first = int(row[have - 1]) + 1
            row[have:end] = torch.arange(first, first + end - have)
        tokens = list(req.full_untruncated_fill_ids)
        space = {"extra_key": req.extra_key, "cache_salt": req.cache_salt}
        for at in range(have, stop):
            self.kv[int(row[at])] = self.history(tokens, at, space)
        if self.pairs and have:  # the KV of the last token is complete now that its next is known
            self.kv[int(row[have - 1])] = self.history(tokens, have - 1, space)
        req.kv.kv_committed_len = req.kv.kv_allocated_len = stop

    def history(self, tokens: list[int], at: int, space: dict[str, Any]) -> tuple[Any, ...]:
        return (
            space.get("extra_key") or None, space.get("cache_salt") or None,
            *tokens[: at + 1 + self.pairs],
        )  # fmt: skip

    def paged(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    def available(self) -> int:
        return self.allocator.available_size() + self.cache.evictable_size()

    def room(self, req: Req) -> int:
        """Tokens that could be allocated beside what runs; chunks of others reserve theirs."""
        rest = sum(
            self.paged(len(other.full_untruncated_fill_ids)) - self.paged(other.kv.kv_committed_len)
            for other in self.running
        )
        return 0 if len(self.running) >= ROWS else self.available() - rest

    # --- what must always hold --------------------------------------------------------------------

    def check_row(self, req: Req) -> None:
        tokens = list(req.full_untruncated_fill_ids)
        space = {"extra_key": req.extra_key, "cache_salt": req.cache_salt}
        slots = self.rows[req.kv.req_pool_idx, : req.kv.kv_committed_len].tolist()
        assert len(set(slots)) == len(slots)
        for at, slot in enumerate(slots):
            full = self.history(tokens, at, space)
            short = full[: len(full) - 1] if self.pairs and at == len(slots) - 1 else full
            assert self.kv[slot] in {full, short}, f"the KV of other tokens at {at}"

    def check(self) -> None:
        own = sum(
            self.paged(req.kv.kv_allocated_len) - req.kv.cache_protected_len for req in self.running
        )
        kept = self.cache.evictable_size() + self.cache.protected_size()
        assert self.allocator.available_size() + kept + own == self.total, "slots are lost"
        assert self.cache.total_size() == kept
        for req in self.running:
            self.check_row(req)
