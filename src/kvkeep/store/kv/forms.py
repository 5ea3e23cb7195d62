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
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from kvkeep.core.geometry import KVGeometry, LayerGroup

    KV = Tensor | Sequence[tuple[Tensor, ...]]
    Parts = list[tuple["_Part", Tensor]]
    State = dict[tuple[int, str], Tensor]

__all__ = [
    "BASE",
    "STATE",
    "KVForm",
    "Layout",
    "RecordForms",
    "Snapshot",
    "StateForm",
    "tokens_of",
    "window_start",
]

Layout = Literal["NHD", "HND"]

BASE: Final = -1
STATE: Final = -2
"""Groups of records that are no window's; windows count from 0."""

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
    """One tensor: K, V or the latent of a layer, or the KV of all layers.

    Attributes:
        heads, width: of each token in it, of one layer.
        shape: with -1 in place of the number of tokens.
        axis: of tokens, counted from the last.
    """

    heads: int
    width: int
    shape: tuple[int, ...]
    axis: int

    @property
    def latent(self) -> bool:
        """Whether it is the latent of a layer."""
        return len(self.shape) == 2

    def of(self, tokens: int) -> tuple[int, ...]:
        """Return the shape with so many tokens."""
        at = len(self.shape) + self.axis
        return *self.shape[:at], tokens, *self.shape[at + 1 :]


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
            heads, latent = shape.rank_heads(geometry.tp), shape.latent_dim is not None
            widths = [shape.head_dim] if latent else [shape.head_dim, shape.width - shape.head_dim]
            layer = tuple(_part(heads, width, layout, latent=latent) for width in widths)
            parts |= dict.fromkeys(group.layers, layer)
        self.layers = tuple(sorted(parts))
        self._parts = {layer: parts[layer] for layer in self.layers}
        flat = [part for layer in self.layers for part in parts[layer]]
        self._token_bytes = sum(p.heads * p.width for p in flat) * DTYPES[geometry.dtype]
        self._pair = flat[0].width, flat[-1].width
        self._tokens_at = flat[0].axis
        self._whole: _Part | None = None  # the KV of all layers, if one tensor can be that
        if kind is None and len({part.width for part in flat}) == 1:
            shapes = len(self.layers), *([] if flat[0].latent else [2]), *flat[0].shape
            self._whole = flat[0]._replace(shape=shapes)
        self.block_shape = BlockShape(
            geometry.dtype, layout, tuple((part.heads, part.width) for part in flat)
        )

    def start_of(self, tokens: int) -> int:
        """Return the first token that is needed to go on behind ``tokens`` tokens."""
        return _start_of(self._group, tokens)

    def raw_bytes(self, tokens: int) -> int:
        """Return the raw bytes of a record of ``tokens`` tokens."""
        return tokens * self._token_bytes + (self.kind is not None)

    # --- tensors of callers ----------------------------------------------------------------------

    def tensors(self, kv: KV, tokens: int) -> Parts:
        """Return the tensors of ``kv`` in the order of raw bytes.

        Raises:
            InvalidValue: ``kv`` is not that of ``tokens`` tokens of all layers.
        """
        if isinstance(kv, torch.Tensor):
            return [self._checked_whole(kv, tokens)]
        given: object = kv
        if not isinstance(given, tuple | list):
            raise InvalidValue(
                f"kv is {type(kv).__name__}; it is a tensor, or a tuple or list of layers"
            )
        if len(kv) != len(self.layers):
            raise InvalidValue(f"kv has {len(kv)} layers; the model has {len(self.layers)}")
        return self.tensors_of(dict(enumerate(kv)), tokens)

    def room(self, out: KV, tokens: int) -> Parts:
        """Return the tensors of ``out`` to write to; raise `InvalidValue` as `tensors` does.

        Also if elements of ``out`` share memory.
        """
        parts = self.tensors(out, tokens)
        for _, tensor in parts:
            sizes = zip(tensor.shape, tensor.stride(), strict=True)
            if any(size > 1 and not stride for size, stride in sizes):
                raise InvalidValue(
                    f"out has the strides {tensor.stride()}, so several of its elements share "
                    "memory; give memory for each element, as torch.empty does"
                )
        return parts

    def tensors_of(
        self, layers: Mapping[int, Tensor | tuple[Tensor, ...]], tokens: int | None = None
    ) -> Parts:
        """Return the tensors of ``layers`` in the order of raw bytes, without a batch of 1.

        Raises:
            InvalidValue: a layer is missing, has another shape, or not ``tokens`` tokens; without
                ``tokens``, not as many as the first.
        """
        flat: Parts = []
        for layer, wanted in self._parts.items():
            parts = _tensors_of(layers.get(layer))
            if len(parts) != len(wanted) or not all(isinstance(p, torch.Tensor) for p in parts):
                want = "one tensor" if wanted[0].latent else "a pair (k, v) of tensors"
                got = f"{len(parts)} parts" if parts else type(layers.get(layer)).__name__
                raise InvalidValue(f"layer {layer} of {self._noun} is {got}; it is {want}")
            for part, tensor in zip(wanted, parts, strict=True):
                if tokens is None:
                    tokens = tensor.shape[part.axis] if tensor.dim() >= -part.axis else 0
                flat.append((part, self._checked(layer, part, tensor, tokens)))
        return flat

    def _checked(self, layer: int, part: _Part, given: Tensor, tokens: int) -> Tensor:
        """Return a tensor without the batch of 1; raise `InvalidValue` if it does not fit."""
        shape = part.of(tokens)
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
        return given if given.dim() == len(shape) else given[0]

    def _checked_whole(self, kv: Tensor, tokens: int) -> tuple[_Part, Tensor]:
        if self._whole is None:
            keys, values = self._pair
            raise InvalidValue(
                f"keys have {keys} elements and values {values}: give kv as "
                "((k, v), …), a pair for each layer"
            )
        shape = self._whole.of(tokens)
        if tuple(kv.shape) != shape:
            raise InvalidValue(
                f"kv has the shape {tuple(kv.shape)}; {tokens} tokens in layout {self._layout} "
                f"have {shape}"
            )
        if kv.dtype != self._dtype:
            raise InvalidValue(f"kv is {kv.dtype}; the geometry says {self._dtype}")
        return self._whole, kv

    def cut(self, kv: KV, tokens: int) -> KV:
        """Return a view of the first ``tokens`` tokens of ``kv``, which has all layers."""
        axis = self._tokens_at
        if isinstance(kv, torch.Tensor):
            return kv.narrow(axis, 0, tokens)
        return tuple(
            tuple(part.narrow(axis, 0, tokens) for part in _tensors_of(layer)) for layer in kv
        )

    # --- copies ----------------------------------------------------------------------------------

    def empty(self, tokens: int) -> dict[int, tuple[Tensor, ...]]:
        """Allocate tensors for this many tokens of every layer."""
        return {
            layer: tuple(self._new(part.of(tokens)) for part in parts)
            for layer, parts in self._parts.items()
        }

    def empty_block(self, tokens: int, *, tuples: bool) -> KV:
        """Allocate KV for this many tokens: one tensor if it can be, or ``tuples`` by layer."""
        if self._whole is not None and not tuples:
            return self._new(self._whole.of(tokens))
        return list(self.empty(tokens).values())

    def _new(self, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape) * self._dtype.itemsize
        if size < _LARGE:
            return torch.empty(shape, dtype=self._dtype)
        # First touching new memory costs most of a copy; with huge pages it costs a third.
        return torch.frombuffer(aligned(size), dtype=self._dtype).view(shape)

    def write(self, tensors: Parts, start: int, stop: int, raw: memoryview) -> None:
        """Copy tokens ``start`` … ``stop - 1`` of ``tensors`` into a record's raw bytes."""
        count = stop - start
        if len(tensors) == 1 and self.kind is None:
            ((part, tensor),) = tensors
            view = torch.frombuffer(raw, dtype=self._dtype).view(part.shape)
            _copy(view, tensor.narrow(part.axis, start, count))
            return
        views = self._views(raw, count, [part for part, _ in tensors])
        _copy_all(views, [tensor.narrow(part.axis, start, count) for part, tensor in tensors])
        if self.kind is not None:
            raw[-1] = self.kind

    def read(self, raw: memoryview, tokens: int, skip: int, into: Parts, start: int) -> None:
        """Copy a record of ``tokens`` tokens, without the first ``skip``, to token ``start`` on."""
        count = tokens - skip
        if len(into) == 1 and self.kind is None:
            ((part, tensor),) = into
            view = torch.frombuffer(raw, dtype=self._dtype).view(part.shape)
            _copy(
                tensor.narrow(part.axis, start, count),
                view.narrow(part.axis, skip, count) if skip else view,
            )
            return
        views = self._views(raw, tokens, [part for part, _ in into])
        _copy_all(
            [tensor.narrow(part.axis, start, count) for part, tensor in into],
            [v.narrow(part.axis, skip, count) for v, (part, _) in zip(views, into, strict=True)],
        )

    def view(self, raw: memoryview, tokens: int, skip: int) -> KV:
        """Return the raw bytes of a block of ``tokens``, without the first ``skip``, as KV."""
        if self._whole is not None:
            whole = torch.frombuffer(raw, dtype=self._dtype).view(self._whole.shape)
            return whole.narrow(self._tokens_at, skip, tokens - skip)
        flat = [part for parts in self._parts.values() for part in parts]
        views = iter(self._views(raw, tokens, flat))
        return tuple(
            tuple(next(views).narrow(part.axis, skip, tokens - skip) for part in parts)
            for parts in self._parts.values()
        )

    def _views(self, raw: memoryview, tokens: int, parts: Sequence[_Part]) -> list[Tensor]:
        """Return the raw bytes of a record as the tensors ``parts``."""
        flat = torch.frombuffer(raw if self.kind is None else raw[:-1], dtype=self._dtype)
        sizes = [tokens * part.heads * part.width for part in parts]
        pieces = torch.split(flat, sizes)
        return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _part(heads: int, width: int, layout: Layout, *, latent: bool) -> _Part:
    """Return the tensor of one layer."""
    if latent:
        return _Part(heads, width, (-1, width), -2)
    if layout == "NHD":
        return _Part(heads, width, (-1, heads, width), -3)
    return _Part(heads, width, (heads, -1, width), -2)


