"""What each layer of a model keeps and attends to, found by running a few tokens.

Nothing is looked up by the names of classes. The model runs three tokens by itself, with a cache
and an attention function that record which module calls them:

- A module that reads or writes a state of the cache is a *mixer*.
- Attention shows the shapes of K and V, whose K and V a layer attends over, and the function from
  which its mask would be made. That function is asked about tokens far apart, so a window of any
  size is known after three tokens.
- A layer that stores latents is given unit vectors in place of those that it stored. What it makes
  of them are its linear maps.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from kvkeep.core.errors import UnsupportedModel, require
from kvkeep.serve.engine.attention.batch import switch_attention
from kvkeep.serve.engine.attention.memory import LatentMaps, reaches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn
    from transformers import PreTrainedModel

    from kvkeep.core.geometry import AttentionShape, KVGeometry
    from kvkeep.serve.engine.attention.memory import Reach

    MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

__all__ = ["CacheUser", "ModelSurvey", "survey"]

_SURVEY: Final = "kvkeep_survey"  # the attention implementation during a survey
_TOKENS: Final = 3
_FAR: Final = 1 << 22  # tokens; no window is as large


@dataclass(frozen=True, slots=True, eq=False)
class CacheUser:
    """A module that calls a cache, which comes as its argument ``name``.

    ``width`` is that of its hidden states.
    """

    module: nn.Module
    name: str
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class ModelSurvey:
    """What the modules of a model do.

    Attributes:
        mixers: of each layer with a state, the module that keeps it.
        readers: attention modules that read a cache beyond handing K and V to it: they store
            latents, or ask for the length of the sequence.
        shared: layers that attend over the KV of another layer, and that layer.
        latent: the linear maps of each layer that stores latents.
    """

    mixers: dict[int, CacheUser]
    readers: list[CacheUser]
    shared: dict[int, int]
    latent: dict[int, LatentMaps]


def survey(model: PreTrainedModel, geometry: KVGeometry) -> ModelSurvey:
    """Run ``model`` on a few tokens and return what its modules do.

    Leaves it with another attention implementation; `prove` sets one afterwards.

    Raises:
        UnsupportedModel: it does not let its attention be replaced, or does something else than
            ``geometry`` says.
    """
    name = type(model).__name__
    _register()
    seen = _Seen(name, geometry)
    with _stack_of_users(model, seen):
        if seen.attends:
            switch_attention(model, _SURVEY)
        parameters = inspect.signature(model.forward).parameters
        key = "past_key_values" if "past_key_values" in parameters else "cache_params"
        ids = torch.arange(1, 1 + _TOKENS, device=model.device)[None]
        with torch.inference_mode():
            model(
                input_ids=ids,
                position_ids=torch.arange(_TOKENS, device=model.device)[None],
                use_cache=True,
                logits_to_keep=1,
                paged_batch=seen,
                **{key: seen.cache(model)},
            )
    return seen.result()


def _register() -> None:
    """Register the attention of a survey, and its masks, with Transformers."""
    transformers = require("transformers", "transformers")
    transformers.AttentionInterface.register(_SURVEY, _surveyed_attention)
    transformers.AttentionMaskInterface.register(_SURVEY, _surveyed_mask)


def _surveyed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_batch: _Seen | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if paged_batch is None:
        raise UnsupportedModel(f"{type(module).__name__} is not handed the keywords of the model")
    return paged_batch.attend(module, query, key, value, attention_mask), None


class _Mask(torch.Tensor):
    """A mask that remembers the function it would be made from."""

    function: MaskFunction


def _surveyed_mask(*, mask_function: MaskFunction, **_: Any) -> torch.Tensor:
    mask = torch.zeros(1, 1, 1, 1).as_subclass(_Mask)
    mask.function = mask_function
    return mask


@contextmanager
def _stack_of_users(model: nn.Module, seen: _Seen) -> Iterator[None]:
    """Keep the stack of modules under way that were given the cache, during the context."""

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = next((name for name, value in kwargs.items() if seen.is_cache(value)), None)
        if found is None and any(seen.is_cache(value) for value in args):
            names = list(inspect.signature(module.forward).parameters)
            found = names[[seen.is_cache(value) for value in args].index(True)]
        if found is None:
            seen.users.append(None)
            return
        hidden = next((one for one in (*args, *kwargs.values()) if torch.is_tensor(one)), None)
        width = 0 if hidden is None else hidden.shape[-1]
        seen.users.append(CacheUser(module, found, width))

    def leave(*_: Any) -> None:
        seen.users.pop()

    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(slots=True, eq=False)
class _Attention:
    """What a layer handed to its attention."""

    key: torch.Tensor  # [1, heads, tokens, dim]
    value: torch.Tensor


@dataclass(slots=True, eq=False)
class _Seen:
    """What was seen so far; stands in for the batch in the keywords of the model."""

    name: str
    geometry: KVGeometry
    users: list[CacheUser | None] = field(default_factory=list)
    mixers: dict[int, CacheUser] = field(default_factory=dict)
    readers: dict[int, CacheUser] = field(default_factory=dict)  # by id of the module
    attentions: dict[int, _Attention] = field(default_factory=dict)
    latent: dict[int, LatentMaps] = field(default_factory=dict)
    shared: dict[int, int] = field(default_factory=dict)
    expected: Mapping[int, Reach] = field(init=False)
    shapes: Mapping[int, AttentionShape] = field(init=False)
    _cache: Any = None

    def __post_init__(self) -> None:
        self.expected = reaches(self.geometry)
        self.shapes = {
            layer: group.shape
            for group in self.geometry.groups
            for layer in group.layers
            if group.shape is not None
        }

    @property
    def attends(self) -> bool:
        """Whether any layer has attention."""
        return bool(self.shapes)

    def is_cache(self, value: object) -> bool:
        return self._cache is not None and value is self._cache

    def cache(self, model: PreTrainedModel) -> Any:
        """Return a cache that records which modules call it."""
        transformers = require("transformers", "transformers")
        self._cache = _recording(transformers.DynamicCache, self)(config=model.config)
        return self._cache

    def user(self) -> CacheUser | None:
        """Return the innermost module under way that was given the cache."""
        return next((user for user in reversed(self.users) if user is not None), None)

    def keeps_state(self, layer: int) -> None:
        """Record that the module under way reads or writes the state of ``layer``."""
        user = self.user()
        known = self.mixers.get(layer)
        if user is None or (known is not None and known.module is not user.module):
            raise UnsupportedModel(f"{self.name} keeps the state of layer {layer} in two modules")
        self.mixers[layer] = user

    def asks_length(self) -> None:
        """Record that the module under way asks for the length of the sequence."""
        user = self.user()
        if user is not None and isinstance(getattr(user.module, "layer_idx", None), int):
            self.readers[id(user.module)] = user

    def stores(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> Any:
        """Record what ``layer`` stores; return unit vectors if these are latents, else None."""
        shape = self.shapes.get(layer)
        if shape is None:
            raise UnsupportedModel(
                f"{self.name} stores K and V in layer {layer}, which has none in its geometry"
            )
        if shape.latent_dim is None:
            return None
        rope = shape.head_dim - shape.latent_dim
        given = [key.shape[1], key.shape[3], value.shape[1], value.shape[3]]
        if given != [1, shape.latent_dim, 1, rope]:
            raise UnsupportedModel(
                f"{self.name} stores heads × width {given} in layer {layer}, not a latent of "
                f"{shape.latent_dim} and a rotary key of {rope}"
            )
        user = self.user()
        assert user is not None, "something was handed the cache"
        self.readers[id(user.module)] = user
        # The last row is 0: a map that adds something is not linear.
        units = torch.eye(shape.head_dim + 1, shape.head_dim, dtype=key.dtype, device=key.device)[
            None, None
        ]
        return units[..., : shape.latent_dim], units[..., shape.latent_dim :]

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Record the attention of one layer; return something of the right shape."""
        layer = getattr(module, "layer_idx", None)
        what = type(module).__name__
        if not isinstance(layer, int):
            raise UnsupportedModel(f"{what} hands its attention no number of its layer")
        if mask is not None and not hasattr(mask, "function"):
            raise UnsupportedModel(
                f"{what} hands its attention a mask of its own: it needs more than causal "
                "attention with K and V of each token"
            )
        if layer in self.attentions:
            raise UnsupportedModel(f"{self.name} attends twice in layer {layer}")
        shape = self.shapes.get(layer)
        if shape is None:
            self._attends_elsewhere(layer, key)
        elif shape.latent_dim is not None:
            self._calibrate(layer, key, value, shape)
        else:
            given = [key.shape[1], key.shape[3], value.shape[1], value.shape[3]]
            stored = [shape.kv_heads, shape.head_dim, shape.kv_heads, shape.value_dim]
            if given != stored:
                raise UnsupportedModel(
                    f"layer {layer} brings K and V of heads × width {given}; the geometry has "
                    f"{stored}"
                )
        self.attentions[layer] = _Attention(key, value)
        self._check_reach(layer, mask)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def _attends_elsewhere(self, layer: int, key: torch.Tensor) -> None:
        for source, one in self.attentions.items():
            if one.key.data_ptr() == key.data_ptr() and source in self.shapes:
                self.shared[layer] = source
                return
        raise UnsupportedModel(
            f"{self.name} attends in layer {layer}, which has no K and V in its geometry"
        )

    def _calibrate(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, shape: AttentionShape
    ) -> None:
        """Take the maps of ``layer`` from what it made of unit vectors."""
        assert shape.latent_dim is not None
        width = shape.head_dim
        if key.shape[2] != width + 1 or value.shape[2] != width + 1:
            raise UnsupportedModel(f"{self.name} attends in layer {layer} without its latents")
        maps = LatentMaps(
            key[0, :, :width].contiguous(), value[0, :, : shape.latent_dim].contiguous()
        )
        if key[0, :, width].any() or value[0, :, shape.latent_dim :].any():
            raise UnsupportedModel(f"{self.name} expands the latents of layer {layer} not linearly")
        self.latent[layer] = maps

    def _check_reach(self, layer: int, mask: torch.Tensor | None) -> None:
        reach = self.expected[self.shared.get(layer, layer)]
        if mask is None:
            if reach.span is not None:
                raise UnsupportedModel(
                    f"{self.name} does not say to which tokens its layer {layer} attends; its "
                    f"geometry has {_words(reach)}"
                )
            return
        assert isinstance(mask, _Mask)
        span = reach.span or _FAR
        for query in (span - 1, span, span + 1, 2 * span + 3, 3 * span - 1):
            first = reach.first(query)
            for token in {first - 1, first, first + 1, query, query + 1}:
                if token >= 0 and _sees(mask.function, query, token) != (first <= token <= query):
                    raise UnsupportedModel(
                        f"{self.name} has another attention than its geometry, which has "
                        f"{_words(reach)} in layer {layer}: there, token {query} does "
                        f"{'not ' if first <= token <= query else ''}attend to token {token}"
                    )

    def result(self) -> ModelSurvey:
        """Return what was seen; raises `UnsupportedModel` if that is not what the geometry says."""
        if missed := sorted(set(self.shapes) - set(self.attentions)):
            raise UnsupportedModel(
                f"{self.name} does not call its attention through Transformers' attention "
                f"interface in the layers {missed}"
            )
        with_state = {
            layer for group in self.geometry.groups if group.state for layer in group.layers
        }
        if with_state != set(self.mixers):
            raise UnsupportedModel(
                f"{self.name} keeps states in the layers {sorted(self.mixers)}, and its geometry "
                f"says {sorted(with_state)}"
            )
        return ModelSurvey(self.mixers, list(self.readers.values()), self.shared, self.latent)


