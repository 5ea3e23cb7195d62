"""Forms of KV: the tensors that engines hold, and the raw bytes of records.

A store keeps blocks of all layers, or records of each group of layers:

    base      a block of tokens of all layers that keep every token, latent or not
    window    a block of tokens of the layers of one window or chunk
    state     the states of all layers at one position

Raw bytes are the parts one after another: K of the first layer, its V, K of the second layer …,
each ``[tokens, heads, dim]`` (NHD) or ``[heads, tokens, dim]`` (HND); with latent attention one
part for each layer. States begin at multiples of 16 bytes. Where each group is kept apart, the last
byte is the number of the kind (`BlockShape.kinds`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import torch

from kvkeep.core.errors import InvalidValue, told
from kvkeep.core.geometry import DTYPES
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.codecs import BlockShape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from kvkeep.core.geometry import KVGeometry, LayerGroup

    Layers = Sequence[tuple[Tensor, ...]] | Mapping[int, tuple[Tensor, ...]]
    KV = Tensor | Sequence[tuple[Tensor, ...]]
    State = dict[tuple[int, str], Tensor]

__all__ = ["KVForm", "Layout", "RecordForms", "Snapshot", "StateForm", "window_start"]

Layout = Literal["NHD", "HND"]

_ALIGNED: Final = 16
"""Bytes at whose multiples the tensors of a state begin: those of every element type."""
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


def window_start(geometry: KVGeometry, layer: int, tokens: int) -> int:
    """See `KVStore.window_start`."""
    mine = [group for group in geometry.groups if layer in group.layers]
    if not mine:
        raise InvalidValue(f"layer is {layer!r}; the model has 0 … {geometry.layers - 1}")
    return min(tokens if group.shape is None else _start_of(group, tokens) for group in mine)


def _start_of(group: LayerGroup, tokens: int) -> int:
    """Return the first token that attention of a group needs to go on behind ``tokens``."""
    if group.span is None:
        return 0
    if group.kind == "chunk":
        return tokens - tokens % group.span
    return max(0, tokens - group.span + 1)


class _Part(NamedTuple):
    """One tensor that a layer keeps: K, V or the latent."""

    heads: int
    width: int
    latent: bool


class KVForm:
    """KV of a run of tokens of some layers: as tensors, and as the raw bytes of a record.

    ``kind`` is the number of this kind of record; None: blocks of all layers. Their KV is one
    tensor ``[layers, 2, …]``, to which raw bytes are equal, or the tensors of each layer.

    Attributes:
        layers: numbers of the layers, ascending.
        block_shape: the shape of the raw bytes, without the number of the kind, for codecs.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        layout: Layout,
        groups: Sequence[LayerGroup],
        kind: int | None = None,
    ) -> None:
        self.kind = kind
        self._noun = "kv" if kind is None else "the snapshot"
        self._group = groups[0]
        self._layout = layout
        self._dtype: torch.dtype = getattr(torch, geometry.dtype)
        parts: dict[int, tuple[_Part, ...]] = {}
        for group in groups:
            shape = group.shape
            assert shape is not None
            latent = shape.latent_dim is not None
            widths = [shape.head_dim] if latent else [shape.head_dim, shape.width - shape.head_dim]
            heads = shape.rank_heads(geometry.tp)
            parts |= dict.fromkeys(
                group.layers, tuple(_Part(heads, width, latent) for width in widths)
            )
        self.layers = tuple(sorted(parts))
        self._parts = {layer: parts[layer] for layer in self.layers}
        self._flat = [part for layer in self.layers for part in parts[layer]]
        self._token_bytes = sum(p.heads * p.width for p in self._flat) * DTYPES[geometry.dtype]
        self._first = self._flat[0]
        self._tokens_at = self._axis(self._first)
        self._one = kind is None and len({part.width for part in self._flat}) == 1
        self.block_shape = BlockShape(
            geometry.dtype, layout, tuple((part.heads, part.width) for part in self._flat)
        )

    def start_of(self, tokens: int) -> int:
        """Return the first token that is needed to go on behind ``tokens`` tokens."""
        return _start_of(self._group, tokens)

    def raw_bytes(self, tokens: int) -> int:
        """Return the raw bytes of a record of ``tokens`` tokens."""
        return tokens * self._token_bytes + (self.kind is not None)

    # --- tensors of callers ----------------------------------------------------------------------

    def check(self, kv: KV, tokens: int) -> None:
        """Raise `InvalidValue` if ``kv`` is not that of ``tokens`` tokens of all layers."""
        if isinstance(kv, torch.Tensor):
            self._check_tensor(kv, tokens)
            return
        given: object = kv
        if not isinstance(given, tuple | list):
            raise InvalidValue(
                f"kv is {type(kv).__name__}; it is a tensor, or a tuple or list of layers"
            )
        if len(kv) != len(self.layers):
            raise InvalidValue(f"kv has {len(kv)} layers; the model has {len(self.layers)}")
        for layer, wanted in self._parts.items():
            parts = self._of(kv, layer)
            if len(parts) != len(wanted) or not all(isinstance(p, torch.Tensor) for p in parts):
                want = "one tensor" if wanted[0].latent else "a pair (k, v) of tensors"
                got = f"{len(parts)} parts" if parts else type(kv[layer]).__name__
                raise InvalidValue(f"layer {layer} of kv is {got}; it is {want}")
            for part, tensor in zip(wanted, parts, strict=True):
                self._checked(layer, part, tensor, tokens)

    def check_room(self, out: KV, tokens: int) -> None:
        """Raise `InvalidValue` as `check`, or if elements of ``out`` share memory."""
        self.check(out, tokens)
        if isinstance(out, torch.Tensor):
            parts = [out]
        else:
            parts = [part for layer in self.layers for part in self._of(out, layer)]
        for part in parts:
            sizes = zip(part.shape, part.stride(), strict=True)
            if any(size > 1 and not stride for size, stride in sizes):
                raise InvalidValue(
                    f"out has the strides {part.stride()}, so several of its elements share "
                    "memory; give memory for each element, as torch.empty does"
                )

    def tokens_of(self, layers: Mapping[int, tuple[Tensor, ...]]) -> int:
        """Return how many tokens the layers have; check their shapes and element types.

        Raises:
            InvalidValue: a layer is missing, has another shape, or another number of tokens.
        """
        tokens: int | None = None
        for layer, wanted in self._parts.items():
            given = layers.get(layer)
            if not isinstance(given, tuple | list) or len(given) != len(wanted):
                what = "(latent,)" if wanted[0].latent else "(k, v)"
                got = f"{len(given)} tensors" if isinstance(given, tuple | list) else repr(given)
                raise InvalidValue(f"layer {layer} of the snapshot is {got}; {what} is needed")
            for part, tensor in zip(wanted, given, strict=True):
                tokens = self._checked(layer, part, tensor, tokens)
        assert tokens is not None
        return tokens

    def _checked(self, layer: int, part: _Part, given: object, tokens: int | None) -> int:
        """Return the tokens of ``given``; raise `InvalidValue` if these are not ``tokens``."""
        if not isinstance(given, torch.Tensor):
            raise InvalidValue(
                f"layer {layer} of {self._noun} holds {type(given).__name__}; tensors are needed"
            )
        axis = self._axis(part)
        if tokens is None:
            tokens = int(given.shape[axis]) if given.dim() >= -axis else 0
        shape = self._shape(part, tokens)
        if tuple(given.shape) not in (shape, (1, *shape)):
            raise InvalidValue(
                f"layer {layer} of {self._noun} has the shape {tuple(given.shape)}; {tokens} "
                f"tokens in layout {self._layout} have {shape}, with or without a leading batch "
                "of 1"
            )
        if given.dtype != self._dtype:
            raise InvalidValue(
                f"layer {layer} of {self._noun} is {given.dtype}; the geometry says {self._dtype}"
            )
        return tokens

    def _check_tensor(self, kv: Tensor, tokens: int) -> None:
        if not self._one:
            key, value = self._flat[:2]
            raise InvalidValue(
                f"keys have {key.width} elements and values {value.width}: give kv as "
                "((k, v), …), a pair for each layer"
            )
        shape = self._block_shape(tokens)
        if tuple(kv.shape) != shape:
            raise InvalidValue(
                f"kv has the shape {tuple(kv.shape)}; {tokens} tokens in layout {self._layout} "
                f"have {shape}"
            )
        if kv.dtype != self._dtype:
            raise InvalidValue(f"kv is {kv.dtype}; the geometry says {self._dtype}")

    @staticmethod
    def _of(kv: Layers, layer: int) -> Sequence[Tensor]:
        parts: object = kv[layer]
        if isinstance(parts, torch.Tensor):
            return (parts,)
        return tuple(parts) if isinstance(parts, tuple | list) else ()

    def _shape(self, part: _Part, tokens: int) -> tuple[int, ...]:
        if part.latent:
            return tokens, part.width
        if self._layout == "NHD":
            return tokens, part.heads, part.width
        return part.heads, tokens, part.width

    def _block_shape(self, tokens: int) -> tuple[int, ...]:
        """Return the shape of one tensor with the KV of all layers."""
        pair = () if self._first.latent else (2,)
        return len(self.layers), *pair, *self._shape(self._first, tokens)

    def _axis(self, part: _Part) -> int:
        """Return the axis of tokens, counted from the last."""
        return -3 if self._layout == "NHD" and not part.latent else -2

    # --- copies ----------------------------------------------------------------------------------

    def empty(self, tokens: int) -> dict[int, tuple[Tensor, ...]]:
        """Allocate tensors for this many tokens of every layer."""
        return {
            layer: tuple(self._new(self._shape(part, tokens)) for part in some)
            for layer, some in self._parts.items()
        }

    def empty_block(self, tokens: int, *, tuples: bool) -> KV:
        """Allocate KV for this many tokens: one tensor if it can be, or ``tuples`` by layer."""
        if self._one and not tuples:
            return self._new(self._block_shape(tokens))
        return list(self.empty(tokens).values())

    def _new(self, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape) * self._dtype.itemsize
        if size < _LARGE:
            return torch.empty(shape, dtype=self._dtype)
        # First touching new memory costs most of a copy; with huge pages it costs a third.
        return torch.frombuffer(aligned(size), dtype=self._dtype).view(shape)

    def cut(self, kv: KV, start: int, stop: int) -> KV:
        """Return a view of tokens ``start`` … ``stop - 1`` of ``kv``, which has all layers."""
        axis = self._tokens_at
        if isinstance(kv, torch.Tensor):
            return kv.narrow(axis, start, stop - start)
        return tuple(
            tuple(part.narrow(axis, start, stop - start) for part in self._of(kv, layer))
            for layer in self.layers
        )

    # Inference mode: autograd refuses copies from or into some tensors it tracks, and into tensors
    # that were made in inference mode.

    @torch.inference_mode()
    def write(self, kv: Tensor | Layers, start: int, stop: int, raw: memoryview) -> None:
        """Copy tokens ``start`` … ``stop - 1`` of ``kv`` into a record's raw bytes."""
        count = stop - start
        if isinstance(kv, torch.Tensor):
            theirs = kv.narrow(self._tokens_at, start, count)
            self._block(raw, count).copy_(theirs)
            return
        views = self._views(raw, count)
        for layer, some in self._parts.items():
            for part, tensor in zip(some, self._of(kv, layer), strict=True):
                theirs = tensor.narrow(self._axis(part), start, count)
                view = next(views)
                view.copy_(theirs.view(view.shape) if theirs.dim() > view.dim() else theirs)
        if self.kind is not None:
            raw[-1] = self.kind

    @torch.inference_mode()
    def read(
        self, raw: memoryview, tokens: int, skip: int, into: Tensor | Layers, start: int
    ) -> None:
        """Copy a record of ``tokens`` tokens, without the first ``skip``, to token ``start`` on."""
        count = tokens - skip
        if isinstance(into, torch.Tensor):
            axis = self._tokens_at
            into.narrow(axis, start, count).copy_(
                self._block(raw, tokens).narrow(axis, skip, count)
            )
            return
        views = self._views(raw, tokens)
        for layer, some in self._parts.items():
            for part, tensor in zip(some, self._of(into, layer), strict=True):
                axis = self._axis(part)
                tensor.narrow(axis, start, count).copy_(next(views).narrow(axis, skip, count))

    def view(self, raw: memoryview, tokens: int, *, skip: int = 0) -> KV:
        """Return the raw bytes of a block of ``tokens``, without the first ``skip``, as KV."""
        if self._one:
            return self._block(raw, tokens).narrow(self._tokens_at, skip, tokens - skip)
        views = self._views(raw, tokens)
        layers = [tuple(next(views) for _ in some) for some in self._parts.values()]
        return self.cut(layers, skip, tokens)

    def _block(self, raw: memoryview, tokens: int) -> Tensor:
        return torch.frombuffer(raw, dtype=self._dtype).view(self._block_shape(tokens))

    def _views(self, raw: memoryview, tokens: int) -> Iterator[Tensor]:
        flat = torch.frombuffer(raw if self.kind is None else raw[:-1], dtype=self._dtype)
        shapes = [self._shape(part, tokens) for part in self._flat]
        sizes = [math.prod(shape) for shape in shapes]
        return (
            part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)
        )


