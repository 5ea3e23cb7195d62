"""Transformers' caches: reading their KV, and filling one from another.

Supported are layers that hold keys and values as computed, in order: all of them, or the last ones,
as layers with a sliding window do.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from kvkeep.core.errors import InvalidValue, require
from kvkeep.store import Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import Cache, DynamicCache, PreTrainedModel

    from kvkeep.core.geometry import KVGeometry

__all__ = [
    "CacheLayers",
    "LayerKV",
    "check_cache",
    "check_fits",
    "fill",
    "grown",
    "held",
    "length_of",
]

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


_ATTENTION: Final = {
    "DynamicLayer", "DynamicSlidingWindowLayer", "RecordingWindowLayer", "StaticLayer",
    "StaticSlidingWindowLayer", "LinearAttentionAndFullAttentionLayer",
}  # fmt: skip
_STATES: Final = {"LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer"}


@cache
def _recording_window() -> Any:
    """Return the class of sliding layers that drop nothing; Transformers is imported late."""
    transformers = require("transformers", "transformers")

    class RecordingWindowLayer(transformers.cache_utils.DynamicSlidingWindowLayer):  # type: ignore[misc, name-defined]
        """A sliding layer that keeps all tokens that it gets; masks do the rest."""

        keys: Any
        values: Any

        def update(
            self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Add the KV of a pass; return all that is held."""
            del args, kwargs
            if not self.is_initialized:
                self.lazy_initialization(keys, values)
            self.cumulative_length += keys.shape[-2]
            self.keys = torch.cat([self.keys, keys], dim=-2)
            self.values = torch.cat([self.values, values], dim=-2)
            return self.keys, self.values

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            """Return how many tokens a pass attends to, and the position of the first."""
            held = self.keys.shape[-2] if self.is_initialized and self.keys.numel() else 0
            return held + query_length, self.cumulative_length - held

    return RecordingWindowLayer


