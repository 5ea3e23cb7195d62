"""Prefix reuse of hybrid models in vLLM's KV cache manager and in PagedCache: equal bytes, one run.

vLLM's `KVCacheManager` and `HybridKVCacheCoordinator` are driven as its scheduler drives them, in
"align" mode: lookup, chunks that its own `_mamba_block_aligned_split` cuts, slots, free. No model
runs. Both get the same prompts and the same bytes of memory; what either pads is part of it.

    .venv-vllm/bin/python benchmarks/groups_vllm.py conversation.jsonl.gz agents.jsonl.gz
    .venv-vllm/bin/python benchmarks/groups_vllm.py trace.jsonl.gz --requests 2000 --json
    .venv-vllm/bin/python benchmarks/groups_vllm.py              # without traces
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import TYPE_CHECKING

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    _get_kv_cache_groups_uniform_page_size,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvkeep import PagedCache
from kvkeep.bench.replay import Workload
from kvkeep.bench.traces import open_trace
from kvkeep.core.errors import OutOfPages
from kvkeep.core.geometry import KVGeometry, parse_count
from kvkeep.core.groups import GroupLayout, GroupPlan, StateSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

CHUNK = 8192  # tokens of a pass, vLLM's default
LONGEST = 1 << 20
HASHED = 20  # every so many requests, vLLM's hashing is measured
QWEN = {
    "model_type": "qwen3_5_text", "num_hidden_layers": 32, "hidden_size": 2560,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "dtype": "bfloat16",
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32",
}  # fmt: skip
"""The shape of Qwen3.5-4B."""
GEMMA = {
    "model_type": "gemma3_text", "num_hidden_layers": 62, "num_attention_heads": 32,
    "num_key_value_heads": 16, "head_dim": 128, "hidden_size": 5376, "sliding_window": 1024,
    "dtype": "bfloat16",
}  # fmt: skip
"""The shape of Gemma-3-27B."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens, and the chained id of each unit of ``unit`` tokens."""

    ids: np.ndarray
    tokens: int
    unit: int

    def row(self) -> np.ndarray:
        """Return the tokens; ids stand for them."""
        return np.repeat(self.ids, self.unit)[: self.tokens]

    def hashes(self, block: int) -> list[bytes]:
        """Return a name for each full block: its number, and the chained id at its end."""
        return [
            b"%d %d" % (at, self.ids[((at + 1) * block - 1) // self.unit])
            for at in range(self.tokens // block)
        ]


@dataclass(frozen=True, slots=True)
class Found:
    """What one cache reused of a list of prompts."""

    what: str
    cache: str
    requests: int
    hits: int
    """Requests that reused anything."""
    percent: float
    """Reused tokens, of all tokens of the prompts."""
    us: float
    """Microseconds per request, median, without those of hashing."""
    hashing_us: float
    """Microseconds of hashing a prompt in blocks, median; kvkeep compares tokens instead."""


# --- vLLM ------------------------------------------------------------------------------------


def vllm_groups(geometry: KVGeometry) -> list[KVCacheGroupSpec]:
    """Return the groups as vLLM makes them: of equal layers, as many in each, one page size.

    Blocks of attention grow, by multiples of 16 tokens, until the state of a layer fits into a
    page (`Platform.update_block_size_for_backend`); states are padded to it.
    """
    full = [one for one in geometry.groups if one.kind == "full"]
    (base,) = full
    shape = base.shape
    assert shape is not None
    token = shape.bytes_per_token(geometry.dtype)
    states = [one for one in geometry.groups if one.state]
    state = max((one.bytes_per_state() // len(one.layers) for one in states), default=0)
    size = max(16, math.ceil(state / token / 16) * 16)
    attention = {
        "block_size": size, "num_kv_heads": shape.kv_heads, "head_size": shape.head_dim,
        "dtype": torch.bfloat16,
    }  # fmt: skip
    specs: dict[str, KVCacheSpec] = {}
    for group in geometry.groups:
        spec: KVCacheSpec
        if group.kind == "full":
            spec = FullAttentionSpec(**attention)
        elif group.state:
            spec = MambaSpec(
                block_size=size,
                shapes=tuple(tensor.shape for tensor in group.state),
                dtypes=tuple(getattr(torch, tensor.dtype) for tensor in group.state),
                page_size_padded=size * token,
                mamba_cache_mode="align",
            )
        else:
            assert group.span is not None
            spec = SlidingWindowSpec(sliding_window=group.span, **attention)
        specs |= {f"layer {one}": spec for one in group.layers}
    found: list[KVCacheGroupSpec] = _get_kv_cache_groups_uniform_page_size(specs)
    return found


def block_bytes(groups: list[KVCacheGroupSpec]) -> int:
    """Return the bytes of a block of any group: the largest group's layers, a page each."""
    most = max(len(one.layer_names) for one in groups)
    return most * int(groups[0].kv_cache_spec.page_size_bytes)


class VLLM:
    """vLLM's manager, driven as its scheduler drives it."""

    name = "vLLM"

    def __init__(self, groups: list[KVCacheGroupSpec], blocks: int, *, reuse: bool = True) -> None:
        self.block = int(groups[0].kv_cache_spec.block_size)
        config = KVCacheConfig(
            # One more: vLLM never uses block 0.
            num_blocks=blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=0,  # the default
        )
        self.manager = KVCacheManager(
            config, LONGEST, self.block, self.block,
            max_in_flight_tokens=CHUNK, enable_caching=reuse,
        )  # fmt: skip
        self._scheduler = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=self.block),
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            block_size=self.block,
            hash_block_size=self.block,
            use_eagle_block_drop=False,
            mamba_partial_cache_hit=False,
            mamba_has_prefill_checkpoint_blocks=False,
            mamba_prefill_checkpoint_alignment=None,
            mamba_shared_prefix_checkpoint=False,
            max_num_scheduled_tokens=CHUNK,
        )
        self._states = any(isinstance(one.kv_cache_spec, MambaSpec) for one in groups)
        self._number = 0
        self._hasher = get_request_block_hasher(self.block, sha256)
        self.hashing: list[float] = []

    def prepare(self, prompt: Prompt) -> Request:
        """Return a request with its hashes."""
        self._number += 1
        params = SamplingParams(max_tokens=1)
        sampled = self._number % HASHED == 1
        tokens = prompt.row().tolist() if sampled else [0] * prompt.tokens
        request = Request(str(self._number), tokens, params, None)
        if sampled:
            started = perf_counter()
            self._hasher(request)
            self.hashing.append(perf_counter() - started)
        request.block_hashes = prompt.hashes(self.block)
        return request

    def serve(self, request: Request) -> int:
        """Compute a prompt, and free it; return the tokens that were reused."""
        manager = self.manager
        hit: int
        blocks, hit, request.shared_prefix_boundary = manager.get_computed_blocks(request)
        done, first = hit, True
        while done < request.num_tokens:
            manager.new_step_starts()
            more = min(CHUNK, request.num_tokens - done)
            request.num_computed_tokens = 0 if first else done
            local = hit if first else 0
            if self._states:
                more = Scheduler._mamba_block_aligned_split(self._scheduler, request, more, local)
            slots = manager.allocate_slots(request, more, local, blocks if first else None)
            if slots is None or not more:
                manager.free(request)
                return 0
            done += more
            first = False
        manager.free(request)
        return hit


# --- kvkeep ----------------------------------------------------------------------------------


class Ours:
    """A `PagedCache`, driven as an engine drives it."""

    name = "kvkeep"

    def __init__(self, layout: GroupLayout, pages: int, eviction: str) -> None:
        self.cache = PagedCache(pages, layout, eviction=eviction)

    def prepare(self, prompt: Prompt) -> tuple[np.ndarray, int]:
        """Return the tokens, and how many are in whole units."""
        return prompt.row(), prompt.tokens // prompt.unit * prompt.unit

    def serve(self, prompt: tuple[np.ndarray, int]) -> int:
        """Compute a prompt, and close it; return the tokens that were reused."""
        row, known = prompt
        try:
            # The end of the prompt, for checkpoints, is that of its last whole unit.
            sequence = self.cache.open(row[: known + 1])
            sequence.append(row[known + 1 :])
        except OutOfPages:
            return 0
        with sequence:
            groups = sequence.groups
            assert groups is not None
            sequence.copies()
            groups.copies()
            while groups.position < len(row):
                stops = groups.stops
                stop = min([len(row), groups.position + CHUNK, *stops])
                groups.reach(stop)
                if stop in stops:
                    groups.checkpoint(stop)
                sequence.publish(min(stop, known))
            return int(sequence.num_cached)


# --- measurements ----------------------------------------------------------------------------


def measured(what: str, cache: VLLM | Ours, prompts: Iterable[Prompt]) -> Found:
    """Serve all prompts."""
    times, tokens, reused, hits = [], 0, 0, 0
    for prompt in prompts:
        request = cache.prepare(prompt)
        started = perf_counter()
        hit = cache.serve(request)
        times.append(perf_counter() - started)
        tokens += prompt.tokens
        reused += hit
        hits += hit > 0
    hashing = median(cache.hashing) if isinstance(cache, VLLM) else 0.0
    percent = 100 * reused / max(1, tokens)
    return Found(what, cache.name, len(times), hits, percent, 1e6 * median(times), 1e6 * hashing)


def of_trace(path: str, requests: int) -> list[Prompt]:
    """Return the first prompts of a trace; namespaces have ids of their own."""
    work = Workload.read(open_trace(path))
    return [
        Prompt(work.prompt(number), int(work.tokens[number]), work.unit_tokens)
        for number in range(min(requests, len(work)))
    ]


def shared(prefix: int, suffix: int) -> Iterator[Prompt]:
    """Yield 64 prompts of 12 groups, in random order: a prefix of the group, then unique tokens."""
    groups = [at % 12 for at in range(64)]
    common: dict[int, np.ndarray] = {}
    random.Random(1).shuffle(groups)
    number = 1_000_000
    for group in groups:
        ids = common.setdefault(group, np.arange(group * 10_000, group * 10_000 + prefix))
        own = np.arange(number, number + suffix)
        number += suffix
        yield Prompt(np.concatenate((ids, own)).astype(np.int32), prefix + suffix, 1)


def even(pages: int, eviction: str) -> tuple[VLLM, Ours]:
    """Return both caches for the sizes of docs/how-to/hybrid-models.md.

    A layer of attention keeps 512 tokens in as many bytes as a layer's state takes, but for 6 %;
    there are five layers with a state for each of attention. So neither pads more than that.
    """
    attention = FullAttentionSpec(512, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
    page = attention.page_size_bytes
    state = MambaSpec(
        512, shapes=((int(page * 0.94) // 2,),), dtypes=(torch.bfloat16,),
        page_size_padded=page, mamba_cache_mode="align",
    )  # fmt: skip
    groups = [KVCacheGroupSpec(["full"], attention)]
    groups += [KVCacheGroupSpec([f"state {at}"], state) for at in range(5)]
    return VLLM(groups, pages), Ours(GroupLayout(512, (), StateSpec(5)), pages, eviction)


def shaped(config: dict[str, object], budget: int, eviction: str) -> tuple[VLLM, Ours]:
    """Return both caches for a model, with ``budget`` bytes each."""
    plan = GroupPlan(KVGeometry.from_config(config), 16)
    assert plan.layout is not None
    groups = vllm_groups(plan.geometry)
    return (
        VLLM(groups, budget // block_bytes(groups)),
        Ours(plan.layout, budget // plan.page_bytes, eviction),
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in use by one long prompt, beside what its layers have to keep."""

    model: str
    cache: str
    passes: int
    """The most bytes while it is computed, in passes of `CHUNK` tokens."""
    answer: int
    """Bytes while its answer is generated."""
    ideal: int

    @property
    def ratio(self) -> float:
        """Bytes of the answer's time / the least."""
        return self.answer / self.ideal


def memory(model: str, config: dict[str, object], tokens: int) -> list[Memory]:
    """Measure one prompt in a large pool that keeps nothing for others."""
    plan = GroupPlan(KVGeometry.from_config(config), 16)
    assert plan.layout is not None
    groups = vllm_groups(plan.geometry)
    ends = [*range(CHUNK, tokens, CHUNK), tokens, *range(tokens + 1, tokens + 17)]

    theirs = VLLM(groups, 1 << 16, reuse=False)
    request = theirs.prepare(Prompt(np.zeros(tokens + 16, np.int32), tokens + 16, 1))
    used, pool = [], theirs.manager.block_pool
    for end in ends:
        slots = theirs.manager.allocate_slots(request, end - request.num_computed_tokens)
        assert slots is not None
        request.num_computed_tokens = end
        used.append((pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()) * block_bytes(groups))
    passes = -(-tokens // CHUNK)
    ideal = plan.geometry.bytes_for(tokens)
    found = [Memory(model, "vLLM", max(used[:passes]), used[-1], ideal)]

    cache, used = PagedCache(1 << 16, plan.layout, reuse=False), []
    with cache.open(np.zeros(tokens, np.int32)) as sequence:
        sequence.copies()
        kept = sequence.groups
        assert kept is not None
        for end in ends:
            if end > sequence.num_tokens:
                sequence.append([0] * (end - sequence.num_tokens))
                sequence.copies()
            kept.copies()
            kept.reach(end)
            kept.copies()
            used.append(cache.stats().pages_used * plan.page_bytes)
    return [*found, Memory(model, "kvkeep", max(used[:passes]), used[-1], ideal)]


def main() -> None:
    """Measure, and print."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    init_none_hash(sha256)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="*", metavar="TRACE", help="files of `kvkeep trace`")
    parser.add_argument("--tokens", type=parse_count, default=3_000_000, help="of the budget")
    parser.add_argument("--requests", type=int, default=1 << 30, help="of each trace, at most")
    parser.add_argument("--eviction", nargs="+", default=["lru", "returns"])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    rates: list[Found] = []
    for path in options.traces:
        prompts = of_trace(path, options.requests)
        name = os.path.basename(path).split(".")[0]
        token = KVGeometry.from_config(QWEN).groups
        (base,) = [one for one in token if one.kind == "full"]
        budget = options.tokens * base.bytes_per_token("bfloat16")
        for at, eviction in enumerate(options.eviction):
            pairs = (
                (f"{name}, even", even(options.tokens // 512, eviction)),
                (f"{name}, Qwen3.5-4B", shaped(QWEN, budget, eviction)),
            )
            for what, (theirs, ours) in pairs:
                if not at:
                    rates.append(measured(f"{what}, lru", theirs, prompts))
                rates.append(measured(f"{what}, {eviction}", ours, prompts))
    for prefix, suffix in ((1600, 600), (1500, 700)):
        what = f"{prefix} shared, {suffix} unique"
        rates += [
            measured(what, cache, shared(prefix, suffix)) for cache in shaped(QWEN, 8 << 30, "lru")
        ]
    sizes = [
        one
        for model, config in (("Gemma-3-27B", GEMMA), ("Qwen3.5-4B", QWEN))
        for one in memory(model, config, 131_072)
    ]
    if options.json:
        print(json.dumps({
            "rates": [asdict(one) for one in rates],
            "memory": [asdict(one) | {"ratio": one.ratio} for one in sizes],
        }))  # fmt: skip
        return
    head = f"{'prompts':44}{'cache':8}{'requests':>9}{'with hits':>10}{'% tokens':>10}"
    print(f"{head}{'µs':>8}{'hashing':>9}")
    for one in rates:
        print(
            f"{one.what:44}{one.cache:8}{one.requests:9,}{one.hits:10,}{one.percent:10.2f}"
            f"{one.us:8,.0f}{one.hashing_us:9,.0f}"
        )
    head = f"{'one prompt of 131,072 tokens, GiB':44}{'cache':8}"
    print(f"\n{head}{'passes':>9}{'answer':>10}{'ideal':>10}{'ratio':>8}")
    for size in sizes:
        amounts = [one / 2**30 for one in (size.passes, size.answer, size.ideal)]
        print(
            f"{size.model:44}{size.cache:8}{amounts[0]:9.2f}{amounts[1]:10.2f}{amounts[2]:10.2f}"
            f"{size.ratio:8.3f}"
        )


if __name__ == "__main__":
    main()
