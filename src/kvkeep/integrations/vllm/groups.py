"""Groups of layers, each with its own pages, and which kinds of KV can be stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvkeep.core.errors import UnsupportedModel
from kvkeep.integrations.vllm.keys import keys_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

__all__ = ["Group", "Groups"]

_ADVICE = "serve it without kvkeep: leave out --kv-transfer-config"


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table.

    Attributes:
        layers: their names, in the order of their pages in a record.
        window: tokens that their attention sees, the current one included; None: all.
    """

    layers: tuple[str, ...]
    window: int | None

    def first_needed(self, tokens: int, block_tokens: int) -> int:
        """Return the first block that is needed to continue from token ``tokens``."""
        if self.window is None:
            return 0
        return max(0, tokens - self.window + 1) // block_tokens


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of a model; their blocks have the same number of tokens.

    Attributes:
        block_tokens: tokens of a block, over all ranks.
        drops_last: draft layers compute the end of a block from later tokens, so the last block
            found is not used.
    """

    groups: tuple[Group, ...]
    block_tokens: int
    drops_last: bool

    @property
    def windowed(self) -> bool:
        """Whether some layers have a sliding window."""
        return any(group.window is not None for group in self.groups)

    def reach(
        self, hashes: Sequence[bytes], first: int, count: Callable[[list[bytes]], int]
    ) -> int:
        """Return the block up to which a request can be loaded; it has the blocks before ``first``.

        ``count`` returns how many leading keys are stored.
        """
        groups = list(enumerate(self.groups))
        # If all layers have a window, the blocks before it are required too, for simplicity.
        whole = [at for at, group in groups if group.window is None] or [0]
        end = len(hashes)
        for at in whole:
            end = first + count(keys_of(hashes[first:end], at))
        shrunk = True
        while shrunk and end > first:
            shrunk = False
            for at, group in groups:
                if group.window is None:
                    continue
                need = max(first, group.first_needed(end * self.block_tokens, self.block_tokens))
                there = need + count(keys_of(hashes[need:end], at))
                if there < end:
                    end, shrunk = there, True
        return max(first, end - 1) if self.drops_last and end > first else end

    @classmethod
    def of(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Groups:
        """Read the groups from vLLM's configuration of the model's KV cache.

        Raises:
            UnsupportedModel: the model has no KV, or KV of a kind that cannot be stored.
        """
        found = kv_cache_config.kv_cache_groups
        if not found:
            raise UnsupportedModel(
                f"the model has no KV cache, so there is nothing to store; {_ADVICE}"
            )
        groups = tuple(_group(spec) for spec in found)
        dcp = vllm_config.parallel_config.decode_context_parallel_size
        sizes = {
            spec.kv_cache_spec.block_size * (dcp if spec.kv_cache_spec.dcp_sharded else 1)
            for spec in found
        }
        (size, *others) = sizes
        hashed = kv_cache_config.hash_block_size
        if others or hashed not in (None, size):
            raise UnsupportedModel(
                f"the model's layers have blocks of {sorted(sizes)} tokens, hashed by {hashed}; "
                "kvkeep supports models whose layers have blocks of one size: if they can, give "
                f"--block-size, else {_ADVICE}"
            )
        speculative = vllm_config.speculative_config
        drops = speculative is not None and bool(speculative.use_eagle())
        if drops and len(groups) > 1:
            raise UnsupportedModel(
                "kvkeep does not support models with several groups of layers together with draft "
                f"layers (eagle, mtp): leave out --speculative-config, or {_ADVICE}"
            )
        return cls(groups, size, drops)


def _group(found: KVCacheGroupSpec) -> Group:
    spec = found.kv_cache_spec
    layers = tuple(found.layer_names)
    kinds = spec.kv_cache_specs.values() if type(spec) is UniformTypeKVCacheSpecs else [spec]
    windows = {_window(kind, layers) for kind in kinds}
    if len(windows) > 1 or found.host_resident or not found.enable_kv_transfer:
        raise _not_kept(spec, layers)
    return Group(layers, windows.pop())


def _window(spec: KVCacheSpec, layers: tuple[str, ...]) -> int | None:
    """Return the window of a layer. Only exact types: a subclass may depend on more."""
    if type(spec) is FullAttentionSpec and spec.tokens_per_state == 1 and not spec.non_causal:
        return None
    if type(spec) is MLAAttentionSpec and spec.tokens_per_state == 1 and not spec.model_version:
        return None
    if type(spec) is SlidingWindowSpec:
        return int(spec.sliding_window) + int(spec.extra_retained_tokens)
    raise _not_kept(spec, layers)


def _not_kept(spec: KVCacheSpec, layers: tuple[str, ...]) -> UnsupportedModel:
    return UnsupportedModel(
        f"the cache of layer {layers[0]} is a {type(spec).__name__}, which kvkeep does not "
        f"support: it stores full and sliding attention, and MLA; {_ADVICE}"
    )