class CacheLayers:
    """Caches of one model, from snapshots and into them. Thread safety: all methods."""

    def __init__(self, model: PreTrainedModel, geometry: KVGeometry) -> None:
        self._model = model
        self._geometry = geometry
        self._latent: dict[int, int] = {}
        self.attending: list[int] = []
        self.states: dict[int, list[str]] = {}
        self.spans: dict[int, int] = {}
        for group in geometry.groups:
            for layer in group.layers:
                if group.shape is not None:
                    self.attending.append(layer)
                    if group.span is not None:
                        self.spans[layer] = group.span
                    if group.shape.latent_dim is not None:
                        self._latent[layer] = group.shape.latent_dim
                if group.state:
                    self.states[layer] = [tensor.name for tensor in group.state]
        self.attending.sort()

    def empty(self, *, recording: bool = False) -> Cache:
        """Return an empty cache; ``recording``: sliding layers keep all that they get."""
        transformers = require("transformers", "transformers")
        made: Cache = transformers.DynamicCache(config=self._model.config)
        for number, layer in enumerate(made.layers):
            if recording and type(layer).__name__ == "DynamicSlidingWindowLayer":
                window: Any = layer
                made.layers[number] = _recording_window()(window.sliding_window)
        return made

    # --- from snapshots --------------------------------------------------------------------------

    def resumed(self, snapshot: Snapshot) -> Cache:
        """Return a recording cache of one row that goes on behind ``snapshot``."""
        return self.batch([(snapshot, 0)], snapshot.tokens, recording=True)

    def batch(
        self, rows: Sequence[tuple[Snapshot, int]], columns: int, *, recording: bool = False
    ) -> Cache:
        """Return a cache of several rows up to a column; each with its pads on the left.

        The snapshot of a row is at ``columns`` less its pads.
        """
        made = self.empty(recording=recording)
        for number in self.attending:
            layer: Any = made.layers[number]
            first = 0
            if number in self.spans and recording:
                first = min(self._first(snapshot, number, pad) for snapshot, pad in rows)
            elif hasattr(layer, "sliding_window"):
                first = max(0, columns - layer.sliding_window + 1)
            parts = [self._row(snapshot, number, pad, first, columns) for snapshot, pad in rows]
            keys, values = (torch.cat(side) for side in zip(*parts, strict=True))
            layer.lazy_initialization(keys, values)  # its type and device, and no tokens yet
            layer.keys, layer.values = keys, values  # `update` would copy both
            if hasattr(layer, "sliding_window"):
                layer.cumulative_length = columns
        for number, names in self.states.items():
            for name in names:
                states = [snapshot.state[number, name] for snapshot, _ in rows]
                self._set_state(made.layers[number], name, torch.stack(states))
        return made

    def _first(self, snapshot: Snapshot, number: int, pad: int) -> int:
        """Return the first column that the snapshot has of a layer."""
        return pad + snapshot.tokens - int(snapshot.layers[number][0].shape[-2])

    def _row(
        self, snapshot: Snapshot, number: int, pad: int, first: int, columns: int
    ) -> list[torch.Tensor]:
        """Return keys and values of one row from column ``first`` on; zeros where it has none."""
        parts = snapshot.layers[number]
        if number in self._latent:
            width = self._latent[number]
            whole = parts[0].unsqueeze(0)
            parts = (whole[..., :width], whole[..., width:])
        found = []
        for part in parts:
            room = torch.zeros(
                (1, part.shape[0], columns - first, part.shape[-1]),
                dtype=part.dtype,
                device=self._model.device,
            )
            count = min(part.shape[-2], columns - first, columns - pad)
            if count > 0:
                room[0, :, columns - first - count :] = part[:, part.shape[-2] - count :]
            found.append(room)
        return found

    def _set_state(self, layer: Any, name: str, states: torch.Tensor) -> None:
        states = states.to(self._model.device)
        if name == "conv":
            layer.conv_states[0] = states
            layer.is_conv_states_initialized[0] = True
            layer.conv_kernel_size[0] = states.shape[-1]
        else:
            layer.recurrent_states[0] = states
            layer.is_recurrent_states_initialized[0] = True
        layer.has_previous_state[0] = True
        layer.dtype, layer.device = states.dtype, states.device

    # --- into snapshots --------------------------------------------------------------------------

    def snapshot(
        self, given: Cache, columns: int, start: int = 0, *, row: int = 0, pad: int = 0,
        stop: int | None = None,
    ) -> Snapshot | None:  # fmt: skip
        """Return what ``given`` has of a row behind ``columns`` of it, from token ``start`` on.

        With ``stop``, only up to this token, which is possible without states. None if a window
        has dropped tokens that are needed there. Tensors of attention are views, states copies.

        Raises:
            InvalidValue: a layer is of a kind, or has a shape, that the geometry does not say.
        """
        tokens = columns - pad if stop is None else stop
        layers: dict[int, tuple[torch.Tensor, ...]] = {}
        for number in self.attending:
            layer = self._checked(given, number, _ATTENTION)
            held = min(int(layer.keys.shape[-2]), columns)
            begin = max(start, 0) if number not in self.spans else 0
            first = max(columns - held - pad, begin)  # the first token that is there and wanted
            if number not in self.spans and first > begin:
                return None
            if first > self._needed(number, tokens):
                return None
            at = first - (columns - held - pad)
            count = max(0, tokens - first)
            parts = tuple(part[row, :, at : at + count] for part in (layer.keys, layer.values))
            if number in self._latent:
                parts = (torch.cat(parts, dim=-1)[0],)
            layers[number] = parts
        state: dict[tuple[int, str], torch.Tensor] = {}
        for number, names in self.states.items():
            layer = self._checked(given, number, _STATES)
            for name in names:
                found = layer.conv_states if name == "conv" else layer.recurrent_states
                if set(found) != {0} or found[0] is None:
                    raise InvalidValue(f"layer {number} of the cache has {len(found)} states")
                state[number, name] = found[0][row].clone()
        return Snapshot(tokens, start, layers, state)

    def _needed(self, number: int, tokens: int) -> int:
        for group in self._geometry.groups:
            if number in group.layers and group.span is not None:
                if group.kind == "chunk":
                    return tokens - tokens % group.span
                return max(0, tokens - group.span + 1)
        return tokens

    def _checked(self, given: Cache, number: int, kinds: set[str]) -> Any:
        layer = given.layers[number] if number < len(given.layers) else None
        name = type(layer).__name__
        if name not in kinds:
            raise InvalidValue(
                f"layer {number} of the cache is {'missing' if layer is None else f'a {name}'}, "
                "which is not as the model computes it"
            )
        return layer
