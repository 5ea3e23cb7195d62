"""What the layers of a model keep for a sequence: groups of layers that keep the same.

    AttentionShape   K and V, or a latent, of one token in one layer
    StateTensor      one tensor of a state, whose size does not depend on the number of tokens
    LayerGroup       the layers that keep one of these, and how much of it

All bytes are of one tensor-parallel rank. Everything is immutable, hashable and equal by value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, SupportsIndex, get_args

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.geometry.units import DTYPES, normalise_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["AttentionShape", "GroupKind", "LayerGroup", "StateTensor", "merged"]

GroupKind = Literal["full", "latent", "window", "chunk", "state"]

_NAMES: Final[dict[str, str]] = {
    "full": "full attention",
    "latent": "latent attention",
    "window": "a window of {span} tokens",
    "chunk": "chunks of {span} tokens",
}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """K and V of one token in one layer, or the latent that stands for both.

    Attributes:
        kv_heads: key-value heads of the whole model; 1 for a latent.
        head_dim: elements of one key; of a latent, the whole stored vector.
        value_dim: elements of one value; as many as the key's unless given, and the latent's part
            of a latent.
        latent_dim: the latent's part of the stored vector; None unless the attention is latent.

    Raises:
        InvalidValue: a number is not a whole one above zero, or the latent does not fit.
    """

    kv_heads: int
    head_dim: int
    value_dim: int | None = None
    latent_dim: int | None = None

    def __post_init__(self) -> None:
        latent = self.latent_dim
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim if latent is None else latent)
        numbers = ("kv_heads", "head_dim", *(() if latent is None else ("latent_dim",)))
        for name in (*numbers, "value_dim"):
            value = whole(name, getattr(self, name), 1)
            object.__setattr__(self, name, value)  # the dataclass is frozen
        if latent is None:
            return
        if self.kv_heads != 1:
            raise InvalidValue(
                f"kv_heads is {self.kv_heads} with a latent; latent attention stores one vector "
                "a token and layer, so it must be 1"
            )
        if latent > self.head_dim:
            raise InvalidValue(
                f"latent_dim is {latent} and head_dim {self.head_dim}; the stored vector begins "
                "with the latent and cannot be shorter"
            )
        if self.value_dim != latent:
            raise InvalidValue(
                f"value_dim is {self.value_dim} with a latent of {latent}; the latent serves as "
                "the value, so leave value_dim out"
            )

    @property
    def width(self) -> int:
        """Elements that one head stores for a token: K and V, or the latent's whole vector."""
        if self.latent_dim is not None or self.value_dim is None:
            return self.head_dim
        return self.head_dim + self.value_dim

    def rank_heads(self, tp: int) -> int:
        """Return the heads of one of ``tp`` ranks; at least one, which others may hold too."""
        return max(1, self.kv_heads // tp)

    def bytes_per_token(self, dtype: str, tp: int = 1) -> int:
        """Return the bytes of a token in one layer of one of ``tp`` ranks."""
        return self.rank_heads(tp) * self.width * DTYPES[dtype]

    def check_ranks(self, tp: int) -> None:
        """Raise `InvalidValue` if ``tp`` neither divides the heads nor is a multiple of them."""
        heads = self.kv_heads
        if heads % tp and tp % heads:
            raise InvalidValue(
                f"tp is {tp} and the model has {heads} KV heads; tp must divide the heads, or "
                "be a multiple of them (each rank then holds one)"
            )


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of the state that a layer keeps for a sequence, without the batch dimension.

    Attributes:
        name: "conv" for the inputs that a convolution needs again, "recurrent" for the rest.
        shape: its dimensions in the whole model.
        dtype: element type, a key of `DTYPES`.
        split: the axis that tensor-parallel ranks divide; None if each rank holds the whole.
        parts: sizes of the parts that this axis concatenates and ranks divide separately, such as
            x, B and C of Mamba-2; by default one part.
        units: for each part, how many heads or groups it has. A rank holds whole ones; with more
            ranks than heads, one that others hold too. By default every element is one.
        follows: whether the element type is the model's, and changes with it.

    Raises:
        InvalidValue: a number is not a whole one above zero, or they do not fit together.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    split: int | None = None
    parts: tuple[int, ...] = ()
    units: tuple[int, ...] = ()
    follows: bool = False

    def __post_init__(self) -> None:
        for size in self.shape:
            whole(f"a dimension of {self.name}", size, 1)
        object.__setattr__(self, "dtype", normalise_dtype(self.dtype))  # the dataclass is frozen
        if self.split is None:
            return
        if not 0 <= self.split < len(self.shape):
            raise InvalidValue(f"split is {self.split}; {self.name} has {len(self.shape)} axes")
        parts = self.parts or (self.shape[self.split],)
        units = self.units or parts
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "units", units)
        if sum(parts) != self.shape[self.split] or len(parts) != len(units):
            raise InvalidValue(
                f"parts of {self.name} are {parts} with units {units}; they must add up to "
                f"{self.shape[self.split]}, one number of units for each"
            )
        if any(
            whole("units", unit, 1) and part % unit for part, unit in zip(parts, units, strict=True)
        ):
            raise InvalidValue(f"units of {self.name} are {units}; each must divide {parts}")

    def rank_shape(self, tp: int) -> tuple[int, ...]:
        """Return the shape that one of ``tp`` ranks holds.

        Raises:
            InvalidValue: ``tp`` neither divides the heads or groups nor is a multiple of them.
        """
        if self.split is None:
            return self.shape
        held = 0
        for part, units in zip(self.parts, self.units, strict=True):
            if units % tp and tp % units:
                raise InvalidValue(
                    f"tp is {tp} and the {self.name} state has {units} heads or groups; tp must "
                    "divide them, or be a multiple of them (each rank then holds one)"
                )
            held += part // units * max(1, units // tp)
        return (*self.shape[: self.split], held, *self.shape[self.split + 1 :])

    def bytes_per_layer(self, tp: int = 1) -> int:
        """Return the bytes that one of ``tp`` ranks holds in one layer."""
        return math.prod(self.rank_shape(tp)) * DTYPES[self.dtype]

    def with_dtype(self, dtype: str) -> StateTensor:
        """Return the tensor in a model of ``dtype``.

        A cache of one byte an element leaves states as they are: models compute them in their own
        type.
        """
        return replace(self, dtype=dtype) if self.follows and DTYPES[dtype] > 1 else self


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers of a model that keep the same for a sequence.

    Attributes:
        kind: "full", "latent", "window", "chunk" (attention), or "state".
        layers: numbers of the layers, ascending from 0.
        shape: what attention stores of a token; None for a state.
        span: tokens of the window, the token itself included, or of the chunk; else None.
        state: the tensors of a state; empty for attention.
        grid: a state is resumed exactly at multiples of this many tokens: the chunk of the kernel
            that computes prompts. 1 for attention.

    Raises:
        InvalidValue: the kind and the other attributes do not fit together.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    shape: AttentionShape | None = None
    span: int | None = None
    state: tuple[StateTensor, ...] = ()
    grid: int = 1

    def __post_init__(self) -> None:
        if self.kind not in get_args(GroupKind):
            raise InvalidValue(f"kind is {self.kind!r}; known are {', '.join(get_args(GroupKind))}")
        numbers = [whole("a layer", layer, 0) for layer in self.layers]
        if not numbers or numbers != sorted(set(numbers)):
            raise InvalidValue(f"layers are {self.layers}; ascending numbers of layers are needed")
        whole("grid", self.grid, 1)
        if self.span is not None:
            whole("span", self.span, 1)
        latent = self.shape is not None and self.shape.latent_dim is not None
        stored = (self.shape is None, bool(self.state), latent)
        fits = stored == (self.kind == "state", self.kind == "state", self.kind == "latent")
        if self.kind != "latent":  # which may have a window
            fits = fits and (self.span is not None) == (self.kind in ("window", "chunk"))
        if not fits:
            raise InvalidValue(
                f"a group of kind {self.kind!r} has shape={self.shape}, span={self.span}, "
                f"state={self.state}; attention needs a shape (latent: with latent_dim), a window "
                "or chunk a span, a state its tensors, and nothing else"
            )

    @property
    def name(self) -> str:
        """What the layers keep, in words, such as "a window of 1024 tokens"."""
        if self.kind == "state":
            convolution = all(tensor.name == "conv" for tensor in self.state)
            return "a convolution's state" if convolution else "a recurrent state"
        return _NAMES[self.kind].format(span=self.span)

    def bytes_per_token(self, dtype: str, tp: int = 1) -> int:
        """Return the bytes that a token in the window or chunk takes in all layers; 0 for a state.

        ``dtype`` is the element type of K and V.
        """
        return 0 if self.shape is None else len(self.layers) * self.shape.bytes_per_token(dtype, tp)

    def bytes_per_state(self, tp: int = 1) -> int:
        """Return the bytes of the state of one sequence in all layers; 0 for attention."""
        return len(self.layers) * sum(tensor.bytes_per_layer(tp) for tensor in self.state)

    def kept(self, tokens: int, page_size: int = 1) -> int:
        """Return how many tokens of a sequence of ``tokens`` take room, in whole pages.

        Of a window, the most pages that it touches while the sequence grows to this length.
        """
        if self.shape is None:
            return 0
        pages = -(-tokens // page_size)
        if self.span is not None:
            aligned = self.kind == "chunk" and self.span % page_size == 0
            most = self.span // page_size if aligned else -(-(self.span - 1) // page_size) + 1
            pages = min(pages, most)
        return pages * page_size

    def bytes_for(
        self, tokens: SupportsIndex, dtype: str, tp: int = 1, *, page_size: SupportsIndex = 1
    ) -> int:
        """Return the bytes of one sequence of ``tokens`` in all layers.

        A window keeps its span, a chunk at most its span, and a state is one, whatever the length.
        """
        kept = self.kept(whole("tokens", tokens, 0), whole("page_size", page_size, 1))
        return kept * self.bytes_per_token(dtype, tp) + self.bytes_per_state(tp)

    def check_ranks(self, tp: int) -> None:
        """Raise `InvalidValue` if ``tp`` ranks cannot share what the layers keep."""
        if self.shape is not None:
            self.shape.check_ranks(tp)
        for tensor in self.state:
            tensor.rank_shape(tp)

    def with_dtype(self, dtype: str) -> LayerGroup:
        """Return the group in a model of ``dtype``."""
        return replace(self, state=tuple(tensor.with_dtype(dtype) for tensor in self.state))


def merged(groups: Iterable[LayerGroup]) -> tuple[LayerGroup, ...]:
    """Return groups that differ in more than their layers, in order of first appearance."""
    alike: dict[tuple[object, ...], list[LayerGroup]] = {}
    for one in groups:
        alike.setdefault((one.kind, one.shape, one.span, one.state, one.grid), []).append(one)
    return tuple(
        replace(found[0], layers=tuple(sorted(layer for one in found for layer in one.layers)))
        for found in alike.values()
    )
