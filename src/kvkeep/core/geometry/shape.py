"""`KVGeometry`: what a model keeps of a sequence, its bytes, and how much of it a budget holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex

from kvkeep.core.errors import InvalidValue, UnsupportedModel, whole
from kvkeep.core.geometry.groups import AttentionShape, GroupKind, LayerGroup, merged
from kvkeep.core.geometry.units import format_bytes, normalise_dtype, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["ConfigSource", "KVGeometry"]


class _ConfigObject(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


ConfigSource = _ConfigObject | Mapping[str, Any] | str | PathLike[str]
"""A configuration: an object of Transformers, its dictionary, or a path."""


@dataclass(frozen=True, init=False, repr=False)
class KVGeometry:
    """The KV shape of a model, as one tensor-parallel rank holds it.

    Multi-head, grouped-query and multi-query attention differ in ``kv_heads`` alone. Multi-head
    latent attention stores one vector a token and layer, the latent followed by the rotary key,
    and no values: ``kv_heads`` is 1, ``head_dim`` the whole vector and ``latent_dim`` its leading
    part, which serves as the value (see `mla`).

    A model is *plain* if every layer stores K and V, or a latent, of one shape. The constructor
    makes these. Models whose layers differ (states beside attention, several shapes) come from
    `of` and `from_config`; `groups` says what each layer keeps, and the attributes of the one
    shape are 0.

    Windows are recorded for attention. They do not reduce the bytes of tokens and pages: a page
    holds its tokens in every layer, sliding ones too. `bytes_for` and `sequences_in` count what a
    cache takes that keeps of every window its tokens alone.

    Immutable, hashable, equal by value. `with_dtype` and `shard` make variants; so does
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
            not one for each layer, the latent does not fit, or ``tp`` cannot divide the heads.
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
        kinds: dict[bool, GroupKind] = {True: "full", False: "window"}
        if latent_dim is not None:
            kinds = {True: "latent", False: "latent"}
        groups = (
            LayerGroup(kinds[span is None], (layer,), shape, span)
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
    def mla(
        cls,
        layers: int,
        *,
        latent_dim: int,
        rope_dim: int,
        dtype: str = "bfloat16",
        windows: Sequence[int | None] | None = None,
        tp: int = 1,
    ) -> KVGeometry:
        """Return the geometry of latent attention: a latent and a rotary key per token and layer.

        ``latent_dim`` is called kv_lora_rank in configurations, ``rope_dim`` qk_rope_head_dim.
        Every tensor-parallel rank holds the whole vector.
        """
        whole("rope_dim", rope_dim, 1)
        width = whole("latent_dim", latent_dim, 1) + rope_dim
        return cls(layers, 1, width, dtype, latent_dim=latent_dim, windows=windows, tp=tp)

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
    def rope_dim(self) -> int:
        """Elements of the rotary key after the latent; 0 unless the attention is latent."""
        return 0 if self.latent_dim is None else self.head_dim - self.latent_dim

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

    def shard(self, tp: int) -> KVGeometry:
        """Return the geometry of one rank of ``tp`` that share this model.

        Heads are divided among the ranks; with more ranks than heads, each rank holds one head,
        which others hold too. The latent of MLA is not divided.

        Raises:
            InvalidValue: ``tp`` neither divides the heads nor is a multiple of them.
        """
        return KVGeometry.of(self.groups, dtype=self.dtype, tp=tp)

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
        groups = merged(group.with_dtype(dtype) for group in groups)
        attending = [layer for group in groups if group.shape for layer in group.layers]
        spans = {layer: group.span for group in groups for layer in group.layers}
        if not spans or len(attending) != len(set(attending)):
            raise InvalidValue(f"groups are {groups}; each layer needs one attention or a state")
        for group in groups:
            group.check_ranks(tp)
        shape = groups[0].shape
        if any(group.shape != shape for group in groups) or max(spans) >= len(spans):
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
            "groups": groups,
            "notes": notes,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen
