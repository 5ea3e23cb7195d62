"""What the layers of a model keep of a sequence, its bytes, and how much of it a budget holds.

    AttentionShape   K and V, or a latent, of one token in one layer
    StateTensor      one tensor of a state, whose size does not depend on the number of tokens
    LayerGroup       the layers that keep one of these, and how much of it
    KVGeometry       all groups of a model, as one tensor-parallel rank holds them

Everything is immutable, hashable and equal by value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, SupportsIndex, get_args

from kvkeep.core.errors import InvalidValue, UnsupportedModel, whole
from kvkeep.core.geometry.units import DTYPES, format_bytes, normalise_dtype, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["AttentionShape", "ConfigSource", "GroupKind", "KVGeometry", "LayerGroup", "StateTensor"]

GroupKind = Literal["full", "latent", "window", "chunk", "state"]

_NAMES: Final[dict[str, str]] = {
    "full": "full attention",
    "latent": "latent attention",
    "window": "a window of {span} tokens",
    "chunk": "chunks of {span} tokens",
    "state": "a recurrent state",
}


def _of_rank(count: int, tp: int, owner: str, heads: str) -> int:
    """Return how many of ``count`` heads one of ``tp`` ranks holds: at least one."""
    if count % tp and tp % count:
        raise InvalidValue(
            f"tp is {tp} and {owner} has {count} {heads}; tp must divide them, or be a multiple "
            "of them (each rank then holds one)"
        )
    return max(1, count // tp)


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
        for name in ("kv_heads", "head_dim", "latent_dim", "value_dim"):
            if name != "latent_dim" or latent is not None:
                value = whole(name, getattr(self, name), 1)
                object.__setattr__(self, name, value)  # the dataclass is frozen
        fits = self.kv_heads == 1 and self.value_dim == latent
        if latent is not None and not (fits and latent <= self.head_dim):
            raise InvalidValue(
                f"kv_heads is {self.kv_heads}, head_dim {self.head_dim} and value_dim "
                f"{self.value_dim} with a latent_dim of {latent}; one vector is stored for all "
                "heads, so kv_heads: it must be 1; it begins with the latent and cannot be "
                "shorter; and the latent serves as the value, so leave value_dim out"
            )

    @property
    def width(self) -> int:
        """Elements that one head stores for a token: K and V, or the latent's whole vector."""
        if self.latent_dim is not None or self.value_dim is None:
            return self.head_dim
        return self.head_dim + self.value_dim

    def rank_heads(self, tp: int) -> int:
        """Return the heads of one of ``tp`` ranks; at least one, which others may hold too.

        Raises:
            InvalidValue: ``tp`` neither divides the heads nor is a multiple of them.
        """
        return _of_rank(self.kv_heads, tp, "the model", "KV heads")

    def bytes_per_token(self, dtype: str, tp: int = 1) -> int:
        """Return the bytes of a token in one layer of one of ``tp`` ranks."""
        return self.rank_heads(tp) * self.width * DTYPES[dtype]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of the state that a layer keeps for a sequence, without the batch dimension.

    Attributes:
        name: "conv" for the inputs that a convolution needs again, "recurrent" for the rest.
        shape: its dimensions in the whole model.
        dtype: element type, a key of `DTYPES`.
        parts: heads or groups, and the size of each, of the parts that the first axis concatenates
            and tensor-parallel ranks divide, such as x, B and C of Mamba-2. A rank holds whole
            heads; with more ranks than heads, one that others hold too. Empty: each rank holds
            the whole tensor.
        follows: whether the element type is the model's, and changes with it.

    Raises:
        InvalidValue: a number is not a whole one above zero, or they do not fit together.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[tuple[int, int], ...] = ()
    follows: bool = False

    def __post_init__(self) -> None:
        for size in self.shape:
            whole(f"a dimension of {self.name}", size, 1)
        object.__setattr__(self, "dtype", normalise_dtype(self.dtype))  # the dataclass is frozen
        sizes = [whole("heads", heads, 1) * whole("size", size, 1) for heads, size in self.parts]
        if sizes and [sum(sizes)] != [*self.shape[:1]]:
            raise InvalidValue(
                f"parts of {self.name} are {self.parts}; they must add up to its first dimension, "
                f"of {self.shape}"
            )

    def rank_shape(self, tp: int) -> tuple[int, ...]:
        """Return the shape that one of ``tp`` ranks holds.

        Raises:
            InvalidValue: ``tp`` neither divides the heads or groups nor is a multiple of them.
        """
        if not self.parts:
            return self.shape
        held = sum(
            size * _of_rank(heads, tp, f"the {self.name} state", "heads or groups")
            for heads, size in self.parts
        )
        return (held, *self.shape[1:])

    def bytes_per_layer(self, tp: int = 1) -> int:
        """Return the bytes that one of ``tp`` ranks holds in one layer."""
        return math.prod(self.rank_shape(tp)) * DTYPES[self.dtype]


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
        if self.kind not in _NAMES:
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
        if self.state and all(tensor.name == "conv" for tensor in self.state):
            return "a convolution's state"
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

        Raises:
            InvalidValue: ``tp`` ranks cannot share what the layers keep.
        """
        kept = self.kept(whole("tokens", tokens, 0), whole("page_size", page_size, 1))
        return kept * self.bytes_per_token(dtype, tp) + self.bytes_per_state(tp)

    def with_dtype(self, dtype: str) -> LayerGroup:
        """Return the group in a model of ``dtype``, whose states follow it.

        A cache of one byte an element leaves states as they are: models compute them in their own
        type.
        """
        if DTYPES[dtype] == 1 or not any(tensor.follows for tensor in self.state):
            return self
        state = [replace(one, dtype=dtype) if one.follows else one for one in self.state]
        return replace(self, state=tuple(state))


class _ConfigObject(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


ConfigSource = _ConfigObject | Mapping[str, Any] | str | PathLike[str]
"""A configuration: an object of Transformers, its dictionary, or a path."""


@dataclass(frozen=True, init=False, repr=False)
class KVGeometry:
    """The KV shape of a model, as one tensor-parallel rank holds it.

    Multi-head, grouped-query and multi-query attention differ in ``kv_heads`` alone. Multi-head
    latent attention (MLA) stores one vector a token and layer, the latent followed by the rotary
    key, and no values: ``kv_heads`` is 1, ``head_dim`` the whole vector (kv_lora_rank +
    qk_rope_head_dim in configurations) and ``latent_dim`` its leading part, which serves as the
    value. Every rank holds the whole vector; of K and V, a rank holds its heads, or one that others
    hold too.

    A model is *plain* if every layer stores K and V, or a latent, of one shape. The constructor
    makes these. Models whose layers differ (states beside attention, several shapes) come from
    `of` and `from_config`; `groups` says what each layer keeps, and the attributes of the one
    shape are 0.

    Windows are recorded for attention. They do not reduce the bytes of tokens and pages: a page
    holds its tokens in every layer, sliding ones too. `bytes_for` and `sequences_in` count what a
    cache takes that keeps of every window its tokens alone.

    Immutable, hashable, equal by value. `with_dtype` makes variants; so does
    ``dataclasses.replace`` of a plain model, which makes windows of chunks. Making one is
    O(layers), the rest O(groups).

    Attributes:
        layers: layers that store something.
        kv_heads: key-value heads of the whole model; `rank_heads` has those of one rank.
        head_dim: elements of one key.
        dtype: element type, a key of `DTYPES`; the constructor takes any spelling.
        value_dim: elements of one value; as many as the key's unless given.
        latent_dim: the latent's part of the stored vector; None unless the attention is latent.
        windows: for each layer the tokens its sliding window sees, None for full attention; empty
            unless the model is plain.
        tp: tensor-parallel ranks that share the model.
        groups: what the layers keep; layers that keep the same are one group.
        notes: sentences about what `from_config` assumed or did not follow, for those who read the
            sizes. Variants have none, and they do not count when geometries are compared.

    Raises:
        InvalidValue: a number is not a whole one above zero, the dtype is unknown, the windows are
            not one for each layer, the latent does not fit, or ``tp`` neither divides the heads nor
            is a multiple of them.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    value_dim: int
    latent_dim: int | None
    windows: tuple[int | None, ...]
    tp: int
    groups: tuple[LayerGroup, ...] = field(init=False, repr=False)
    notes: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str = "bfloat16",
        *,
        value_dim: int | None = None,
        latent_dim: int | None = None,
        windows: Sequence[int | None] | None = None,
        tp: int = 1,
    ) -> None:
        layers = whole("layers", layers, 1)
        shape = AttentionShape(kv_heads, head_dim, value_dim, latent_dim)
        spans = [
            None if span is None else whole(f"the window of layer {layer}", span, 1)
            for layer, span in enumerate([None] * layers if windows is None else windows)
        ]
        if len(spans) != layers:
            raise InvalidValue(
                f"{len(spans)} windows are given for {layers} layers; one for each is needed, "
                "None for full attention"
            )
        full: GroupKind = "full" if latent_dim is None else "latent"
        sliding: GroupKind = "window" if latent_dim is None else "latent"
        groups = (
            LayerGroup(full if span is None else sliding, (layer,), shape, span)
            for layer, span in enumerate(spans)
        )
        self._fill(groups, dtype, tp)

    @classmethod
    def of(
        cls,
        groups: Iterable[LayerGroup],
        *,
        dtype: str = "bfloat16",
        tp: int = 1,
        notes: tuple[str, ...] = (),
    ) -> KVGeometry:
        """Return the geometry of a model from what its layers keep.

        Groups that differ in their layers alone are merged. Layers may be in a group of attention
        and in one of states. ``dtype`` is the element type of K and V, and of the states that
        follow the model's. If all layers have attention of one shape, the result is plain.

        Raises:
            InvalidValue: there is no group, a layer has two attentions, or ``tp`` cannot divide
                the heads.
        """
        geometry = cls.__new__(cls)
        geometry._fill(groups, dtype, tp, notes)
        return geometry

    @classmethod
    def from_config(
        cls, config: ConfigSource, *, dtype: str | None = None, tp: int = 1
    ) -> KVGeometry:
        """Read the geometry from a Hugging Face configuration.

        ``config`` is a configuration object, its dictionary, or the path of a ``config.json`` or of
        its model directory; nothing is downloaded, and no code of a checkpoint runs. Where
        Transformers is installed, it is imported (seconds, the first time) and the family's class
        fills in what the file leaves out. Without it, the written fields of plain families are
        read, and a missing one is refused by name.

        ``dtype`` replaces the configuration's own. Where neither is given, it is that of the
        weights beside the file (headers of safetensors), else bfloat16 is assumed; `notes` say so.
        They also name a quantised KV cache that the checkpoint asks for.

        Raises:
            UnsupportedModel: no such file, no JSON, a family that is not known or whose cache is
                of no known kind (encoders, encoder-decoders, compressed tokens, index keys), or a
                configuration that lacks a field; the message says which.
            InvalidValue: ``dtype`` or ``tp`` is wrong.
        """
        # Late, because huggingface.py builds on this module.
        from kvkeep.core.geometry.huggingface import read_geometry  # noqa: PLC0415

        return read_geometry(config, dtype=dtype, tp=tp)

    @property
    def plain(self) -> bool:
        """Whether every layer stores K and V, or a latent, of one shape; windows may differ."""
        return self.kv_heads > 0

    def needs_plain(self, what: str) -> None:
        """Raise `UnsupportedModel` unless the model is plain.

        ``what`` begins the message and names what cannot serve another model, as "KVStore".
        """
        if not self.plain:
            kept = " and ".join(f"{group.name} in {len(group.layers)}" for group in self.groups)
            raise UnsupportedModel(
                f"{what} needs a model with K and V of one shape in every layer; of the "
                f"{self.layers} layers with a cache, this one keeps {kept}"
            )

    @property
    def rank_heads(self) -> int:
        """KV heads of one rank; with more ranks than heads, one that others hold too."""
        return max(1, self.kv_heads // self.tp) if self.plain else 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all attention layers of one rank.

        This is what pages take for the token as long as it lies in every window and chunk. States
        are not part of it.
        """
        return sum(group.bytes_per_token(self.dtype, self.tp) for group in self.groups)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of the states of one sequence in all layers of one rank; 0 for attention alone."""
        return sum(group.bytes_per_state(self.tp) for group in self.groups)

    def bytes_for(self, tokens: SupportsIndex, *, page_size: SupportsIndex = 1) -> int:
        """Return the bytes of one sequence of ``tokens`` in all layers of one rank.

        Of a window its tokens are counted, of a chunk at most its tokens, and states once; in
        whole pages of ``page_size`` tokens.
        """
        return sum(
            group.bytes_for(tokens, self.dtype, self.tp, page_size=page_size)
            for group in self.groups
        )

    def sequences_in(
        self, budget: str | SupportsIndex, tokens: SupportsIndex, *, page_size: SupportsIndex = 1
    ) -> int:
        """Return how many sequences of ``tokens`` fit into ``budget`` at once; see `bytes_for`.

        Raises:
            InvalidValue: the budget is no amount of memory, or ``tokens`` is below 1.
        """
        return parse_bytes(budget) // self.bytes_for(
            whole("tokens", tokens, 1), page_size=page_size
        )

    def bytes_per_page(self, page_size: SupportsIndex) -> int:
        """Return the bytes of a page of ``page_size`` tokens in all layers of one rank."""
        return whole("page_size", page_size, 1) * self.bytes_per_token

    def pages_in(self, budget: str | SupportsIndex, page_size: SupportsIndex) -> int:
        """Return how many pages fit into ``budget``: bytes, or text such as ``"24GiB"``.

        Raises:
            InvalidValue: the budget is no amount of memory, or smaller than one page.
            UnsupportedModel: the model is not plain, so its sequences take more than pages.
        """
        self.needs_plain("KVGeometry.pages_in")
        page = self.bytes_per_page(page_size)
        pages = parse_bytes(budget) // page
        if not pages:
            raise InvalidValue(
                f"a budget of {budget!r} holds no page; a page of {page_size} tokens "
                f"needs {format_bytes(page)} ({page} bytes)"
            )
        return pages

    def with_dtype(self, dtype: str) -> KVGeometry:
        """Return the geometry with K and V in ``dtype``.

        States that the model computes in its own type follow, except to types of one byte.
        """
        return KVGeometry.of(self.groups, dtype=dtype, tp=self.tp)

    def __repr__(self) -> str:
        if not self.plain:
            return f"KVGeometry.of({self.groups}, dtype={self.dtype!r}, tp={self.tp})"
        shown = [f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr]
        return f"KVGeometry({', '.join(shown)})"

    def _fill(
        self, groups: Iterable[LayerGroup], dtype: str, tp: int, notes: tuple[str, ...] = ()
    ) -> None:
        dtype, tp = normalise_dtype(dtype), whole("tp", tp, 1)
        alike: dict[tuple[Any, ...], list[int]] = {}  # layers that keep the same, in order
        for group in (group.with_dtype(dtype) for group in groups):
            keeps = (group.shape, group.span, group.state, group.grid)
            alike.setdefault((group.kind, *keeps), []).extend(group.layers)
        merged = tuple(
            LayerGroup(kind, tuple(sorted(layers)), *keeps)
            for (kind, *keeps), layers in alike.items()
        )
        attending = [layer for group in merged if group.shape for layer in group.layers]
        spans = {layer: group.span for group in merged for layer in group.layers}
        if not spans or len(attending) != len(set(attending)):
            raise InvalidValue(f"groups are {merged}; each layer needs one attention or a state")
        for group in merged:
            group.bytes_for(1, dtype, tp)  # raises where ranks cannot share it
        shape = merged[0].shape
        if any(group.shape != shape for group in merged) or max(spans) >= len(spans):
            shape = None  # not plain: layers differ, or some store nothing
        values = {
            "layers": len(spans),
            "kv_heads": shape.kv_heads if shape else 0,
            "head_dim": shape.head_dim if shape else 0,
            "dtype": dtype,
            "value_dim": shape.value_dim if shape else 0,
            "latent_dim": shape.latent_dim if shape else None,
            "windows": tuple(spans[layer] for layer in sorted(spans)) if shape else (),
            "tp": tp,
            "groups": merged,
            "notes": notes,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen
