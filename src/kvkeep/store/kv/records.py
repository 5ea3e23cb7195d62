"""Records of snapshots: which layers share a record, and how their tensors become its raw bytes.

    base      a block of tokens of all layers that keep every token, latent or not
    window    a block of tokens of the layers of one window or chunk
    state     the states of all layers at one position

Raw bytes are the parts one after another, as in `kvkeep.store.kv.forms`, layer by layer; states
begin at multiples of 16 bytes. The last byte is the number of the kind (`BlockShape.kinds`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import DTYPES
from kvkeep.store.codecs import BlockShape
from kvkeep.store.kv.forms import check_layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from kvkeep.core.geometry import KVGeometry, LayerGroup
    from kvkeep.store.kv.forms import Layout

    Layers = dict[int, tuple[Tensor, ...]]
    State = dict[tuple[int, str], Tensor]

__all__ = ["KVRecords", "RecordForms", "Snapshot", "StateRecords", "window_start"]

_ALIGNED: Final = 16
"""Bytes at whose multiples the tensors of a state begin: those of every element type."""


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


class KVRecords:
    """Records of a run of tokens of some layers with attention.

    Attributes:
        kind: the number of this kind of record.
        layers: numbers of the layers, ascending.
    """

    def __init__(
        self, geometry: KVGeometry, layout: Layout, kind: int, groups: Sequence[LayerGroup]
    ) -> None:
        self.kind = kind
        self._group = groups[0]
        self._layout = layout
        self._dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._name = geometry.dtype
        parts: dict[int, tuple[_Part, ...]] = {}
        for group in groups:
            shape = group.shape
            assert shape is not None
            heads = shape.rank_heads(geometry.tp)
            latent = shape.latent_dim is not None
            widths = [shape.head_dim] if latent else [shape.head_dim, shape.width - shape.head_dim]
            for layer in group.layers:
                parts[layer] = tuple(_Part(heads, width, latent) for width in widths)
        self.layers = tuple(sorted(parts))
        self._parts = {layer: parts[layer] for layer in self.layers}
        self._flat = [part for layer in self.layers for part in parts[layer]]
        self._token_bytes = sum(p.heads * p.width for p in self._flat) * DTYPES[geometry.dtype]

    @property
    def block_shape(self) -> BlockShape:
        """The shape of the raw bytes without their last one, for codecs."""
        parts = tuple((part.heads, part.width) for part in self._flat)
        return BlockShape(self._name, self._layout, parts)

    def start_of(self, tokens: int) -> int:
        """Return the first token that is needed to go on behind ``tokens`` tokens."""
        return _start_of(self._group, tokens)

    def raw_bytes(self, tokens: int) -> int:
        """Return the raw bytes of a record of ``tokens`` tokens."""
        return tokens * self._token_bytes + 1

    def tokens_of(self, layers: Mapping[int, tuple[Tensor, ...]]) -> int:
        """Return how many tokens the layers have; check their shapes and element types.

        Raises:
            InvalidValue: a layer is missing, has another shape, or another number of tokens.
        """
        tokens: int | None = None
        for layer in self.layers:
            given = layers.get(layer)
            wanted = self._parts[layer]
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
                f"layer {layer} of the snapshot holds {type(given).__name__}; tensors are needed"
            )
        axis = self._axis(part)
        if tokens is None:
            tokens = int(given.shape[axis]) if given.dim() >= -axis else 0
        shape = self._shape(part, tokens)
        if tuple(given.shape) not in (shape, (1, *shape)):
            raise InvalidValue(
                f"layer {layer} of the snapshot has the shape {tuple(given.shape)}; {tokens} "
                f"tokens in layout {self._layout} have {shape}, with or without a leading batch "
                "of 1"
            )
        if given.dtype != self._dtype:
            raise InvalidValue(
                f"layer {layer} of the snapshot is {given.dtype}; the geometry says {self._dtype}"
            )
        return tokens

    def _shape(self, part: _Part, tokens: int) -> tuple[int, ...]:
        if part.latent:
            return tokens, part.width
        if self._layout == "NHD":
            return tokens, part.heads, part.width
        return part.heads, tokens, part.width

    def _axis(self, part: _Part) -> int:
        return -3 if self._layout == "NHD" and not part.latent else -2

    def empty(self, tokens: int) -> Layers:
        """Allocate tensors for this many tokens of every layer."""
        return {
            layer: tuple(torch.empty(self._shape(part, tokens), dtype=self._dtype) for part in some)
            for layer, some in self._parts.items()
        }

    # Inference mode: see `kvkeep.store.kv.forms`.

    @torch.inference_mode()
    def write(
        self, layers: Mapping[int, tuple[Tensor, ...]], start: int, stop: int, raw: memoryview
    ) -> None:
        """Copy tokens ``start`` … ``stop - 1`` of the tensors into a record's raw bytes."""
        mine = self._views(raw, stop - start)
        for layer, some in self._parts.items():
            for part, tensor in zip(some, layers[layer], strict=True):
                theirs = tensor.narrow(self._axis(part), start, stop - start)
                view = next(mine)
                view.copy_(theirs.view(view.shape) if theirs.dim() > view.dim() else theirs)
        raw[-1] = self.kind

    @torch.inference_mode()
    def read(self, raw: memoryview, tokens: int, skip: int, into: Layers, start: int) -> None:
        """Copy a record of ``tokens`` tokens, without the first ``skip``, to token ``start`` on."""
        mine, count = self._views(raw, tokens), tokens - skip
        for layer, some in self._parts.items():
            for part, tensor in zip(some, into[layer], strict=True):
                axis = self._axis(part)
                tensor.narrow(axis, start, count).copy_(next(mine).narrow(axis, skip, count))

    def _views(self, raw: memoryview, tokens: int) -> Iterator[Tensor]:
        flat = torch.frombuffer(raw[:-1], dtype=self._dtype)
        shapes = [self._shape(part, tokens) for part in self._flat]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        return (
            part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)
        )


class StateRecords:
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
    """The kinds of records of one geometry.

    Attributes:
        base: of the layers that keep every token; None if there are none.
        windows: one for each window or chunk of the geometry.
        states: None for attention alone.
        grid: a state is resumed exactly at multiples of this many tokens.
    """

    def __init__(self, geometry: KVGeometry, layout: Layout) -> None:
        check_layout(layout)
        attending = [group for group in geometry.groups if group.shape is not None]
        whole = [group for group in attending if group.span is None]
        self.base = KVRecords(geometry, layout, 0, whole) if whole else None
        self.windows: list[KVRecords] = []
        kinds = [self.base.block_shape] if self.base is not None else []
        for group in attending:
            if group.span is not None:
                self.windows.append(KVRecords(geometry, layout, len(kinds), [group]))
                kinds.append(self.windows[-1].block_shape)
        stateful = any(group.state for group in geometry.groups)
        self.states = StateRecords(geometry, len(kinds)) if stateful else None
        if self.states is not None:
            kinds.append(self.states.block_shape)
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
