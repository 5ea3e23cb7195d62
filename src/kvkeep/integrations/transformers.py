"""`KeptModel`: generate on a plain Transformers model, with the KV of earlier calls.

    kept = KeptModel(model, tiers=["memory://1GiB", "file:///var/lib/kvkeep"])
    output = kept.generate(**inputs, max_new_tokens=100)

The stored KV of the prompts is loaded and the rest is computed. The KV of prompts and answers is
stored for later calls: of this process, the next one, or another machine with the same tiers. The
class, attention and weights of the model are not changed.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self
from weakref import WeakKeyDictionary

from kvkeep.core.errors import IllegalStep, InvalidValue, UnsupportedModel, require

require("torch", "transformers")  # first, so that the error names the extra to install

from kvkeep.integrations.transformers_caches import check_cache, fill, grown, held, length_of  # noqa: E402
from kvkeep.integrations.transformers_model import (  # noqa: E402
    PassClock,
    geometry_of,
    needs_snapshots,
    rope_limit,
)
from kvkeep.integrations.transformers_prefill import Prefill, StoredRows  # noqa: E402
from kvkeep.integrations.transformers_settings import GenerateSettings, rows_of  # noqa: E402
from kvkeep.integrations.transformers_snapshots import PreparedRows, SnapshotRuns  # noqa: E402
from kvkeep.store import KVStore  # noqa: E402
from kvkeep.store.identity import ModelWatch, model_identity  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    import torch
    from transformers import Cache, PreTrainedModel
    from transformers.generation.utils import GenerateOutput

    from kvkeep.core.tokens import TokenArray
    from kvkeep.store import Get
    from kvkeep.store.backends import Backend

__all__ = ["KeptModel", "LoadedPrefix", "ReuseReport", "revision_of"]

revision_of = model_identity
"""The ``revision`` of a model's KV, to open a store for it."""

_BLOCK_TOKENS: Final = 64


class LoadedPrefix(NamedTuple):
    """A cache with the stored KV of the first ``tokens`` tokens of a text, to continue from.

    For several texts, ``tokens`` are columns of their batch, pads included.
    """

    cache: Cache
    tokens: int


class ReuseReport(NamedTuple):
    """The reuse in one call of `KeptModel.generate`, in tokens of all rows.

    Attributes:
        prompt: of all prompts.
        loaded: of these, loaded from the store.
        stored: newly stored.
        shared: of the prompts, computed once for several rows that begin alike. The remaining
            tokens of the prompts were computed for their row.
    """

    prompt: int
    loaded: int
    stored: int
    shared: int


