"""`KeptModel`: generate on a plain Transformers model, with the KV of earlier calls.

    kept = KeptModel(model, tiers=["memory://1GiB", "file:///var/lib/kvkeep"])
    output = kept.generate(**inputs, max_new_tokens=100)

What the store has of the prompt is loaded, the rest is computed, and the KV of prompt and answer is
stored for whoever asks next: this process, the next one, or another machine behind the same tiers.
The model is used as it is: its class, its attention and its weights are not touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from kvkeep.errors import IllegalStep, InvalidValue, require
from kvkeep.integrations.transformers_model import (
    active_adapters,
    geometry_of,
    revision_of,
    rope_limit,
    weights_state,
)
from kvkeep.store import KVStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    import torch
    from transformers import Cache, DynamicCache, PreTrainedModel
    from transformers.generation.utils import GenerateOutput

    from kvkeep.backends import Backend

__all__ = ["KeptModel", "LoadedPrefix", "Reuse", "revision_of"]

_BLOCK_TOKENS: Final = 64
# Layers of a cache that hold keys and values as they were computed, first token first.
_PLAIN_LAYERS: Final = {
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "StaticLayer",
    "StaticSlidingWindowLayer",
}
_OWN_CACHE: Final = "it does not go on from a cache that is loaded; leave it out"
# Settings of `generate` that use the cache in a way of their own, and what to do.
_REFUSED: Final[dict[str, str]] = {
    "past_key_values": "the cache is loaded here; use load() and save() around a call of your own",
    "cache_implementation": "the cache is loaded here, as a DynamicCache; leave it out",
    "inputs_embeds": "the store finds KV by token ids; pass input_ids",
    "custom_generate": "use load() and save() around it",
    "token_healing": "it takes back tokens whose KV may be loaded already",
    "penalty_alpha": _OWN_CACHE,
    # Transformers 5.23 computes the whole prompt again behind a cache that has its beginning.
    "assistant_model": _OWN_CACHE,
    "assistant_early_exit": _OWN_CACHE,
    "prompt_lookup_num_tokens": _OWN_CACHE,
    "use_mtp": _OWN_CACHE,
}
# Settings of `generate` that compute several answers side by side.
_COPIES: Final = ("num_beams", "num_return_sequences")
# Settings that may be tensors and have no influence on the KV of the text.
_TENSORS: Final = {"eos_token_id", "pad_token_id", "bos_token_id", "negative_prompt_ids",
                   "negative_prompt_attention_mask"}  # fmt: skip


class LoadedPrefix(NamedTuple):
    """What the store had of a text: a cache to go on from, holding its first ``tokens`` tokens."""

    cache: DynamicCache
    tokens: int


class Reuse(NamedTuple):
    """What one `KeptModel.generate` did, in tokens: all of the prompt, of these loaded; stored."""

    prompt: int
    loaded: int
    stored: int


class KeptModel:
    """A Transformers causal language model whose KV is kept in a store.

    Args:
        model: as ``from_pretrained`` gives it, on one device, not in training mode.
        tiers: where KV is kept, fastest first (`kvkeep.store.KVStore`); closed with this object.
        store: one that is open already, in layout HND, instead of ``tiers``; it stays open.
        block_tokens: texts that part are shared in blocks of so many tokens; a text that goes on
            where a stored one ended is found to the token.
        tenant: whose KV this is; who names another tenant does not find it. Without one, the
            store's own.

    Attributes:
        model: the model itself.
        store: the `KVStore`, for its statistics, pins and lookups.
        last: what the latest `generate` reused; None before the first.

    One text at a time. Layers with a sliding window are kept whole: their memory grows with the
    text while it is generated, as full attention's does. A model whose rotary embedding changes
    with the length of the text is served up to the length where it begins to.

    Thread safety: one call at a time, as the model. Several objects may share a store.

    Raises:
        UnsupportedModel: the model keeps something else than K and V of each token, or lies on
            several devices.
        InvalidValue: the store is one for another geometry or layout.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tiers: Sequence[str | Backend] = ("memory://1GiB",),
        store: KVStore | None = None,
        block_tokens: int = _BLOCK_TOKENS,
        tenant: str | None = None,
    ) -> None:
        self.model = model
        self.last: Reuse | None = None
        geometry = geometry_of(model)
        self._weights = weights_state(model)
        self._longest = rope_limit(model)
        self._tenant = tenant
        self._owned = store is None
        if store is None:
            store = KVStore(
                geometry,
                model=model.config.model_type,
                revision=revision_of(model),
                tiers=tiers,
                layout="HND",
                block_tokens=block_tokens,
                tenant=tenant or "",
                lora=active_adapters(model),
            )
        elif store.geometry != geometry or store.layout != "HND":
            raise InvalidValue(
                f"the store is for {store.geometry} in layout {store.layout}; this model needs "
                f"{geometry} in layout HND"
            )
        self.store = store

    def generate(
        self, inputs: torch.Tensor | None = None, **settings: Any
    ) -> GenerateOutput | torch.LongTensor:
        """``model.generate`` with the same arguments, results and greedy answers, but faster.

        Without an ``attention_mask``, every token counts as text, pads as well.

        Raises:
            InvalidValue: several texts at once, padding, or a setting that brings its own cache.
            IllegalStep: the model's weights or adapters were changed since this object was made.
        """
        ids = self._inputs(inputs, settings)
        copies = max(self._setting(settings, name) or 1 for name in _COPIES)
        loaded = self.load(ids)
        if copies > 1:
            loaded.cache.batch_repeat_interleave(copies)
        output: GenerateOutput | torch.LongTensor = self.model.generate(  # type: ignore[operator]
            ids, past_key_values=loaded.cache, **settings
        )
        # The prompt without its last token, for who asks it again: what `load` looks for.
        stored = self._store(ids[0], loaded.cache, tokens=ids.shape[1] - 1)
        if copies == 1:  # of several answers, what they share is stored
            text = getattr(output, "sequences", output)[0]
            stored += self._store(text, loaded.cache, tokens=len(text) - 1)
        self.last = Reuse(ids.shape[1], loaded.tokens, stored)
        return output

    def load(self, input_ids: torch.Tensor) -> LoadedPrefix:
        """A cache with what the store has of ``input_ids``, all but their last token at most.

        ``input_ids``: [1, tokens] or [tokens]. The cache is the caller's, on the model's device;
        hand it to ``model.generate`` with all of ``input_ids``, or to ``model`` with the rest.
        """
        transformers = require("transformers", "transformers")
        row = self._row(input_ids)
        cache: DynamicCache = transformers.DynamicCache()
        if not self._servable(len(row)):
            return LoadedPrefix(cache, 0)
        kv, tokens = self.store.get(row[:-1].numpy(), tenant=self._tenant, form="tuples")
        for layer, (key, value) in enumerate(kv if kv is not None else ()):
            device = self.model.device
            cache.update(key[None].to(device), value[None].to(device), layer)
        return LoadedPrefix(cache, tokens)

    def save(self, input_ids: torch.Tensor, past_key_values: Cache) -> int:
        """Store the KV of ``input_ids`` that ``past_key_values`` holds; tokens newly accepted.

        ``past_key_values`` is what the model filled while it computed the first of ``input_ids``:
        a dynamic or static cache of one text. What is stored already is skipped. Returns before
        the slower tiers have it; ``store.flush()`` waits for them.

        Raises:
            InvalidValue: it holds more tokens than there are, several texts, or not all tokens of
                a layer (a sliding window that was passed: use the cache that `load` gives).
        """
        row = self._row(input_ids)
        held = int(past_key_values.get_seq_length())
        if held > len(row):
            raise InvalidValue(
                f"the cache holds {held} tokens and input_ids are {len(row)}; pass all tokens "
                "whose KV it has"
            )
        if held and (texts := len(_layer(past_key_values, 0, held)[0])) != 1:
            raise InvalidValue(f"the cache holds {texts} texts; save them one at a time")
        return self._store(row, past_key_values, tokens=held)

    def close(self) -> None:
        """Close the store if it was opened here, with all it still has to write."""
        if self._owned:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<KeptModel {type(self.model).__name__}, last: {self.last}>"

    def _store(self, row: torch.Tensor, cache: Cache, *, tokens: int) -> int:
        """Store the first ``tokens`` of ``row``, or as many as ``cache`` has; those accepted."""
        tokens = min(int(cache.get_seq_length()), tokens)
        if tokens < 1 or not self._servable(len(row) + 1):
            return 0
        kv = tuple(
            (keys[0], values[0])  # where there are several texts, they share these tokens
            for keys, values in (
                _layer(cache, layer, tokens) for layer in range(self.store.geometry.layers)
            )
        )
        put = self.store.put(row[:tokens].cpu().numpy(), kv, tail=True, tenant=self._tenant)
        return put.tokens

    def _inputs(self, inputs: torch.Tensor | None, settings: dict[str, Any]) -> torch.Tensor:
        """The prompt, [1, tokens]; takes it out of ``settings`` and refuses what cannot be."""
        ids = settings.pop("input_ids", None)
        if (ids is None) == (inputs is None):
            raise InvalidValue("generate needs one prompt: input_ids, as a tokenizer gives them")
        ids = inputs if ids is None else ids
        assert ids is not None
        if ids.ndim != 2:
            raise InvalidValue(f"input_ids are shaped {tuple(ids.shape)}; [1, tokens] is needed")
        self._row(ids)
        for name, why in _REFUSED.items():
            value = self._setting(settings, name)
            old_default = name == "cache_implementation" and value == "hybrid"
            if value is not None and value is not False and not old_default:
                raise InvalidValue(f"generate does not take {name}: {why}")
        if self._setting(settings, "use_cache") is False:
            raise InvalidValue("use_cache is False; there is nothing to keep then")
        self._check_tensors(ids, settings)
        return ids

    def _check_tensors(self, ids: torch.Tensor, settings: dict[str, Any]) -> None:
        """Every token counts, and nothing but tokens does."""
        torch = require("torch", "torch")
        mask = settings.get("attention_mask")
        if mask is None:
            settings["attention_mask"] = torch.ones_like(ids)
        elif mask.shape != ids.shape or not bool((mask == 1).all()):
            raise InvalidValue(
                f"attention_mask is shaped {tuple(mask.shape)}, with {int((mask == 0).sum())} "
                "zeros; one prompt without padding is needed"
            )
        others = [
            name
            for name, value in settings.items()
            if isinstance(value, torch.Tensor) and name not in {"attention_mask", *_TENSORS}
        ]
        if others:
            raise InvalidValue(
                f"{', '.join(others)} would change the KV of tokens that the store finds by their "
                "ids alone; generate with input_ids, or without the store"
            )

    def _setting(self, settings: dict[str, Any], name: str) -> Any:
        """What ``generate`` will take for ``name``: the argument, or what a configuration says."""
        if name in settings:
            return settings[name]
        given = getattr(settings.get("generation_config"), name, None)
        return getattr(self.model.generation_config, name, None) if given is None else given

    def _row(self, input_ids: torch.Tensor) -> torch.Tensor:
        """One text's token ids, on the CPU."""
        if self._weights != weights_state(self.model):
            raise IllegalStep(
                "the model's weights or adapters were changed since this KeptModel was made, and "
                "the KV in its store is not theirs; make another one"
            )
        if self.model.training:
            raise IllegalStep("the model is in training mode; call model.eval() first")
        ids = input_ids[0] if input_ids.ndim == 2 and input_ids.shape[0] == 1 else input_ids
        if ids.ndim != 1 or not len(ids):
            raise InvalidValue(
                f"input_ids are shaped {tuple(input_ids.shape)}; one text at a time is served, "
                "[1, tokens] with at least one token"
            )
        return ids.detach().cpu()

    def _servable(self, tokens: int) -> bool:
        """Whether the KV of a text of ``tokens`` tokens is that of a longer and a shorter one."""
        return self._longest is None or tokens < self._longest


def _layer(cache: Cache, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first ``tokens`` tokens, [texts, heads, tokens, dim]."""
    if layer >= len(cache.layers):
        raise InvalidValue(f"the cache has {len(cache.layers)} layers, and the model more")
    held: Any = cache.layers[layer]
    kind = type(held).__name__
    if kind not in _PLAIN_LAYERS:
        raise InvalidValue(f"layer {layer} of the cache is a {kind}, which is not as computed")
    if held.keys.shape[-2] < tokens:
        raise InvalidValue(
            f"layer {layer} of the cache is a {kind} that holds the last {held.keys.shape[-2]} of "
            f"{tokens} tokens; compute with the cache that load() gives"
        )
    return held.keys[..., :tokens, :], held.values[..., :tokens, :]
