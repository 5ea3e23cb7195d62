"""The kits that SGLang's wheel has for testing its own trees, run against kvkeep's.

The wheel ships fixtures, not tests: configurations, steps of requests, inspectors. What a step
needs of a cache is read from its source, with all that it calls; what can run, runs here.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest
from kits_without_gpu import MODULES
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import UnifiedTreeCoreInterface
from sglang.test.kits.unified_radix_cache.config import CONFIGS
from sglang.test.kits.unified_radix_cache.kv_events import UnifiedRadixCacheKVEventsFixtures
from sglang.test.kits.unified_radix_cache.mixins import UnifiedRadixCacheFixtures
from sglang.test.mem_cache_utils import finish_req
from tree_scheduler import memory

from kvkeep.core.errors import UnsupportedModel
from kvkeep.core.eviction import policy as named
from kvkeep.integrations.sglang.building import build_tree
from kvkeep.integrations.sglang.tree import KVKeepTree

PAGE = Path(__file__).parents[1] / "docs" / "sglang.md"
PLAIN = [config for config in CONFIGS if not (config.has_swa or config.has_mamba)]


# --- which steps can run -------------------------------------------------------------------------


def needs(function: Any, owner: type, seen: set[Any]) -> set[str]:
    """The attributes of a cache that a step uses, also through the steps that it calls."""
    function = getattr(function, "__func__", function)
    if function in seen or not inspect.isfunction(function):
        return set()
    seen.add(function)
    found: set[str] = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in {"cache", "cons", "prod", "core"}:
                found.add("tree_core" if node.value.id == "core" else node.attr)
            elif node.value.id == "self":
                found |= needs(getattr(owner, node.attr, None), owner, seen)
        elif isinstance(node, ast.Name):
            called = function.__globals__.get(node.id)
            if inspect.isfunction(called) and called.__module__.startswith(KITS):
                found |= {"tree_core"} if node.id == "build_fixture" else needs(called, owner, seen)
            elif inspect.isclass(called) and called.__module__.startswith(UNIFIED):
                found.add("tree_core")
    return found


UNIFIED = "sglang.srt.mem_cache.unified"
KITS = "sglang.test.kits.unified_radix_cache"
WHY = {
    "tree_core": "a TreeCore, the inside of SGLang's tree",
    "session": "streaming sessions, which SGLang gives its own tree alone",
    "components": "components (SWA, Mamba) of SGLang's tree",
    "release_swa": "windows in the tree",
}


def table() -> str:
    """The table in docs/sglang.md: each kit of the wheel, its steps, and why some cannot run."""
    made = KVKeepTree(memory(4, 8), lambda: named("lru"))
    lines = ["| kit | steps | which use nothing else | the others need |", "|---|---|---|---|"]
    for module in MODULES:
        steps: dict[str, set[str]] = {}
        for name, owner in vars(module).items():
            own = inspect.isclass(owner) and owner.__module__ == module.__name__
            if own and name.endswith("Fixtures"):
                for step, function in vars(owner).items():
                    if inspect.isfunction(getattr(function, "__func__", function)):
                        steps[f"{name}.{step}"] = needs(function, owner, set())
        missing = {
            step: {need for need in wants if not hasattr(made, need)}
            for step, wants in steps.items()
        }
        if steps:
            why = sorted({WHY.get(need, "HiCache") for some in missing.values() for need in some})
            can = sum(not some for some in missing.values())
            short = module.__name__.rpartition(".")[2]
            lines.append(f"| `{short}` | {len(steps)} | {can} | {'; '.join(why)} |")
    methods = len(UnifiedTreeCoreInterface.__abstractmethods__)
    inspectors = [module for module in MODULES if "inspect" in module.__name__]
    lines.append(
        f"| {len(inspectors)} inspectors | – | none | {WHY['tree_core']}, of {methods} methods |"
    )
    hybrid = len(CONFIGS) - len(PLAIN)
    lines.append(
        f"| `config`: {len(CONFIGS)} caches | – | {len(PLAIN)} | "
        f"{hybrid} have windows or states, and are refused by name |"
    )
    return "\n".join(lines)


def test_the_table_of_kits_is_that_of_the_documentation() -> None:
    assert table() in PAGE.read_text("utf-8"), f"docs/sglang.md needs this table:\n{table()}"


# --- the steps that can --------------------------------------------------------------------------


class Steps(UnifiedRadixCacheFixtures):  # type: ignore[misc]
    """SGLang's steps over one of its configurations, for either tree."""

    def __init__(self, config: Any, ours: bool, **more: Any) -> None:
        self.cfg = config
        pages = config.kv_size // config.page_size
        self.params = memory(
            config.page_size, pages, rows=config.max_num_reqs, row=config.max_context_len, **more
        )
        self.rows, self.slots = (
            self.params.req_to_token_pool,
            self.params.token_to_kv_pool_allocator,
        )
        self.cache = (
            KVKeepTree(self.params, lambda: named("lru")) if ours else RadixCache(self.params)
        )

    def store(self, tokens: list[int], **more: Any) -> Any:
        return self._insert(self.cache, self.slots, self.rows, tokens, **more)

    def length(self, tokens: list[int], **space: Any) -> int:
        found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array_of(tokens), **space)))
        return int(found.device_prefix_len)


