"""What of a model's KV can be kept: its groups of layers, each with pages of its own."""

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
    """Layers that share a table of blocks.

    Attributes:
        layers: their names, in the order in which their pages lie in a record.
        window: tokens that their attention sees, itself included; None: all.
    """

    layers: tuple[str, ...]
    window: int | None

    def first_needed(self, tokens: int, block_tokens: int) -> int:
        """The first block that computing on from ``tokens`` needs."""
        if self.window is None:
            return 0
        return max(0, tokens - self.window + 1) // block_tokens


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of a model, whose blocks are of the same number of tokens.

    Attributes:
        block_tokens: tokens of a block, over all ranks.
        drops_last: draft layers compute the end of a block from what follows it, so the last one
            that is found is of no use.
    """

    groups: tuple[Group, ...]
    block_tokens: int
    drops_last: bool

    @property
    def windowed(self) -> bool:
        """Whether some layers see a window only."""
        return any(group.window is not None for group in self.groups)

    def reach(
        self, hashes: Sequence[bytes], first: int, count: Callable[[list[bytes]], int]
    ) -> int:
        """Up to which block a request could go on from what is stored, blocks before ``first`` had.

        ``count`` says how many of some keys are there before the first that is not.
        """
        groups = list(enumerate(self.groups))
        # Where all layers see a window, the blocks before it are asked for, too: it is simpler.
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
        """Read them from what vLLM made of the model.

        Raises:
            UnsupportedModel: there is KV of a kind of which it is not known what it depends on.
        """
        found = kv_cache_config.kv_cache_groups
        if not found:
            raise UnsupportedModel(
                f"the model has no KV cache, so there is nothing to keep; {_ADVICE}"
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
                "kvkeep keeps models whose layers have blocks of one size: if they can, give "
                f"--block-size, else {_ADVICE}"
            )
        speculative = vllm_config.speculative_config
        drops = speculative is not None and bool(speculative.use_eagle())
        if drops and len(groups) > 1:
            raise UnsupportedModel(
                "kvkeep does not keep models with several groups of layers together with draft "
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
    """Exact types alone: a kind derived from one of them may depend on more."""
    if type(spec) is FullAttentionSpec and spec.tokens_per_state == 1 and not spec.non_causal:
        return None
    if type(spec) is MLAAttentionSpec and spec.tokens_per_state == 1 and not spec.model_version:
        return None
    if type(spec) is SlidingWindowSpec:
        return int(spec.sliding_window) + int(spec.extra_retained_tokens)
    raise _not_kept(spec, layers)


def _not_kept(spec: KVCacheSpec, layers: tuple[str, ...]) -> UnsupportedModel:
    return UnsupportedModel(
        f"the cache of layer {layers[0]} is a {type(spec).__name__}, which kvkeep does not keep: "
        f"it keeps full and sliding attention, and MLA; {_ADVICE}"
    )
