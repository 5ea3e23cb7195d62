"""Groups of layers, each with its own pages, and which kinds of KV and states can be stored."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvkeep.core.errors import UnsupportedModel
from kvkeep.core.keys import KEY_BYTES
from kvkeep.integrations.vllm.versions import block_tokens, hashed_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

__all__ = ["BlockReach", "Group", "Groups", "keys_of", "whole_hashes"]


_ADVICE = "serve it without kvkeep: leave out --kv-transfer-config"


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table.

    Attributes:
        layers: their names, in the order of their pages in a record.
        window: tokens that their attention sees, the current one included; None: all.
        state: whether they keep a state instead of KV (Mamba, delta rules, short convolutions). A
            record is then the state at the end of its block, and no earlier record is needed.
    """

    layers: tuple[str, ...]
    window: int | None = None
    state: bool = False

    def first_needed(self, tokens: int, block_tokens: int) -> int:
        """Return the first block that is needed to continue from token ``tokens``."""
        if self.state:
            return max(0, tokens - 1) // block_tokens
        if self.window is None:
            return 0
        return max(0, tokens - self.window + 1) // block_tokens


class BlockReach(NamedTuple):
    """How far a request is stored, in blocks.

    Attributes:
        end: the block up to which it can be loaded.
        covered: the block up to which the KV of layers that see all tokens is stored; windows and
            states may be missing there.
    """

    end: int
    covered: int


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
    def layers(self) -> list[str]:
        """The names of all layers."""
        return [name for group in self.groups for name in group.layers]

    @property
    def states(self) -> tuple[int, ...]:
        """The groups whose layers keep a state."""
        return tuple(at for at, group in enumerate(self.groups) if group.state)

    @property
    def resumes_anywhere(self) -> bool:
        """Whether a stored prompt can be continued from any of its tokens.

        With a window, and with a state, it can be continued only at the end of a block.
        """
        return all(group.window is None and not group.state for group in self.groups)

    @property
    def counted(self) -> int:
        """The group whose blocks are counted as tokens: the first that has KV."""
        return next((at for at, group in enumerate(self.groups) if not group.state), 0)

    def reach(
        self, hashes: Sequence[bytes], first: int, count: Callable[[list[bytes]], int]
    ) -> BlockReach:
        """Return how far a request can be loaded that has the blocks before ``first``.

        That is the longest end at which all groups agree: layers that see all tokens have every
        block, windows are complete, and each state is stored at exactly that end. ``count`` returns
        how many leading keys are stored.

        Cost: a key for each block and group with KV; with states a call of ``count`` for each block
        between the end of the stored KV and the last state before it.
        """
        end = covered = self._covered(hashes, first, count)
        shrunk = True
        while shrunk and end > first:
            shrunk = False
            for at, group in enumerate(self.groups):
                if group.window is None:
                    continue
                need = max(first, group.first_needed(end * self.block_tokens, self.block_tokens))
                there = need + count(keys_of(hashes[need:end], at))
                if there < end:
                    end, shrunk = there, True
            there = self._last_state(hashes, first, end, count)
            if there < end:
                end, shrunk = there, True
        if self.drops_last and end > first:
            end -= 1
        return BlockReach(end, covered)

    def _covered(
        self, hashes: Sequence[bytes], first: int, count: Callable[[list[bytes]], int]
    ) -> int:
        """Return the block up to which the KV of layers that see all tokens is stored."""
        whole = [at for at, group in enumerate(self.groups) if group.window is None]
        whole = [at for at in whole if not self.groups[at].state]
        if not whole and not self.groups[self.counted].state:
            # If all layers have a window, the blocks before it are required too, for simplicity.
            whole = [self.counted]
        end = len(hashes)
        for at in whole:
            end = first + count(keys_of(hashes[first:end], at))
        return end

    def _last_state(
        self, hashes: Sequence[bytes], first: int, end: int, count: Callable[[list[bytes]], int]
    ) -> int:
        """Return the last block, up to ``end``, after which all states are stored; or ``first``."""
        states = self.states
        if not states:
            return end
        for last in range(end, first, -1):
            keys = [key for at in states for key in keys_of(hashes[last - 1 : last], at)]
            if count(keys) == len(keys):
                return last
        return first

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
        sizes = block_tokens(vllm_config, kv_cache_config)
        (size, *others) = sizes
        hashed = hashed_tokens(vllm_config, kv_cache_config)
        if others or hashed not in (None, size):
            raise UnsupportedModel(
                f"the model's layers have blocks of {sorted(sizes)} tokens, hashed by {hashed}; "
                "kvkeep supports models whose layers have blocks of one size, hashed as a whole: "
                "leave out --prefix-match-unit; if the layers can have one size, give "
                f"--block-size; else {_ADVICE}"
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
    groups = {_kind(kind, layers) for kind in kinds}
    if len(groups) > 1 or found.host_resident or not found.enable_kv_transfer:
        raise _not_kept(spec, layers)
    return groups.pop()


def _kind(spec: KVCacheSpec, layers: tuple[str, ...]) -> Group:
    """Return the group of such layers. Only exact types: a subclass may depend on more."""
    if type(spec) is FullAttentionSpec and spec.tokens_per_state == 1 and not spec.non_causal:
        return Group(layers)
    if type(spec) is MLAAttentionSpec and spec.tokens_per_state == 1 and not spec.model_version:
        return Group(layers)
    if type(spec) is SlidingWindowSpec:
        return Group(layers, int(spec.sliding_window) + int(spec.extra_retained_tokens))
    if type(spec) is MambaSpec:
        _require_boundaries(spec, layers)
        return Group(layers, state=True)
    raise _not_kept(spec, layers)


def _require_boundaries(spec: MambaSpec, layers: tuple[str, ...]) -> None:
    """Check that vLLM keeps states at the ends of blocks, and says where they are.

    Raises:
        UnsupportedModel: it does not.
    """
    if spec.mamba_cache_mode != "align":
        raise UnsupportedModel(
            f"the states of layer {layers[0]} are not kept at the ends of blocks "
            f'(mamba_cache_mode is "{spec.mamba_cache_mode}"), so no prompt can be continued from '
            "there: give --enable-prefix-caching and --mamba-cache-mode align; if vLLM has no "
            f"prefix cache for this model, {_ADVICE}"
        )
    if spec.num_speculative_blocks:
        raise UnsupportedModel(
            f"layer {layers[0]} has a state, and kvkeep does not support speculation with states: "
            f"leave out --speculative-config, or {_ADVICE}"
        )


def _not_kept(spec: KVCacheSpec, layers: tuple[str, ...]) -> UnsupportedModel:
    return UnsupportedModel(
        f"the cache of layer {layers[0]} is a {type(spec).__name__}, which kvkeep does not "
        f"support: it stores full and sliding attention, MLA, and states; {_ADVICE}"
    )


def keys_of(hashes: Sequence[bytes], group: int) -> list[bytes]:
    """Return the keys of one group's blocks, from vLLM's hashes of them. Cost: at most 0.1 µs each.

    vLLM's hash covers all tokens up to the block's end, images, LoRA and cache salt. Hashes of 16
    bytes are padded. In all groups but the first, the last byte is changed, so keys of two groups
    are equal only if 31 bytes of two hashes are.
    """
    hashes = whole_hashes(hashes)
    if group == 0:
        return hashes if isinstance(hashes, list) else list(hashes)
    return [each[:-1] + bytes((each[-1] ^ group,)) for each in hashes]


def whole_hashes(hashes: Sequence[bytes]) -> Sequence[bytes]:
    """Return vLLM's hashes of blocks with 32 bytes each; those that have them are unchanged."""
    if hashes and len(hashes[0]) > KEY_BYTES:
        return [hashlib.sha256(each).digest() for each in hashes]
    if hashes and len(hashes[0]) < KEY_BYTES:
        return [each.ljust(KEY_BYTES, b"\0") for each in hashes]
    return hashes