class KeptModel:
    """A Transformers causal language model whose KV is kept in a store.

    Generates for one text, or a batch padded on the left. Of models with sliding windows, latent
    KV, or states beside attention, snapshots are kept (`KVStore.put_snapshot`): sliding layers hold
    their window alone, and a text goes on where all layers can. Such a model is tried first: one
    that does not go on exactly is refused. If the model's rotary embedding changes for texts above
    some length, the store is used only for texts up to that length.

    Args:
        model: as ``from_pretrained`` returns it, on one device, not in training mode.
        tiers: where KV is stored, fastest first; see `kvkeep.store.KVStore`.
        store: an open store with layout HND, instead of ``tiers``; it stays open.
        block_tokens: unit in which texts that differ later share KV, in tokens. A text that
            continues a stored one reuses it to the token.
        tenant: the owner of the KV; other tenants do not find it. Default: the store's tenant.
        loading: "paying": load what is faster than computing it, as `KVStore.cost` has learned.
            "all": load all that is found.

    Attributes:
        model: the model.
        store: the `KVStore`, for its statistics, pins and lookups.
        last: the report of the latest `generate`; None before the first.

    Thread safety: one call at a time, like the model. Several objects may share a store.

    Raises:
        UnsupportedModel: the model does not go on exactly from what its cache holds, or is on
            several devices.
        InvalidValue: the store is for another model, geometry or layout.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tiers: Sequence[str | Backend] = ("memory://1GiB",),
        store: KVStore | None = None,
        block_tokens: int = _BLOCK_TOKENS,
        tenant: str | None = None,
        loading: Literal["paying", "all"] = "paying",
    ) -> None:
        if loading not in ("paying", "all"):
            raise InvalidValue(f"loading is {loading!r}; it is 'paying' or 'all'")
        self._paying = loading == "paying"
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
                snapshots=needs_snapshots(geometry),
            )
        elif store.geometry != geometry or store.layout != "HND":
            raise InvalidValue(
                f"the store is for {store.geometry} in layout {store.layout}; this model needs "
                f"{geometry} in layout HND"
            )
        elif geometry.latent_dim is not None and not store.snapshots:
            raise InvalidValue(
                "the store keeps blocks of all layers, and this model has latent KV; open it with "
                "KVStore(…, snapshots=True)"
            )
        else:
            store.bind(self._identity)
        self.store = store
        self._rows = StoredRows(store, tenant, self._servable)
        self._exact: WeakKeyDictionary[Cache, int] = WeakKeyDictionary()  # of what `load` returned
        self._clock = PassClock(model, store.cost.prefill)
        self._runs: SnapshotRuns | None = None
        if store.snapshots:
            try:
                self._runs = SnapshotRuns(
                    model, store, tenant, clock=self._clock, paying=self._paying
                )
            except UnsupportedModel:
                self.close()
                raise

    def generate(
        self, inputs: torch.Tensor | None = None, **arguments: Any
    ) -> GenerateOutput | torch.LongTensor:
        """Call ``model.generate`` with the same arguments; same results and greedy answers, faster.

        A batch is padded on the left and comes with its ``attention_mask``; without one, every
        token is text. A static cache, or an empty cache passed as ``past_key_values``, is used as
        ``generate`` does. If the rows begin alike, the common prefix is computed once. Where hidden
        states or attentions are returned, which are those of the whole prompt, nothing is loaded.

        Raises:
            InvalidValue: padding on the right, or a setting that uses the cache in its own way.
            IllegalStep: the model's weights, configuration or adapters changed since this object
                was made, as far as `kvkeep.store.identity.ModelWatch` notices.
        """
        self._check_model()
        settings = GenerateSettings(self.model, inputs, arguments)
        rows = settings.rows
        chunk = settings.value("prefill_chunk_size")
        if self._runs is not None:
            return self._generate(self._runs, settings, chunk)  # type: ignore[no-any-return]
        prefill = Prefill(self.model, self.store.geometry, rows, clock=self._clock, chunk=chunk)
        cache, stored = self._begin(settings, prefill)
        output = self._answer(settings, cache)
        if settings.cache is None or settings.whole:
            stored = self._rows.store_prompts(prefill, rows, cache, copies=settings.copies)
        if settings.copies == 1:  # of several answers, only the common prompt is stored
            sequences: Any = getattr(output, "sequences", output)
            stored += self._rows.store_answers(prefill, settings, sequences, cache)
        self.last = ReuseReport(sum(map(len, rows.texts)), prefill.loaded, stored, prefill.shared)
        return output  # type: ignore[no-any-return]

    def _generate(self, runs: SnapshotRuns, settings: GenerateSettings, chunk: int | None) -> Any:
        """Generate with snapshots; see `generate`."""
        rows, given = settings.rows, settings.cache
        prepared = PreparedRows(None, [0] * len(rows.texts))
        if self._servable(rows.longest) and not settings.whole:
            prepared = runs.prepare(rows, copies=settings.copies, chunk=chunk)
        cache = runs.caches.empty() if prepared.cache is None else prepared.cache
        if given is not None:
            runs.fill(given, prepared)
            cache = given
        output = self._answer(settings, cache)
        sequences: Any = getattr(output, "sequences", output)
        stored = prepared.stored
        if settings.copies == 1 and self._servable(
            rows.longest + sequences.shape[1] - rows.columns + 1
        ):
            stored += runs.keep_answers(settings, prepared, sequences, cache)
        self.last = ReuseReport(sum(map(len, rows.texts)), prepared.loaded, stored, prepared.shared)
        return output

    def _answer(self, settings: GenerateSettings, cache: Cache) -> Any:
        """Call the model's own ``generate``, which goes on behind ``cache``."""
        # The passes over a cache of the user may be compiled: they are left alone.
        listening = self._clock.listening() if settings.cache is None else nullcontext()
        with listening:
            return self.model.generate(  # type: ignore[operator]
                **settings.passed, past_key_values=cache
            )

    def load(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> LoadedPrefix:
        """Return a cache with the stored KV of ``input_ids``, except their last token.

        ``input_ids`` are [tokens], or [rows, tokens] padded on the left; of several rows, only
        columns whose KV is stored for all rows are loaded. The cache belongs to the caller, on the
        model's device; pass it to ``model.generate`` with all of ``input_ids``, or to ``model``
        with the rest.
        """
        self._check_model()
        rows = rows_of(input_ids, attention_mask)
        if self._runs is not None:
            servable = self._servable(rows.longest)
            loaded = self._runs.load(rows) if servable else (self._runs.caches.empty(), 0, None)
            return self._loaded(*loaded)
        prefill = Prefill(self.model, self.store.geometry, rows, clock=self._clock)
        if self._servable(rows.longest):
            prefill.load(self._get)
        tokens = min(prefill.levels) if any(prefill.known) else 0
        ends = [(prefill.exact(row), pad) for row, pad in enumerate(rows.pads)]
        exact = min((end + pad for end, pad in ends if end is not None), default=None)
        return self._loaded(prefill.cache(tokens), tokens, exact)

    def _loaded(self, cache: Cache, tokens: int, exact: int | None) -> LoadedPrefix:
        """Return a cache, of which only ``exact`` leading columns are exact, for `save`."""
        if exact is not None and exact < tokens:
            self._exact[cache] = exact
        return LoadedPrefix(cache, tokens)

    def save(
        self,
        input_ids: torch.Tensor,
        past_key_values: Cache,
        attention_mask: torch.Tensor | None = None,
    ) -> int:
        """Store the KV of ``input_ids`` in ``past_key_values``; return the tokens newly stored.

        ``past_key_values`` is a dynamic or static cache that the model filled while it computed the
        first of ``input_ids``, [tokens] or [rows, tokens]. Returns before the slower tiers have
        written the KV; ``store.flush()`` waits for them. Of a cache that `load` returned, tiers
        with an exact codec take the tokens before the first that came from a lossy one.

        Raises:
            InvalidValue: this is no cache; it holds more tokens than ``input_ids``, other rows, or
                not all tokens of a layer (a sliding window was exceeded: use the cache of `load`).
        """
        self._check_model()
        rows = rows_of(input_ids, attention_mask)
        check_cache(past_key_values)
        exact = self._exact.get(past_key_values)
        columns = length_of(past_key_values)
        if columns > rows.columns:
            raise InvalidValue(
                f"the cache holds {columns} tokens and input_ids are {rows.columns}; pass all "
                "tokens whose KV it has"
            )
        if not columns:
            return 0
        if self._runs is not None:
            if not self._servable(rows.longest + 1):
                return 0
            return self._runs.save(rows, past_key_values, columns, exact)
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
                    "returns"
                )
        return sum(
            self._rows.store(
                text,
                past_key_values,
                row,
                pad,
                exact=None if exact is None else max(0, exact - pad),
            )
            for row, (text, pad) in enumerate(zip(rows.texts, rows.pads, strict=True))
            if self._servable(rows.longest + 1)
        )

    def close(self) -> None:
        """Close the store if this object opened it, after writing queued blocks."""
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

    def _begin(self, settings: GenerateSettings, prefill: Prefill) -> tuple[Cache, int]:
        """Return the cache that `generate` continues from, and the tokens already stored.

        A cache that the user passed may have windows or a fixed size. It is filled after the
        prompts were stored, with all but their last token.
        """
        rows, given = settings.rows, settings.cache
        if not self._servable(rows.longest) or settings.whole:
            return grown(()) if given is None else given, 0
        prefill.load(partial(self._get, pays=self._paying))
        prefill.share()
        if given is None:
            cache = prefill.reach(rows.columns, last=False)
            if settings.copies > 1:
                cache.batch_repeat_interleave(settings.copies)
            return cache, 0
        cache = prefill.reach(rows.columns - 1, last=True)
        stored = self._rows.store_prompts(prefill, rows, cache)
        if settings.copies > 1:
            cache.batch_repeat_interleave(settings.copies)
        fill(given, cache)
        return given, stored

    def _get(self, text: TokenArray, start: int, *, pays: bool = False) -> Get:
        """Load KV, for `Prefill`."""
        return self.store.get(text, start, tenant=self._tenant, form="tuples", pays=pays)

    def _check_model(self) -> None:
        """Raise `IllegalStep` if the model changed, or is in training mode."""
        if (what := self._watch.changed()) is not None:
            # Moving to another device, or writing the same numbers, does not change the identity.
            if model_identity(self.model) != self._identity:
                raise IllegalStep(
                    f"the model was changed since this KeptModel was made: {what}. Its store holds "
                    "KV of the model as it was; make another KeptModel"
                )
            self._watch = ModelWatch(self.model)
        if self.model.training:
            raise IllegalStep("the model is in training mode; call model.eval() first")

    def _servable(self, tokens: int) -> bool:
        """Whether the KV of ``tokens`` tokens is the same in shorter and longer texts."""
        return self._longest is None or tokens < self._longest