def _words(reach: Reach) -> str:
    if reach.span is None:
        return "attention to all tokens"
    return f"{'chunks' if reach.chunked else 'a window'} of {reach.span} tokens"


def _sees(function: MaskFunction, query: int, token: int) -> bool:
    zero = torch.zeros((), dtype=torch.long)
    return bool(function(zero, zero, torch.tensor(query), torch.tensor(token)))


def _recording(base: type, seen: _Seen) -> Callable[..., Any]:
    """Return a subclass of a cache whose calls ``seen`` records."""

    class _Recording(base):  # type: ignore[misc]  # its base is loaded late
        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any,
            **kwargs: Any,
        ) -> Any:  # fmt: skip
            units = seen.stores(key_states, value_states, layer_idx)
            if units is not None:
                return units
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

        def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            seen.keeps_state(layer_idx)
            return super().get_conv_state(layer_idx, *args, **kwargs)

        def get_recurrent_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            seen.keeps_state(layer_idx)
            return super().get_recurrent_state(layer_idx, *args, **kwargs)

        def update_conv_state(
            self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> Any:
            seen.keeps_state(layer_idx)
            return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

        def update_recurrent_state(
            self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> Any:
            seen.keeps_state(layer_idx)
            return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

        def get_seq_length(self, *args: Any, **kwargs: Any) -> Any:
            seen.asks_length()
            return super().get_seq_length(*args, **kwargs)

    # Models that refuse its class say its name.
    _Recording.__module__, _Recording.__qualname__ = base.__module__, base.__qualname__
    return _Recording