class StateForm:
    """Records of the states of all layers at one position.

    Attributes:
        kind: the number of this kind of record.
        raw_bytes: of a record.
    """

    block_shape = BlockShape()

    def __init__(self, geometry: KVGeometry, kind: int) -> None:
        self.kind = kind
        self._places: dict[tuple[int, str], tuple[int, tuple[int, ...], torch.dtype]] = {}
        at = 0
        for group in geometry.groups:
            for layer in group.layers if group.state else ():
                for tensor in group.state:
                    shape = tensor.rank_shape(geometry.tp)
                    dtype = getattr(torch, tensor.dtype)
                    self._places[layer, tensor.name] = at, shape, dtype
                    size = torch.Size(shape).numel() * DTYPES[tensor.dtype]
                    at += -(-size // _ALIGNED) * _ALIGNED
        self.raw_bytes = at + 1

    def check(self, state: Mapping[tuple[int, str], Tensor]) -> None:
        """Raise `InvalidValue` unless ``state`` has all tensors, in their shapes and types."""
        if set(state) != set(self._places):
            lacks, more = set(self._places) - set(state), set(state) - set(self._places)
            raise InvalidValue(
                f"the state of the snapshot lacks {sorted(lacks)} and has {sorted(more, key=repr)} "
                "beyond what the geometry says"
            )
        for (layer, name), (_, shape, dtype) in self._places.items():
            given: object = state[layer, name]
            if not isinstance(given, torch.Tensor) or (
                tuple(given.shape) not in (shape, (1, *shape)) or given.dtype != dtype
            ):
                got = type(given).__name__
                if isinstance(given, torch.Tensor):
                    got = f"{given.dtype} {tuple(given.shape)}"
                raise InvalidValue(
                    f"the state {name!r} of layer {layer} is {got}; the geometry says {dtype} "
                    f"{shape}, with or without a leading batch of 1"
                )

    @torch.inference_mode()
    def write(self, state: Mapping[tuple[int, str], Tensor], raw: memoryview) -> None:
        """Copy the tensors into a record's raw bytes."""
        for key, view in self._views(raw).items():
            view.copy_(state[key].view(view.shape))
        raw[-1] = self.kind

    def read(self, raw: memoryview) -> State:
        """Return copies of the tensors of a record, which the caller may change."""
        state = {key: torch.empty(shape, dtype=d) for key, (_, shape, d) in self._places.items()}
        self._fill(state, raw)
        return state

    @torch.inference_mode()  # its new tensors could not be changed later: they are made outside
    def _fill(self, state: State, raw: memoryview) -> None:
        for key, view in self._views(raw).items():
            state[key].copy_(view)

    def _views(self, raw: memoryview) -> State:
        flat = torch.frombuffer(raw[:-1], dtype=torch.uint8)
        views: State = {}
        for key, (at, shape, dtype) in self._places.items():
            size = torch.Size(shape).numel() * dtype.itemsize
            views[key] = flat[at : at + size].view(dtype).view(shape)
        return views


class RecordForms:
    """The kinds of records of one geometry: those of each group, or blocks of all layers.

    Attributes:
        base: of the layers that keep every token, or of all (`whole`); None if there are none.
        windows: one for each window or chunk of the geometry.
        states: None for attention alone.
        whole: whether all layers are in one block. Then any leading blocks of a prompt are of use.
        block_shape: of all kinds, for codecs.
    """

    def __init__(self, geometry: KVGeometry, layout: Layout, *, whole: bool = False) -> None:
        check_layout(layout)
        self.whole = whole
        self.windows: list[KVForm] = []
        self.states: StateForm | None = None
        if whole:
            self.base: KVForm | None = KVForm(geometry, layout, geometry.groups)
            self.block_shape = self.base.block_shape
            return
        attending = [group for group in geometry.groups if group.shape is not None]
        every = [group for group in attending if group.span is None]
        self.base = KVForm(geometry, layout, every, 0) if every else None
        kinds = [self.base.block_shape] if self.base is not None else []
        for group in attending:
            if group.span is not None:
                self.windows.append(KVForm(geometry, layout, [group], len(kinds)))
                kinds.append(self.windows[-1].block_shape)
        if any(group.state for group in geometry.groups):
            self.states = StateForm(geometry, len(kinds))
            kinds.append(self.states.block_shape)
        self.block_shape = BlockShape(kinds=tuple(kinds))

    @property
    def kv(self) -> list[KVForm]:
        """All but the states."""
        return [*([] if self.base is None else [self.base]), *self.windows]


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What a model keeps of the first ``tokens`` tokens of a prompt, to go on behind them.

    Every layer with attention is in ``layers``, and every layer with a state in ``state``; a layer
    may be in both. Tensors of KV have the store's layout, as in `KVStore.put`.

    Attributes:
        tokens: the position at which a model goes on.
        start: the first token of layers that keep every token.
        layers: for each number of a layer, (k, v), or the latent alone. A layer that keeps every
            token has tokens ``start`` … ``tokens - 1``. A layer with a window or chunks has the
            last ones before ``tokens``, at least those from `KVStore.window_start` on; layers of
            one group have equally many.
        state: for each (layer, name) of `kvkeep.core.geometry.StateTensor`, the tensor exactly as
            it is after ``tokens`` tokens.
        exact: how many leading tokens have exact KV: from there on it was decoded by a lossy codec,
            or computed behind such KV. None: all of it is exact.
    """

    tokens: int
    start: int
    layers: Mapping[int, tuple[Tensor, ...]] = field(default_factory=dict)
    state: Mapping[tuple[int, str], Tensor] = field(default_factory=dict)
    exact: int | None = None