class Events(UnifiedRadixCacheKVEventsFixtures):  # type: ignore[misc]
    def assertIsNotNone(self, value: object) -> None:
        assert value is not None


def array_of(tokens: list[int]) -> Any:
    from array import array

    return array("q", tokens)


both = pytest.mark.parametrize("ours", [True, False], ids=["kvkeep", "sglang"])
every = pytest.mark.parametrize("config", PLAIN, ids=lambda config: config.label)


@both
@every
def test_insert_walk(config: Any, ours: bool) -> None:
    """Shared prefixes, branches, namespaces: lengths of inserts and of matches."""
    steps = Steps(config, ours)
    seq = steps._make_seq(1, 3)
    branch = [*seq[: config.page_size], *steps._make_seq(5000, 1)]
    assert steps.store(seq).prefix_len == 0
    assert steps.store(seq).prefix_len == len(seq)
    assert steps.store(branch).prefix_len == config.page_size
    assert steps.store(seq, extra_key="a").prefix_len == 0
    assert steps.store(seq, cache_salt="b").prefix_len == 0
    assert steps.length(seq) == len(seq)
    assert steps.length([*branch, 9]) == len(branch)
    assert steps.length(seq, extra_key="a", cache_salt="b") == 0
    assert steps.cache.total_size() == 3 * len(seq) + config.page_size


@both
@every
def test_a_request_in_flight(config: Any, ours: bool) -> None:
    steps = Steps(config, ours)
    cache, page = steps.cache, config.page_size
    seq = steps._make_seq(1, 2)
    req, indices = steps._make_inflight_req(cache, steps.slots, steps.rows, seq, allocated=True)
    cache.checkpoint(req, up_to=len(seq))
    assert req.kv.cache_protected_len == len(seq)
    assert cache.path_device_indices(req.last_node).tolist() == indices.tolist()
    assert (cache.protected_size(), cache.evictable_size()) == (2 * page, 0)
    cache.evict(EvictParams(num_tokens=page))
    assert cache.total_size() == 2 * page
    free = steps.slots.available_size()
    twin, _ = steps._make_inflight_req(cache, steps.slots, steps.rows, seq, allocated=True)
    finish_req(cache, twin, len(seq))
    assert steps.slots.available_size() == free
    finish_req(cache, req, len(seq))
    assert (cache.protected_size(), cache.evictable_size()) == (0, 2 * page)
    match = cache.match_prefix(MatchPrefixParams(key=RadixKey(array_of(seq))))
    steps._apply_match_to_req(req, match)
    assert req.prefix_len == 2 * page
    cache.evict(EvictParams(num_tokens=2 * page))
    assert cache.total_size() == 0


@every
def test_kv_events(config: Any) -> None:
    """The kit's own readers of events see the same hashes of both trees."""
    seen = []
    for ours in (True, False):
        steps = Steps(config, ours, enable_kv_cache_events=True)
        events, page = Events(), config.page_size
        cache = steps.cache
        cache.take_events()
        seq = steps._make_seq(1, 2)
        events._insert(cache, steps.slots, seq)
        events._insert(cache, steps.slots, seq, cache_salt="s")
        stored = events._stored_events(cache)
        events._insert(cache, steps.slots, [*seq, *range(9000, 9000 + page)])
        more = events._stored_events(cache)
        cache.evict(EvictParams(num_tokens=10**6))
        removed = events._event_hashes(events._removed_events(cache))
        hashes = events._event_hashes(stored) + events._event_hashes(more)
        assert sorted(removed) == sorted(hashes)
        seen.append((hashes, [event.parent_block_hash for event in stored + more]))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "config", [one for one in CONFIGS if one not in PLAIN], ids=lambda config: config.label
)
def test_what_it_has_no_components_for_is_refused_by_name(config: Any) -> None:
    context = TreeCacheBuildContext(
        server_args=None, params=memory(4, 8), is_hybrid_swa=config.has_swa,
        is_hybrid_ssm=config.has_mamba, enable_hierarchical_cache=False, disable_radix_cache=False,
        tp_worker=None, model_config=None, tp_size=1, tp_rank=0, tp_group=None,
    )  # fmt: skip
    with pytest.raises(UnsupportedModel) as refusal:
        build_tree(context)
    assert ("SWA" in str(refusal.value)) == config.has_swa
    assert ("Mamba" in str(refusal.value)) == config.has_mamba
