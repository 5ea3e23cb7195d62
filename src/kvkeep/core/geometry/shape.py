"""`KVGeometry`: the shape of a model's KV, its bytes, and how many pages a budget holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, SupportsIndex

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.geometry.dtypes import DTYPES, normalise_dtype
from kvkeep.core.geometry.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.geometry.fields import ConfigSource

__all__ = ["KVGeometry"]


@dataclass(frozen=True, init=False)
class KVGeometry:
    """The KV shape of a model, as one tensor-parallel rank holds it.

    Multi-head, grouped-query and multi-query attention differ in ``kv_heads`` alone. Multi-head
    latent attention stores one vector a token and layer, the latent followed by the rotary key,
    and no values: ``kv_heads`` is 1, ``head_dim`` the whole vector and ``latent_dim`` its leading
    part, which serves as the value (see `mla`).

    Windows are recorded for attention. They do not reduce any figure here: a page holds its tokens
    in every layer, sliding ones too.

    Immutable, hashable, equal by value; ``dataclasses.replace`` makes variants. Everything is O(1).

    Attributes:
        layers: layers that store KV.
        kv_heads: key-value heads of the whole model; `rank_heads` has those of one rank.
        head_dim: elements of one key.
        dtype: element type, a key of `DTYPES`; the constructor takes any spelling.
        value_dim: elements of one value; as many as the key's unless given.
        latent_dim: the latent's part of the stored vector; None unless the attention is latent.
        windows: for each layer the tokens its sliding window sees, None for full attention.
        tp: tensor-parallel ranks that share the model.

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
        values = {
            "layers": whole("layers", layers, 1),
            "kv_heads": whole("kv_heads", kv_heads, 1),
            "head_dim": whole("head_dim", head_dim, 1),
            "dtype": normalise_dtype(dtype),
            "latent_dim": None if latent_dim is None else whole("latent_dim", latent_dim, 1),
            "tp": whole("tp", tp, 1),
        }
        if value_dim is None:
            value_dim = head_dim if latent_dim is None else latent_dim
        values["value_dim"] = whole("value_dim", value_dim, 1)
        values["windows"] = _windows(windows, layers)
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen
        self._check_latent()
        self._check_shards()

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
        its model directory; nothing is downloaded, and Transformers is not imported. ``dtype``
        replaces the configuration's own, which defaults to float32.

        Raises:
            UnsupportedModel: no such file, no JSON, a model without a KV cache of this kind
                (encoders, encoder-decoders, state spaces), layers of different shapes, or a
                configuration that lacks a field; the message says which.
            InvalidValue: ``dtype`` or ``tp`` is wrong.
        """
        # Late, because huggingface.py builds on this module.
        from kvkeep.core.geometry.huggingface import read_geometry  # noqa: PLC0415

        return read_geometry(config, dtype=dtype, tp=tp)

    @property
    def rank_heads(self) -> int:
        """KV heads of one rank; with more ranks than heads, one that others hold too."""
        return max(1, self.kv_heads // self.tp)

    @property
    def rope_dim(self) -> int:
        """Elements of the rotary key after the latent; 0 unless the attention is latent."""
        return 0 if self.latent_dim is None else self.head_dim - self.latent_dim

    def window(self, layer: int) -> int | None:
        """Return how many tokens a token of ``layer`` attends to, itself included; None for all."""
        if not 0 <= layer < self.layers:
            raise InvalidValue(f"layer is {layer}; the model has 0 … {self.layers - 1}")
        return self.windows[layer]

    @property
    def bytes_per_token_per_layer(self) -> int:
        """Bytes of one token's K and V (or latent) in one layer of one rank."""
        stored = self.head_dim if self.latent_dim is not None else self.head_dim + self.value_dim
        return self.rank_heads * stored * DTYPES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers of one rank."""
        return self.layers * self.bytes_per_token_per_layer

    def bytes_per_page(self, page_size: SupportsIndex) -> int:
        """Return the bytes of a page of ``page_size`` tokens in all layers of one rank."""
        return whole("page_size", page_size, 1) * self.bytes_per_token

    def pages_in(self, budget: str | SupportsIndex, page_size: SupportsIndex) -> int:
        """Return how many pages fit into ``budget``: bytes, or text such as ``"24GiB"``.

        Raises:
            InvalidValue: the budget is no amount of memory, or smaller than one page.
        """
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
        return replace(self, tp=tp)

    def _check_latent(self) -> None:
        if self.latent_dim is None:
            return
        if self.kv_heads != 1:
            raise InvalidValue(
                f"kv_heads is {self.kv_heads} with a latent; latent attention stores one vector "
                "a token and layer, so it must be 1"
            )
        if self.latent_dim > self.head_dim:
            raise InvalidValue(
                f"latent_dim is {self.latent_dim} and head_dim {self.head_dim}; the stored "
                "vector begins with the latent and cannot be shorter"
            )
        if self.value_dim != self.latent_dim:
            raise InvalidValue(
                f"value_dim is {self.value_dim} with a latent of {self.latent_dim}; the latent "
                "serves as the value, so leave value_dim out"
            )

    def _check_shards(self) -> None:
        heads, tp = self.kv_heads, self.tp
        if heads % tp and tp % heads:
            raise InvalidValue(
                f"tp is {tp} and the model has {heads} KV heads; tp must divide the heads, or "
                "be a multiple of them (each rank then holds one)"
            )


def _windows(windows: Sequence[int | None] | None, layers: int) -> tuple[int | None, ...]:
    if windows is None:
        return (None,) * layers
    checked = tuple(
        None if window is None else whole(f"the window of layer {layer}", window, 1)
        for layer, window in enumerate(windows)
    )
    if len(checked) != layers:
        raise InvalidValue(
            f"{len(checked)} windows are given for {layers} layers; one for each is needed, "
            "None for full attention"
        )
    return checked
