"""`KeptModel`: generate on a plain Transformers model, with the KV of earlier calls.

    kept = KeptModel(model, tiers=["memory://1GiB", "file:///var/lib/kvkeep"])
    output = kept.generate(**inputs, max_new_tokens=100)

What the store has of the prompts is loaded, the rest is computed, and the KV of prompts and answers
is stored for whoever asks next: this process, the next one, or another machine behind the same
tiers. The model is used as it is: its class, its attention and its weights are not touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.integrations.transformers_caches import check_cache, fill, grown, held, length_of
from kvkeep.integrations.transformers_model import (
    geometry_of,
    rope_limit,
)
from kvkeep.integrations.transformers_prefill import Prefill
from kvkeep.integrations.transformers_rows import rows_of
from kvkeep.integrations.transformers_settings import GenerateSettings
from kvkeep.store import KVStore
from kvkeep.store.identity import ModelWatch, model_identity

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    import torch
    from transformers import Cache, DynamicCache, PreTrainedModel
    from transformers.generation.utils import GenerateOutput

    from kvkeep.core.tokens import TokenArray
    from kvkeep.integrations.transformers_rows import Rows
    from kvkeep.store.backends import Backend

__all__ = ["KeptModel", "LoadedPrefix", "ReuseReport", "revision_of"]

revision_of = model_identity
"""The ``revision`` of a model's KV, for a store of one's own."""

_BLOCK_TOKENS: Final = 64


class LoadedPrefix(NamedTuple):
    """What the store had: a cache to go on from, holding the first ``tokens`` tokens of a text.

    Of several texts, the first ``tokens`` columns of their batch, pads included.
    """

    cache: DynamicCache
    tokens: int


class ReuseReport(NamedTuple):
    """What one `KeptModel.generate` did, in tokens of all its rows.

    ``prompt``: of all prompts. ``loaded``: of these, taken from the store. ``stored``: newly kept.
    ``shared``: not computed for one row, as they were computed for another that begins alike. What
    remains of ``prompt`` was computed.
    """

    prompt: int
    loaded: int
    stored: int
    shared: int


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

    One text or a batch, padded on the left. Unless a cache with windows is asked for, layers with a
    sliding window are kept whole: their memory grows with the text while it is generated, as full
    attention's does. A model whose rotary embedding changes with the length of the text is served
    up to the length where it begins to.

    Thread safety: one call at a time, as the model. Several objects may share a store.

    Raises:
        UnsupportedModel: the model keeps something else than K and V of each token, or lies on
            several devices.
        InvalidValue: the store is one for another model, geometry or layout.
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
        self.last: ReuseReport | None = None
        geometry = geometry_of(model)
        self._identity = model_identity(model)
        self._watch = ModelWatch(model)
        self._longest = rope_limit(model)
        self._tenant = tenant
        self._owned = store is None
        if store is None:
            store = KVStore(
                geometry,
                model=model.config.model_type,
                revision=self._identity,
                tiers=tiers,
                layout="HND",
                block_tokens=block_tokens,
                tenant=tenant or "",
            )
        elif store.geometry != geometry or store.layout != "HND":
            raise InvalidValue(
                f"the store is for {store.geometry} in layout {store.layout}; this model needs "
                f"{geometry} in layout HND"
            )
        else:
            store.bind(self._identity)
        self.store = store

    def generate(
        self, inputs: torch.Tensor | None = None, **settings: Any
    ) -> GenerateOutput | torch.LongTensor:
        """``model.generate`` with the same arguments, results and greedy answers, but faster.

        Batches are padded on the left and come with their ``attention_mask``; without one, every
        token counts as text. A static cache, or an empty cache passed as ``past_key_values``, is
        used as ``generate`` does. Of a batch that begins alike, the beginning is computed once.

        Raises:
            InvalidValue: padding on the right, or a setting that uses the cache in its own way.
            IllegalStep: the model's weights, configuration or adapters were changed since this
                object was made, so far as `kvkeep.store.identity.ModelWatch` notices.
        """
        self._check_model()
        asked = GenerateSettings(self.model, inputs, settings)
        rows = asked.rows
        chunk = asked.value("prefill_chunk_size")
        prefill = Prefill(self.model, self.store.geometry, rows, chunk=chunk)
        cache, stored = self._begin(asked, prefill)
        output: Any = self.model.generate(  # type: ignore[operator]
            **asked.passed, past_key_values=cache
        )
        if asked.cache is None:
            stored = self._store_prompts(prefill, rows, cache, copies=asked.copies)
        if asked.copies == 1:  # of several answers, what they share is stored
            sequences: Any = getattr(output, "sequences", output)
            stored += self._store_answers(asked, sequences, cache)
        self.last = ReuseReport(sum(map(len, rows.texts)), prefill.loaded, stored, prefill.shared)
        return output  # type: ignore[no-any-return]

    def load(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> LoadedPrefix:
        """A cache with what the store has of ``input_ids``, all but their last token at most.

        ``input_ids``: [tokens], or [rows, tokens] padded on the left; of several rows, the columns
        that are known of all. The cache is the caller's, on the model's device; hand it to
        ``model.generate`` with all of ``input_ids``, or to ``model`` with the rest.
        """
        self._check_model()
        rows = rows_of(input_ids, attention_mask)
        prefill = Prefill(self.model, self.store.geometry, rows)
        if self._servable(rows.longest):
            prefill.load(self._get)
        tokens = min(prefill.levels) if any(prefill.known) else 0
        return LoadedPrefix(prefill.cache(tokens), tokens)

    def save(
        self,
        input_ids: torch.Tensor,
        past_key_values: Cache,
        attention_mask: torch.Tensor | None = None,
    ) -> int:
        """Store the KV of ``input_ids`` that ``past_key_values`` holds; tokens newly accepted.

        ``past_key_values`` is what the model filled while it computed the first of ``input_ids``,
        [tokens] or [rows, tokens]: a dynamic or static cache. What is stored already is skipped.
        Returns before the slower tiers have it; ``store.flush()`` waits for them.

        Raises:
            InvalidValue: it is no cache, holds more tokens than there are, other rows, or not
                all tokens of a layer (a sliding window that was passed: use the cache that `load`
                gives).
        """
        self._check_model()
        rows = rows_of(input_ids, attention_mask)
        check_cache(past_key_values)
        columns = length_of(past_key_values)
        if columns > rows.columns:
            raise InvalidValue(
                f"the cache holds {columns} tokens and input_ids are {rows.columns}; pass all "
                "tokens whose KV it has"
            )
        if not columns:
            return 0
        for layer in range(self.store.geometry.layers):
            first, keys, _ = held(past_key_values, layer)
            if len(keys) != len(rows.texts):
                raise InvalidValue(
                    f"the cache holds {len(keys)} texts and input_ids are {len(rows.texts)}"
                )
            if first:
                raise InvalidValue(
                    f"layer {layer} of the cache has a window, and holds the last "
                    f"{columns - first} of {columns} tokens; compute with the cache that load() "
                    "gives"
                )
        return sum(
            self._store(text, past_key_values, row, pad)
            for row, (text, pad) in enumerate(zip(rows.texts, rows.pads, strict=True))
            if self._servable(rows.longest + 1)
        )

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

    def _begin(self, asked: GenerateSettings, prefill: Prefill) -> tuple[Cache, int]:
        """The cache that `generate` goes on from, and tokens stored already.

        A cache that was asked for has windows or a fixed size, maybe: it is filled after the
        prompts were stored, with all but their last token.
        """
        rows, given = asked.rows, asked.cache
        if not self._servable(rows.longest):
            return grown(()) if given is None else given, 0
        prefill.load(self._get)
        prefill.share()
        if given is None:
            cache = prefill.reach(rows.columns, last=False)
            if asked.copies > 1:
                cache.batch_repeat_interleave(asked.copies)
            return cache, 0
        cache = prefill.reach(rows.columns - 1, last=True)
        stored = self._store_prompts(prefill, rows, cache)
        if asked.copies > 1:
            cache.batch_repeat_interleave(asked.copies)
        fill(given, cache)
        return given, stored

    def _get(self, text: TokenArray, start: int) -> Any:
        """What `Prefill` loads by."""
        return self.store.get(text, start, tenant=self._tenant, form="tuples")

    def _store_prompts(self, prefill: Prefill, rows: Rows, cache: Cache, *, copies: int = 1) -> int:
        """Store each prompt without its last token, for who asks it again; tokens accepted.

        And what rows had in common, to the token, for who asks something else about it.
        ``copies``: rows of the cache for each prompt, which share its KV.
        """
        if not self._servable(rows.longest + 1):
            return 0
        ends = [(shared.rows[0], shared.tokens) for shared in prefill.parted]
        ends += [(row, len(text) - 1) for row, text in enumerate(rows.texts)]
        return sum(
            self._store(rows.texts[row][:end], cache, row * copies, rows.pads[row])
            for row, end in ends
        )

    def _store_answers(self, asked: GenerateSettings, sequences: torch.Tensor, cache: Cache) -> int:
        """Store the prompts with their answers, up to where these end; tokens accepted."""
        columns, total = asked.rows.columns, sequences.shape[1]
        if not self._servable(asked.rows.longest + total - columns + 1):
            return 0
        ends, accepted = asked.ends, 0
        for row, (sequence, pad) in enumerate(zip(sequences.cpu(), asked.rows.pads, strict=True)):
            answer = sequence[columns:].tolist()
            length = next((at + 1 for at, token in enumerate(answer) if token in ends), len(answer))
            text = sequence[pad : columns + length].numpy()
            accepted += self._store(text, cache, row, pad, stored=columns - pad - 1)
        return accepted

    def _store(self, text: TokenArray, cache: Cache, row: int, pad: int, *, stored: int = 0) -> int:
        """Store what ``cache`` has of ``text`` in one row, behind ``pad`` columns of padding.

        ``stored``: its tokens that were stored just now, where windows have left them behind.
        """
        layers = [
            held(cache, layer)
            for layer in range(min(self.store.geometry.layers, len(cache.layers)))
        ]
        if not layers:
            return 0
        tokens = min(length_of(cache) - pad, len(text))
        start = max(0, max(layer.first for layer in layers) - pad)
        block = self.store.block_tokens
        if -(-start // block) * block > stored:
            return 0  # nobody would find it behind a gap
        kv = tuple(
            tuple(
                part[row, :, start + pad - first : tokens + pad - first] for part in (keys, values)
            )
            for first, keys, values in layers
        )
        put = self.store.put(text[:tokens], kv, start, tail=True, tenant=self._tenant)
        return put.tokens

    def _check_model(self) -> None:
        """It is the one that this object was made for, and computes KV that holds."""
        if (what := self._watch.changed()) is not None:
            # Moved to another device, or written to with what was there: then it is the same.
            if model_identity(self.model) != self._identity:
                raise IllegalStep(
                    f"the model was changed since this KeptModel was made: {what}. The KV in its "
                    "store is of the model as it was; make another one"
                )
            self._watch = ModelWatch(self.model)
        if self.model.training:
            raise IllegalStep("the model is in training mode; call model.eval() first")

    def _servable(self, tokens: int) -> bool:
        """Whether the KV of a text of ``tokens`` tokens is that of a longer and a shorter one."""
        return self._longest is None or tokens < self._longest
