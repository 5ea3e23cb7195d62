"""Layouts of KV: the tensors that engines hold, and the raw bytes of a stored block."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal

import torch

from kvkeep.core.errors import InvalidValue, told
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.codecs import BlockShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from kvkeep.core.geometry import KVGeometry

    Layers = Sequence[tuple[Tensor, ...]]
    KV = Tensor | Layers

__all__ = ["Form", "Layout", "check_layout"]

Layout = Literal["NHD", "HND"]

_LARGE: Final = 16 << 20
"""Bytes from which memory is mapped anew; smaller tensors reuse memory that the process has
touched.
"""


def check_layout(layout: str) -> None:
    """Raise `InvalidValue` if ``layout`` is no order of the tensors of KV."""
    given: object = layout
    if not isinstance(given, str) or given not in ("NHD", "HND"):
        raise InvalidValue(
            f"layout is {told(layout)}; it is 'NHD' ([tokens, heads, dim]) or 'HND' "
            "([heads, tokens, dim])"
        )


class Form:
    """KV of one geometry and layout: as tensors, and as the raw bytes of a block.

    Raw bytes are the parts one after another: K of the first layer, its V, K of the second layer …,
    each ``[tokens, heads, dim]`` (NHD) or ``[heads, tokens, dim]`` (HND); with latent attention,
    one part for each layer. If keys and values have the same width, that equals one tensor
    ``[layers, 2, …]``.
    """

    def __init__(self, geometry: KVGeometry, layout: Layout) -> None:
        check_layout(layout)
        self.geometry = geometry
        self.layout = layout
        self.latent = geometry.latent_dim is not None
        self.dtype: torch.dtype = getattr(torch, geometry.dtype)
        heads = geometry.rank_heads
        widths = [geometry.head_dim] if self.latent else [geometry.head_dim, geometry.value_dim]
        self._parts = tuple((heads, width) for width in widths)
        self.blockwise = self.latent or geometry.head_dim == geometry.value_dim
        """Whether one tensor can hold the KV of all layers."""

    @property
    def block_shape(self) -> BlockShape:
        """The shape of the raw bytes, for codecs."""
        return BlockShape(self.geometry.dtype, self.layout, self._parts * self.geometry.layers)

    def raw_bytes(self, tokens: int) -> int:
        """Return how many raw bytes ``tokens`` tokens take."""
        return tokens * self.geometry.bytes_per_token

    def sizes(self, lengths: Iterable[int]) -> list[int]:
        """Return how many raw bytes each block takes, given their numbers of tokens."""
        return [self.raw_bytes(tokens) for tokens in lengths]

    def shape(self, tokens: int) -> tuple[int, ...]:
        """Return the shape of one tensor with the KV of ``tokens`` tokens."""
        layers, (heads, width) = self.geometry.layers, self._parts[0]
        if self.latent:
            return layers, tokens, width
        if self.layout == "NHD":
            return layers, 2, tokens, heads, width
        return layers, 2, heads, tokens, width

    @property
    def token_axis(self) -> int:
        """The axis of tokens, counted from the last."""
        if self.latent:
            return -2
        return -3 if self.layout == "NHD" else -2

    # --- tensors of callers ----------------------------------------------------------------------

    def check(self, kv: KV, tokens: int) -> None:
        """Raise `InvalidValue` if ``kv`` has not this geometry, layout and number of tokens."""
        if isinstance(kv, torch.Tensor):
            self._check_tensor(kv, tokens)
            return
        layers = self._layers(kv)
        if len(layers) != self.geometry.layers:
            raise InvalidValue(f"kv has {len(layers)} layers; the model has {self.geometry.layers}")
        for number, layer in enumerate(layers):
            parts = self._layer(layer, number)
            for part, (heads, width) in zip(parts, self._parts, strict=True):
                self._check_part(part, number, heads, width, tokens)

    def check_room(self, out: KV, tokens: int) -> None:
        """Raise `InvalidValue` as `check`, or if elements of ``out`` share memory."""
        self.check(out, tokens)
        parts = [out] if isinstance(out, torch.Tensor) else self._flat(out)
        for part in parts:
            sizes = zip(part.shape, part.stride(), strict=True)
            if any(size > 1 and not stride for size, stride in sizes):
                raise InvalidValue(
                    f"out has the strides {part.stride()}, so several of its elements share "
                    "memory; give memory for each element, as torch.empty does"
                )

    @staticmethod
    def _layers(kv: object) -> Sequence[object]:
        if not isinstance(kv, tuple | list):
            raise InvalidValue(
                f"kv is {type(kv).__name__}; it is a tensor, or a tuple or list of layers"
            )
        return kv

    def _check_tensor(self, kv: Tensor, tokens: int) -> None:
        if not self.blockwise:
            raise InvalidValue(
                f"keys have {self.geometry.head_dim} elements and values "
                f"{self.geometry.value_dim}: give kv as ((k, v), …), a pair for each layer"
            )
        if tuple(kv.shape) != self.shape(tokens):
            raise InvalidValue(
                f"kv has the shape {tuple(kv.shape)}; {tokens} tokens in layout {self.layout} "
                f"have {self.shape(tokens)}"
            )
        if kv.dtype != self.dtype:
            raise InvalidValue(f"kv is {kv.dtype}; the geometry says {self.dtype}")

    def _layer(self, layer: object, number: int) -> tuple[Tensor, ...]:
        if isinstance(layer, torch.Tensor):
            layer = (layer,)
        parts = tuple(layer) if isinstance(layer, tuple | list) else ()
        if len(parts) != len(self._parts) or not all(isinstance(p, torch.Tensor) for p in parts):
            want = "one tensor" if self.latent else "a pair (k, v) of tensors"
            given = f"{len(parts)} parts" if parts else type(layer).__name__
            raise InvalidValue(f"layer {number} of kv is {given}; it is {want}")
        return parts

    def _check_part(self, part: Tensor, layer: int, heads: int, width: int, tokens: int) -> None:
        want: tuple[int, ...] = (tokens, heads, width)
        if self.latent:
            want = (tokens, width)
        elif self.layout == "HND":
            want = (heads, tokens, width)
        if tuple(part.shape) not in (want, (1, *want)):
            raise InvalidValue(
                f"layer {layer} of kv has the shape {tuple(part.shape)}; {tokens} tokens in layout "
                f"{self.layout} have {want}, with or without a leading batch of 1"
            )
        if part.dtype != self.dtype:
            raise InvalidValue(
                f"layer {layer} of kv is {part.dtype}; the geometry says {self.dtype}"
            )

    # --- copies ----------------------------------------------------------------------------------

    def empty(self, tokens: int, *, tuples: bool = False) -> KV:
        """Allocate KV for this many tokens: one tensor, or ``tuples`` for each layer."""
        if self.blockwise and not tuples:
            return self._new(self.shape(tokens))
        return [
            tuple(self._new(self._part_shape(tokens, *part)) for part in self._parts)
            for _ in range(self.geometry.layers)
        ]

    def _new(self, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape) * self.dtype.itemsize
        if size < _LARGE:
            return torch.empty(shape, dtype=self.dtype)
        # First touching new memory costs most of a copy; with huge pages it costs a third.
        return torch.frombuffer(aligned(size), dtype=self.dtype).view(shape)

    def cut(self, kv: KV, start: int, stop: int) -> KV:
        """Return a view of tokens ``start`` … ``stop - 1`` of ``kv``."""
        axis = self.token_axis
        if isinstance(kv, torch.Tensor):
            return kv.narrow(axis, start, stop - start)
        return tuple(
            tuple(part.narrow(axis, start, stop - start) for part in self._layer(layer, number))
            for number, layer in enumerate(kv)
        )

    # Inference mode: autograd refuses copies from or into some tensors it tracks, and into tensors
    # that were made in inference mode.

    @torch.inference_mode()
    def write(self, kv: KV, raw: memoryview, tokens: int) -> None:
        """Copy ``kv`` of ``tokens`` tokens into ``raw``, the raw bytes of a block."""
        if isinstance(kv, torch.Tensor):
            self._block(raw, tokens).copy_(kv)
            return
        for mine, theirs in zip(self._pieces(raw, tokens), self._flat(kv), strict=True):
            mine.copy_(theirs.view(mine.shape) if theirs.dim() > mine.dim() else theirs)

    @torch.inference_mode()
    def read(self, raw: memoryview, tokens: int, kv: KV, *, skip: int = 0) -> None:
        """Copy the raw bytes of a block of ``tokens``, without the first ``skip``, into ``kv``."""
        axis, count = self.token_axis, tokens - skip
        if isinstance(kv, torch.Tensor):
            kv.copy_(self._block(raw, tokens).narrow(axis, skip, count))
            return
        for mine, theirs in zip(self._pieces(raw, tokens), self._flat(kv), strict=True):
            theirs.copy_(mine.narrow(axis, skip, count))

    def view(self, raw: memoryview, tokens: int, *, skip: int = 0) -> KV:
        """Return the raw bytes of a block of ``tokens``, without the first ``skip``, as KV."""
        if self.blockwise:
            return self._block(raw, tokens).narrow(self.token_axis, skip, tokens - skip)
        parts, width = self._pieces(raw, tokens), len(self._parts)
        layers = [tuple(parts[at : at + width]) for at in range(0, len(parts), width)]
        return self.cut(layers, skip, tokens)

    def _flat(self, kv: Layers) -> list[Tensor]:
        return [part for number, layer in enumerate(kv) for part in self._layer(layer, number)]

    def _block(self, raw: memoryview, tokens: int) -> Tensor:
        return torch.frombuffer(raw, dtype=self.dtype).view(self.shape(tokens))

    def _pieces(self, raw: memoryview, tokens: int) -> list[Tensor]:
        flat = torch.frombuffer(raw, dtype=self.dtype)
        shapes = [self._part_shape(tokens, *part) for part in self._parts] * self.geometry.layers
        lengths = [shape.numel() for shape in map(torch.Size, shapes)]
        cut = torch.split(flat, lengths)
        return [part.view(s) for part, s in zip(cut, shapes, strict=True)]

    def _part_shape(self, tokens: int, heads: int, width: int) -> tuple[int, ...]:
        if self.latent:
            return tokens, width
        return (tokens, heads, width) if self.layout == "NHD" else (heads, tokens, width)