def _tensors_of(layer: object) -> tuple[Tensor, ...]:
    """Return the tensors of one layer as a caller gives it; empty if it is none of the forms."""
    if isinstance(layer, torch.Tensor):
        return (layer,)
    return tuple(layer) if isinstance(layer, tuple | list) else ()


def tokens_of(tensors: Parts) -> int:
    """Return how many tokens ``tensors`` have."""
    part, tensor = tensors[0]
    return int(tensor.shape[part.axis])


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

    def write(self, state: Mapping[tuple[int, str], Tensor], raw: memoryview) -> None:
        """Copy the tensors into a record's raw bytes."""
        views = self._views(raw)
        _copy_all([*views.values()], [state[key].view(view.shape) for key, view in views.items()])
        raw[-1] = self.kind

    def read(self, raw: memoryview) -> State:
        """Return copies of the tensors of a record, which the caller may change."""
        state = {key: torch.empty(shape, dtype=d) for key, (_, shape, d) in self._places.items()}
        _copy_all([*state.values()], [*self._views(raw).values()])
        return state

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
        kv: all but the states, by group: `BASE`, or the number of a window.
        whole: whether all layers are in one block. Then any leading blocks of a prompt are of use.
        block_shape: of all kinds, for codecs.
    """

    def __init__(self, geometry: KVGeometry, layout: Layout, *, whole: bool = False) -> None:
        check_layout(layout)
        self.whole = whole
        self.base: KVForm | None = None
        self.windows: list[KVForm] = []
        self.states: StateForm | None = None
        if whole:
            self.base = KVForm(geometry, layout, geometry.groups)
            self.kv: dict[int, KVForm] = {BASE: self.base}
            self.block_shape = self.base.block_shape
            return
        attending = [group for group in geometry.groups if group.shape is not None]
        if every := [group for group in attending if group.span is None]:
            self.base = KVForm(geometry, layout, every, 0)
        kinds = [self.base.block_shape] if self.base is not None else []
        for group in attending:
            if group.span is not None:
                self.windows.append(KVForm(geometry, layout, [group], len(kinds)))
                kinds.append(self.windows[-1].block_shape)
        if any(group.state for group in geometry.groups):
            self.states = StateForm(geometry, len(kinds))
            kinds.append(self.states.block_shape)
        self.kv = {BASE: self.base} if self.base is not None else {}
        self.kv |= enumerate(self.windows)
        self.block_shape = BlockShape(kinds=tuple(kinds))


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


@torch.inference_mode()
def _copy(target: Tensor, source: Tensor) -> None:
    """Copy ``source``; both are cut before, outside of inference mode.

    In inference mode, because autograd refuses copies from or into some tensors it tracks, and into
    tensors that were made in inference mode.
    """
    target.copy_(source)


@torch.inference_mode()
def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
