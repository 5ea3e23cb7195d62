"""Transformers' caches: reading their KV, and filling one from another.

Supported are layers that hold keys and values as computed, in order: all of them, or the last ones,
as layers with a sliding window do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvkeep.core.errors import InvalidValue, require

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from transformers import Cache, DynamicCache

__all__ = ["LayerKV", "check_cache", "check_fits", "fill", "grown", "held", "length_of"]

_PLAIN_LAYERS: Final = {
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "StaticLayer",
    "StaticSlidingWindowLayer",
}


class LayerKV(NamedTuple):
    """KV of one layer for the columns from ``first`` on, each [rows, heads, columns, dim]."""

    first: int
    keys: torch.Tensor
    values: torch.Tensor


def length_of(cache: Cache) -> int:
    """Return the number of columns added to ``cache``, including those that left a window."""
    return int(cache.get_seq_length())


def check_cache(cache: object) -> None:
    """Raise `InvalidValue` if ``cache`` is not one of Transformers'."""
    if not isinstance(cache, require("transformers", "transformers").Cache):
        raise InvalidValue(
            f"past_key_values is {type(cache).__name__}; give the cache that the model filled: "
            "a DynamicCache or a StaticCache"
        )


def held(cache: Cache, layer: int) -> LayerKV:
    """Return the KV that ``layer`` of ``cache`` holds.

    Raises:
        InvalidValue: there is no such layer, or it does not hold KV as computed.
    """
    if layer >= len(cache.layers):
        raise InvalidValue(f"the cache has {len(cache.layers)} layers, and the model more")
    found: Any = _plain(cache, layer)
    columns = int(found.get_seq_length())
    count = min(columns, found.keys.shape[-2])
    return LayerKV(columns - count, found.keys[..., :count, :], found.values[..., :count, :])


def _plain(cache: Cache, layer: int) -> object:
    found = cache.layers[layer]
    kind = type(found).__name__
    if kind not in _PLAIN_LAYERS:
        raise InvalidValue(f"layer {layer} of the cache is a {kind}, which is not as computed")
    return found


def grown(layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> DynamicCache:
    """Return a cache that continues from these keys and values, and takes over their memory.

    It has no windows: layers with one are kept whole, and attention masks do the rest.
    """
    transformers = require("transformers", "transformers")
    cache: DynamicCache = transformers.DynamicCache()
    for keys, values in layers:
        layer: Any = transformers.cache_utils.DynamicLayer()
        layer.keys, layer.values = keys, values  # `update` would copy both
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        cache.layers.append(layer)
    return cache


def check_fits(cache: object, columns: int) -> None:
    """Raise `InvalidValue` if `fill` cannot put this many columns into ``cache``."""
    transformers = require("transformers", "transformers")
    kinds = transformers.DynamicCache, transformers.StaticCache
    if not isinstance(cache, kinds) or getattr(cache, "offloading", False):
        raise InvalidValue(
            f"past_key_values is {type(cache).__name__}; give a DynamicCache or a StaticCache that "
            "stays on the device, or leave it out"
        )
    for layer, one in enumerate(cache.layers):
        if type(one).__name__ != "DummyLayer":  # a layer that uses the KV of another layer
            _plain(cache, layer)
    if length := length_of(cache):
        raise InvalidValue(
            f"past_key_values holds {length} tokens; the prompt's KV is put into it here, so give "
            "an empty one, or call its reset()"
        )
    room = [one.max_cache_len for one in cache.layers if type(one).__name__ == "StaticLayer"]
    if room and min(room) < columns:
        raise InvalidValue(
            f"past_key_values has room for {min(room)} tokens and the prompt has {columns}; make "
            "it as long as prompt and answer together"
        )


def fill(cache: Cache, source: Cache) -> None:
    """Copy all of ``source``, a cache of `grown`, into the empty ``cache``."""
    for layer in range(len(source.layers)):
        _, keys, values = held(source, layer)
        cache.update(keys, values, layer)
