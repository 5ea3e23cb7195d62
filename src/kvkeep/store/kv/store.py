"""KVStore: the KV of prompts, kept by their tokens beyond the GPU, the process and the machine."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import repeat
from time import time
from typing import TYPE_CHECKING, Final, Literal

from kvkeep.core.errors import (
    IllegalStep,
    InvalidValue,
    UnsupportedModel,
    check_type,
    number,
    switch,
    told,
    whole,
)
from kvkeep.core.extras import as_extras
from kvkeep.core.geometry import KVGeometry, parse_bytes
from kvkeep.core.public import PublicPrefixes
from kvkeep.core.returns import Ended
from kvkeep.core.tokens import as_tokens
from kvkeep.store.blocks.base import (
    Lookup,
    Store,
    StoreStats,
    closed_is_illegal,
    runs_of,
    seconds_of,
)
from kvkeep.store.identity import is_loaded
from kvkeep.store.kv.forms import BASE, RecordForms, Snapshot, window_start
from kvkeep.store.kv.misses import first_miss, misses_behind, state_miss
from kvkeep.store.kv.names import TenantNames, store_namespace
from kvkeep.store.kv.paying import choose_load
from kvkeep.store.kv.positions import (
    PositionFinder,
    PromptIds,
    ids_and_sizes,
    stored_prefix,
)
from kvkeep.store.kv.prompts import Prefetch, load_pieces, tokens_by_tier
from kvkeep.store.kv.transfers import Transfers
from kvkeep.store.tiers import PROMPT_TOKENS, Chain, TenantWeights

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from kvkeep.core.cost import CostModel
    from kvkeep.core.extras import ExtraLike
    from kvkeep.core.tokens import TokensLike
    from kvkeep.store.backends import Backend
    from kvkeep.store.blocks.base import Put
    from kvkeep.store.kv.forms import KV, Layout
    from kvkeep.store.kv.paying import LoadChoice, LoadPiece
    from kvkeep.store.kv.positions import Position
    from kvkeep.store.kv.transfers import Get, Loaded
    from kvkeep.store.tiers import Miss, Removed, TieredStore, TieringPolicy

__all__ = ["KVStore"]

_UNKNOWN = Ended()
_PIN_TRIES: Final = 8  # positions that a pin tries, ever shorter: pins have a most of bytes


class KVStore(Store):
    """The KV of one model, stored in blocks of ``block_tokens`` tokens over several tiers.

    A block's key is a hash of all tokens up to its end and of a namespace: model, revision, dtype,
    geometry, layout, block size, tenant, LoRA and rank. Two stores over the same tiers find each
    other's blocks when all of these agree.

    A tier that fails, hangs or returns wrong bytes makes no call fail: `get` returns less, `put`
    drops blocks, and `stats` counts both. Exceptions report mistakes of the caller.

    Whole blocks of prefixes in ``public`` (`kvkeep.core.public`) are stored once for all tenants.

    Args:
        geometry: KV shape of the model, or of one rank.
        model: a loaded ``torch.nn.Module`` or a model directory, whose
            `kvkeep.store.model_identity` becomes the revision; or ``"name@revision"``; or a name
            together with ``revision``.
        tiers: URLs, fastest first, or backends; see docs/store.md. All reads and writes pass
            through memory, so if the first tier is no ``memory://``, a buffer for four prompts of
            4,096 tokens is put in front: at least 256 MiB, at most a tenth of the free memory.
        layout: layout of the caller's tensors, "NHD" or "HND"; blocks are stored in it.
        block_tokens: tokens of a block, the unit in which KV is found and moved.
        tenant: the default tenant; calls can name another one.
        lora, rank: further parts of the namespace.
        policy: decides which blocks move to which tier; `kvkeep.store.tiers.Inclusive` by default.
        quotas: for tenants with a limit, the bytes that each may hold in a tier.
        shares: weights by which tenants share each tier with a size: who stores beyond its share
            evicts its own KV first, and others use what a tenant leaves. A tenant without a weight
            has 1, so ``{}`` shares equally. By default tenants have no shares. (docs/tenants.md)
        snapshots: keep each group of layers apart, with `put_snapshot` and `get_snapshot`: windows
            without what lies behind them, and states. By default only if the layers differ in what
            they keep; if they differ in their windows alone, `put` and `get` keep them whole.
        cost: what loading and computing take, as far as it is known; it learns from here on. An
            engine that uses the same object learns it, too. A new one by default. (docs/cost.md)

    Raises:
        InvalidValue: an argument is wrong; nothing stays open.

    Attributes:
        geometry: of the model.
        namespace: everything on which the bytes of the KV depend.
        block_tokens: tokens of a block.
        public: the prefixes that all tenants share.

    Notes
    -----
    Thread safety: all methods. After the store is closed, also by another thread during a call,
    all methods raise `IllegalStep`, except `close`, `root`, `stats` and `check`.

    Cost: `put` hashes the prompt and copies new blocks once; background threads write the slower
    tiers. `get` copies once; several threads read ahead blocks that are not in memory.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        *,
        model: str | torch.nn.Module,
        revision: str = "",
        tiers: Sequence[str | Backend] = ("memory://1GiB",),
        layout: Layout = "NHD",
        block_tokens: int = 256,
        tenant: str = "",
        lora: str = "",
        rank: str = "",
        policy: TieringPolicy | None = None,
        quotas: Mapping[str, int | str] | None = None,
        shares: Mapping[str, float] | None = None,
        snapshots: bool | None = None,
        cost: CostModel | None = None,
    ) -> None:
        check_type("geometry", geometry, KVGeometry, "a KVGeometry")
        if snapshots is None:
            snapshots = not geometry.plain
        elif not switch("snapshots", snapshots):
            geometry.needs_plain("KVStore(…, snapshots=False)")
        check_type("quotas", quotas, Mapping | None, "a limit by tenant, as {'a': '1GiB'},")
        if shares is not None and not isinstance(shares, Mapping):
            raise InvalidValue(f"shares are weights by tenant, as {{'a': 3}}; got {told(shares)}")
        self.geometry = geometry
        self.layout = layout
        self.block_tokens = whole("block_tokens", block_tokens, 1, 1 << 20)
        self._forms = RecordForms(geometry, layout, whole=not snapshots)
        self.namespace = store_namespace(
            geometry, layout, self.block_tokens,
            model=model, revision=revision, tenant=tenant, lora=lora, rank=rank,
            snapshots=bool(snapshots),
        )  # fmt: skip
        revision = self.namespace.revision
        self._identity = revision if is_loaded(revision) else None
        self._binding = threading.Lock()  # of `_identity`
        self.public = PublicPrefixes()
        self._names = names = TenantNames(self.namespace, self.block_tokens, self.public)
        self._counts = Counter[str]()  # of `StoreStats`
        self._counting = threading.Lock()  # of `_counts`
        limits = {names.of(name).space: parse_bytes(each) for name, each in (quotas or {}).items()}
        weights: TenantWeights | None = None
        if shares is not None:
            named = {name: names.of(name).space for name in {*(quotas or {}), *shares, tenant}}
            spaces = {space: name for name, space in named.items()}
            weights = TenantWeights(shares, {names.shared().space: None, **spaces})
        super().__init__(
            tiers, policy, cost, unit="tokens", notes=names.notes, shape=self._forms.block_shape,
            prompt_bytes=geometry.bytes_for(PROMPT_TOKENS), shares=weights,
        )  # fmt: skip
        self._transfers = Transfers(self._tiered, self._forms)
        if weights is not None:
            names.made = partial(_announce, self._tiered)
        self._pin_memory()
        for space, limit in limits.items():
            self._tiered.set_quota(space, limit)
        self._tiered.expect(names.of(None).space)

    def put(
        self,
        tokens: TokensLike,
        kv: KV,
        start: int = 0,
        *,
        wait: bool = False,
        tail: bool = False,
        replace: bool = False,
        answer: int | None = None,
        ended: Ended = _UNKNOWN,
        exact: int | None = None,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> Put:
        """Store the KV of ``tokens[start:]``; blocks that are stored already are skipped.

        Args:
            kv: ``[layers, 2, tokens, heads, dim]`` (NHD), ``[layers, 2, heads, tokens, dim]``
                (HND) or ``[layers, tokens, width]`` (latent attention), or a pair ``(k, v)`` for
                each layer, with or without a leading batch of 1; on any device.
            start: the first token of ``kv``; tokens before the first whole block are not stored.
            wait: return when the slower tiers have written the blocks, or failed to, after at most
                60 seconds a tier; otherwise return when memory has them.
            tail: also store the tokens behind the last whole block. They are found by prompts that
                continue with exactly these tokens.
            replace: first delete stored blocks, as `remove` from the first whole block on. A
                `get` that began before returns old KV only, a later one new KV only, and less of
                it until this call returns. Replacements wait for each other; a concurrent put of
                old KV without ``replace`` may be stored.
            answer: where an answer begins that is complete and ended as ``ended`` says. What of it
                is never read again (`worth`) is not stored, and counted in `Put.unread`. The store
                learns that from `ended`, which is called as well.
            exact: how many leading tokens have exact KV; None: all. From there on it was decoded
                by a lossy codec, or computed behind such KV, and tiers with an exact codec do not
                take it. `Get.exact` of the request's `get` is handed on here.
            extra: ``[(position, bytes)]``: bytes that belong to tokens, such as an image to its
                placeholder. Positions count from ``tokens[0]``. They become part of the keys of
                all blocks from there on.

        Raises:
            InvalidValue: tokens, ``start``, ``exact``, or the shape or dtype of ``kv`` are wrong.
            IllegalStep: the store is closed.
        """
        began = self._begin()
        self._needs(snapshots=False, call="put")
        wait, tail, replace = switch("wait", wait), switch("tail", tail), switch("replace", replace)
        if exact is not None:
            exact = whole("exact", exact, 0)
        prompt = self._prompt(tokens, start, tenant, extra)
        if not start:  # else parts of it were asked for, or put, before
            self._requested(prompt)
        stop = len(prompt)
        if answer is not None:
            stop = self._keep_until(prompt, answer, ended, tenant)
        put = self._transfers.put(
            prompt, kv, stop=stop, wait=wait, tail=tail, replace=replace, exact=exact
        )
        return self._stored(began, len(prompt) - prompt.start, put)

    def window_start(self, layer: int, tokens: int) -> int:
        """Return the first token that ``layer`` needs to go on behind ``tokens`` tokens.

        0 for a layer that keeps every token, and ``tokens`` for one that needs none: at the end of
        a chunk, or with a state alone.

        Raises:
            InvalidValue: the model has no such layer, or ``tokens`` is negative.
        """
        return window_start(self.geometry, whole("layer", layer), whole("tokens", tokens, 0))

    def keep_until(
        self,
        tokens: TokensLike,
        answer: int,
        *,
        ended: Ended = _UNKNOWN,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> int:
        """Return how many tokens of a prompt with its complete answer are worth storing.

        The answer begins at token ``answer``. What follows the returned tokens is never read again
        (`worth`), and is counted and recorded for `why`. `put` with ``answer`` does the same;
        ``extra`` as there.

        Raises:
            InvalidValue: tokens or ``answer`` are wrong.
        """
        self._tiered.check_open()
        return self._keep_until(self._prompt(tokens, 0, tenant, extra), answer, ended, tenant)

    def put_snapshot(
        self,
        tokens: TokensLike,
        snapshot: Snapshot,
        *,
        wait: bool = False,
        replace: bool = False,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> Put:
        """Store everything that resuming behind ``snapshot.tokens`` tokens of ``tokens`` needs.

        Records that are stored already are skipped. The state is written last: it is there only if
        the KV in front of it was stored. The arguments are as in `put`; ``replace`` deletes from
        the first whole block of the snapshot on.

        The result counts tokens from ``snapshot.start`` on. If one record found no room, or the KV
        before ``start`` is not stored, all that were not stored before count as dropped; without
        states, those up to the last end of a block at which all records are stored are kept.

        Raises:
            InvalidValue: the snapshot does not fit the geometry, the layout or the prompt.
            UnsupportedModel: the store keeps blocks of all layers.
            IllegalStep: the store is closed.
        """
        self._needs(snapshots=True, call="put_snapshot")
        began = self._begin()
        prompt = self._prompt(tokens, 0, tenant, extra)
        wait, replace = switch("wait", wait), switch("replace", replace)
        check_type("snapshot", snapshot, Snapshot, "a Snapshot")
        if not snapshot.start:
            self._requested(prompt)
        put = self._transfers.put_snapshot(prompt, snapshot, wait=wait, replace=replace)
        return self._stored(began, snapshot.tokens - snapshot.start, put)

    def _keep_until(self, prompt: PromptIds, answer: int, ended: Ended, tenant: str | None) -> int:
        tokens = len(prompt)
        answer = whole("answer", answer, 0, tokens)
        check_type("ended", ended, Ended, "an Ended(…)")
        first = int(prompt.row[answer]) if answer < tokens else None
        worth = self.worth(tokens - answer, ended=ended, first=first, tenant=tenant)
        stop = max(prompt.start, answer + worth)
        if stop < tokens:
            self._unread(prompt.full[stop // self.block_tokens :], tokens - stop)
        return stop

    def get(
        self,
        tokens: TokensLike,
        start: int = 0,
        *,
        deadline: float | None = None,
        tenant: str | None = None,
        out: KV | None = None,
        sink: Callable[[int, int, KV, str], bool] | None = None,
        form: Literal["tensor", "tuples"] = "tensor",
        sources: list[tuple[str, int]] | None = None,
        pays: bool = False,
        extra: ExtraLike | None = None,
    ) -> Get:
        """Return the KV of the longest stored prefix of ``tokens`` from ``start`` on.

        The result is ``(kv, n)`` with the KV of ``tokens[start : start + n]``, or ``(None, 0)``.
        It ends before the first block that is missing, damaged, or not read in time: `Get.miss`
        says why. `Get.exact` says what of it is exact, for the put of the same request.

        Args:
            deadline: seconds from now.
            out: room for all of ``tokens[start:]``, in any form that `put` takes; the result is
                its beginning. Otherwise new CPU memory is allocated.
            sink: ``sink(start, stop, kv, source)`` is called in this thread for each block in
                order, with the KV of tokens ``start`` … ``stop - 1``, which is the store's memory,
                and its source as in ``sources``; it copies ``kv``, and returns whether more is
                wanted. The result then is ``(None, n)``.
            form: of new memory: one tensor, or "tuples", a pair for each layer.
            sources: a list to which ``(tier, tokens)`` of the tokens read is appended, in order.
            pays: load only what is faster to load than to compute (`worth_loading`), and end a load
                that becomes slower than that. All is loaded until ``cost.prefill`` has observed
                a pass or has a seed.
            extra: as in `put`.

        Raises:
            InvalidValue: tokens, ``start``, ``out`` or ``form`` are wrong.
            IllegalStep: the store is closed.
        """
        began = self._begin()
        given: object = form
        if not isinstance(given, str) or given not in ("tensor", "tuples"):
            raise InvalidValue(f"form is {told(form)}; it is 'tensor' or 'tuples'")
        check_type("sources", sources, list | None, "a list")
        check_type("sink", sink, Callable | None, "a function of each block's KV")
        prompt = self._requested(self._prompt(tokens, start, tenant, extra))
        self._needs(snapshots=False, call="get")
        choose = self._choosing(prompt, len(prompt)) if switch("pays", pays) else None
        loaded = self._transfers.get(
            prompt, out, sink=sink, tuples=form == "tuples", deadline=deadline, choose=choose
        )
        self._loaded(began, len(prompt) - prompt.start, loaded, sources)
        return loaded.get

    def worth_loading(
        self,
        tokens: TokensLike,
        start: int = 0,
        *,
        length: int | None = None,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> LoadChoice:
        """Return how much of the stored prefix of ``tokens`` is worth loading; read no KV.

        `cost` has the expected seconds of both. Tiers teach it what loading takes; the caller
        reports each forward pass: ``store.cost.prefill.observe([(start, stop)], seconds)``. The
        KV of the first ``start`` tokens is there already. ``length`` is that of the prompt, if
        ``tokens`` are only its beginning. ``extra`` as in `put`.

        Raises:
            InvalidValue: tokens, ``start`` or ``length`` are wrong.
            IllegalStep: the store is closed.
        """
        prompt = self._requested(self._prompt(tokens, start, tenant, extra))
        length = len(prompt) if length is None else whole("length", length, len(prompt))
        pieces = load_pieces(self._position(prompt), prompt, self._tiered.names)
        return self._choosing(prompt, length)(pieces)

    def get_snapshot(
        self,
        tokens: TokensLike,
        start: int = 0,
        *,
        limit: int | None = None,
        deadline: float | None = None,
        tenant: str | None = None,
        sources: list[tuple[str, int]] | None = None,
        pays: bool = False,
        extra: ExtraLike | None = None,
    ) -> Snapshot | None:
        """Return the snapshot at the longest stored position of ``tokens``; None if there is none.

        At a position all groups of layers agree: the KV of every token before it, whole windows,
        and a state exactly there. If a record proves damaged, missing or late, the longest shorter
        position is tried.

        Args:
            start: the first token of layers that keep every token; positions up to there, and KV
                in front of it, are not looked for. The caller has them.
            limit: the longest position that is of use; by default all tokens.
            deadline: seconds from now.
            sources, extra: as in `get`.
            pays: as in `get`; the position is loaded whole or not at all.

        The tensors are new, in CPU memory and in the store's layout. Layers with a window have the
        tokens from `window_start` on.

        Raises:
            InvalidValue: tokens, ``start`` or ``limit`` are wrong.
            UnsupportedModel: the store keeps blocks of all layers.
            IllegalStep: the store is closed.
        """
        self._needs(snapshots=True, call="get_snapshot")
        began = self._begin()
        prompt = self._requested(self._prompt(tokens, start, tenant, extra))
        choose = self._choosing(prompt, len(prompt)) if switch("pays", pays) else None
        check_type("sources", sources, list | None, "a list")
        if limit is not None:
            prompt = prompt.cut(whole("limit", limit, prompt.start, len(prompt)))
        loaded = self._transfers.get(prompt, deadline=deadline, choose=choose)
        self._loaded(began, len(prompt) - prompt.start, loaded, sources)
        return loaded.snapshot

    @property
    def snapshots(self) -> bool:
        """Whether this store keeps snapshots; if not, it keeps blocks of all layers."""
        return not self._forms.whole

    def _choosing(self, prompt: PromptIds, length: int) -> Callable[[list[LoadPiece]], LoadChoice]:
        return partial(choose_load, self.cost, prompt.start, length)

    def _loaded(
        self,
        began: float,
        asked: int,
        loaded: Loaded,
        sources: list[tuple[str, int]] | None,
    ) -> None:
        """Count and log a get."""
        tiers = runs_of(loaded.tiers) if began or sources is not None else ()
        if sources is not None:
            sources += tiers
        moved = loaded.tokens
        self._count(gets=1, asked_tokens=asked, hit_tokens=moved)
        if began:
            size = moved * self.geometry.bytes_per_token
            self._log(began, "get", asked=asked, moved=moved, size=size, tiers=tiers)

    def _stored(self, began: float, asked: int, put: Put) -> Put:
        """Count and log a put; return it."""
        self._count(
            puts=1, put_tokens=put.tokens, skipped_tokens=put.skipped, dropped_tokens=put.dropped
        )
        if began:
            tiers = [(self._tiered.memory.name, put.tokens)] if put.tokens else []
            size = put.tokens * self.geometry.bytes_per_token
            self._log(began, "put", asked=asked, moved=put.tokens, size=size, tiers=tiers)
        return put

    def _needs(self, *, snapshots: bool, call: str) -> None:
        """Raise `UnsupportedModel` if ``call`` is for the other kind of store."""
        if snapshots:
            self._tiered.check_open()
            if self._forms.whole:
                raise UnsupportedModel(
                    f"this store keeps blocks of all layers, with put and get; {call} needs "
                    "KVStore(…, snapshots=True)"
                )
        elif not self._forms.whole:
            raise UnsupportedModel(
                f"this store keeps snapshots, as the layers of the model differ; use "
                f"{call}_snapshot instead of {call}"
            )

    @property
    def tiers(self) -> tuple[str, ...]:
        """The names of the tiers, fastest first. The first one is in memory."""
        return self._tiered.names

    def bind(self, identity: str) -> None:
        """Reserve the store for the loaded model with this `kvkeep.store.model_identity`.

        Engines call it before their first `put` or `get`. A store whose revision is the identity
        of a loaded model accepts no other model. A store that was named otherwise is reserved for
        the first model it is bound to until it is closed; only its name tells which model computed
        the KV stored earlier.

        Raises:
            InvalidValue: the store is reserved for another model.
        """
        self._tiered.check_open()
        if not is_loaded(identity):
            raise InvalidValue(
                f"the identity is {told(identity)}; the kvkeep.store.model_identity of a loaded "
                "model is needed"
            )
        with self._binding:
            bound = self._identity = self._identity or identity
        if bound != identity:
            raise InvalidValue(
                f"the store {self.namespace.model!r} holds KV of the model {bound}, and this model "
                f"is {identity}: its weights, configuration or adapters differ; open a store for "
                "it with KVStore(geometry, model=…)"
            )

    def lookup(
        self, tokens: TokensLike, *, tenant: str | None = None, extra: ExtraLike | None = None
    ) -> Lookup:
        """Return how many tokens are stored as a prefix, and in which tiers; read no KV.

        Of snapshots, the longest position at which all groups of layers agree.

        Blocks may be evicted, or prove damaged, before a later `get`. Shared tiers are queried
        about blocks that are not known here. ``extra`` as in `put`.
        """
        prompt = self._requested(self._prompt(tokens, 0, tenant, extra))
        tiered, size, since, stored = self._tiered, prompt.size, time(), 0
        if self._forms.whole:
            position = stored_prefix(tiered, prompt)
        else:
            finder = PositionFinder(tiered, prompt)
            position = finder.longest()
            stored = finder.stored if self._forms.base is not None else 0
        tokens = 0 if position is None else position.tokens
        miss: Miss | None = None
        if stored > tokens:
            ends = range(tokens - tokens % size + size, stored + 1, size)
            miss = state_miss(tiered, prompt, tokens, ends, since)
        elif tokens < len(prompt):
            miss = first_miss(tiered, prompt, tokens, since)
        if position is None:
            return Lookup(0, (), stored, miss)
        parts: Iterable[tuple[str, int]]
        names = map(tiered.names.__getitem__, position.levels)
        if self._forms.whole:
            parts = zip(names, [*repeat(size, tokens // size), tokens % size], strict=False)
        else:
            parts = tokens_by_tier(zip(position.pieces, names, strict=True), tokens, 0)
        return Lookup(tokens, runs_of(parts), max(stored, tokens), miss)

    def _position(self, prompt: PromptIds, *, ask: bool = True) -> Position | None:
        """Return the longest stored position of a prompt, behind its ``start``.

        Without ``ask``, no tier is queried; that is for snapshots.
        """
        if self._forms.whole:
            return stored_prefix(self._tiered, prompt)
        return PositionFinder(self._tiered, prompt, ask=ask).longest()

    def why(
        self,
        tokens: TokensLike,
        start: int = 0,
        *,
        tenant: str | None = None,
        since: float | None = None,
        extra: ExtraLike | None = None,
    ) -> tuple[Miss, ...]:
        """Return why tokens of a prompt are missing: in order, without gaps, to its end.

        ``start`` is the length of the stored prefix, as `lookup` returned it; stored blocks from
        ``start`` on are passed over as well. Stored blocks behind a missing one cannot be used and
        share its fate. ``since`` (Unix seconds): a tier that failed or was late since then counts
        as unavailable even for blocks it holds; give it after a `get` that returned less than was
        found. ``extra`` as in `put`.

        Reads and queries nothing. Cost: a few µs a block behind ``start``.

        Raises:
            InvalidValue: tokens or ``start`` are wrong.
        """
        since = None if since is None else number("since, in Unix seconds,", since)
        return misses_behind(self._tiered, self._prompt(tokens, start, tenant, extra), since)

    def ended(
        self,
        tokens: TokensLike,
        *,
        prompt: int,
        ended: Ended = _UNKNOWN,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> None:
        """Record that a request ended: of ``tokens``, those from ``prompt`` on are its answer.

        The store then recognises the conversation's next prompt, by its tokens alone. It learns
        when conversations return, for tiers with ``policy=returns``, and which tokens of answers
        the next prompt contains (`worth`). ``ended`` says more of the end, if that is known.
        ``extra`` as in `put`.

        Nothing of it is stored: a store that is opened anew begins to learn anew. Cost: about 1 µs
        a block and 20 µs; with ``policy=returns`` 3 µs more for each block that a tier holds.
        `kvkeep.store.tiers.conversations` has the bounds of memory.

        Raises:
            InvalidValue: tokens or ``prompt`` are wrong.
            IllegalStep: the store is closed.
        """
        self._tiered.check_open()
        given = self._prompt(tokens, 0, tenant, extra)
        prompt = whole("prompt", prompt, 0, len(given))
        check_type("ended", ended, Ended, "an Ended(…)")
        conversations, chain = self._tiered.conversations, _chain(given)
        beside: list[bytes] = []
        if conversations.waits is not None:
            # The next prompt may go on where the answer ended, or where it began.
            for end in dict.fromkeys((len(given), prompt)):
                beside += self._beside(given.cut(end))
        conversations.ended(chain, prompt, ended, given.names.space, beside)

    def _beside(self, prompt: PromptIds) -> list[bytes]:
        """Return the ids of records that a prompt has beside its full blocks."""
        if self._forms.whole:
            return [prompt.end(len(prompt))] if len(prompt) % prompt.size else []
        position = self._position(prompt, ask=False)
        pieces = [] if position is None else position.pieces
        return [piece.id for piece in pieces if piece.group != BASE or piece.stop % prompt.size]

    def worth(
        self,
        answer: int,
        *,
        ended: Ended | None = None,
        first: int | None = None,
        tenant: str | None = None,
    ) -> int:
        """Return how many leading tokens of an answer of ``answer`` tokens are worth storing.

        Chat templates leave reasoning out of later prompts, so most tokens of such answers are
        never read again. What share is, the store learns from `ended` and from the prompts that
        follow, by tenant, ``ended.stop``, length and ``first`` token of the answer, which tells
        answers with reasoning from others; until it has seen that answers are not read, all of an
        answer is worth storing. Without ``ended``, the answer may become
        longer, and what is returned holds however it will end.

        Raises:
            InvalidValue: ``answer`` is negative.
        """
        self._tiered.check_open()
        answer = whole("answer", answer, 0)
        first = None if first is None else whole("first", first)
        check_type("ended", ended, Ended | None, "an Ended(…)")
        conversations = self._tiered.conversations
        return conversations.worth(self._names.of(tenant).space, answer, ended, first)

    def unkept(
        self,
        tokens: TokensLike,
        start: int = 0,
        *,
        tenant: str | None = None,
        answer: bool = False,
        unread: bool = False,
        extra: ExtraLike | None = None,
    ) -> None:
        """Record that the full blocks of ``tokens[start:]`` were never put, for `why`.

        The recorded reason is a full queue; with ``answer``, that generated tokens are not to be
        stored; with ``unread``, that answers like this one are never read again (`worth`), which
        also counts in `StoreStats.unread_tokens`. ``extra`` as in `put`.
        """
        self._tiered.check_open()
        prompt = self._prompt(tokens, start, tenant, extra)
        start = prompt.start
        if switch("unread", unread):
            self._unread(prompt.full[start // self.block_tokens :], len(prompt) - start)
            return
        blocks = prompt.full[-(-start // self.block_tokens) :]
        if switch("answer", answer):
            self._tiered.losses.note(blocks, "", "refused", "answer")
        else:
            self._tiered.losses.note(blocks, self._tiered.memory.name, "dropped", "queue full")

    def _unread(self, blocks: Sequence[bytes], tokens: int) -> None:
        self._count(unread_tokens=tokens)
        self._tiered.losses.note(blocks, "", "refused", "unread")

    def touch(
        self, tokens: TokensLike, *, tenant: str | None = None, extra: ExtraLike | None = None
    ) -> None:
        """Count a use of the stored blocks of ``tokens``, whose KV was found elsewhere.

        Engines call it on hits in their own memory; otherwise the most used prefixes would be the
        first to be evicted here. `get` and `put` count as uses themselves. Transfers nothing.
        ``extra`` as in `put`.
        """
        prompt = self._requested(self._prompt(tokens, 0, tenant, extra))
        with closed_is_illegal():
            if self._forms.whole:
                self._tiered.used(prompt.full)
            elif (position := self._position(prompt, ask=False)) is not None:
                self._tiered.used([piece.id for piece in position.pieces])

    def prefetch(
        self,
        tokens: TokensLike,
        start: int = 0,
        *,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> Prefetch:
        """Start to read the KV of ``tokens[start:]`` into memory, for a later `get`.

        Returns at once. Reads at most as much as half of the memory tier holds. ``extra`` as in
        `put`.
        """
        prompt = self._requested(self._prompt(tokens, start, tenant, extra))
        whole = self._forms.whole
        start = prompt.start - prompt.start % prompt.size if whole else 0
        asked = PromptIds(self._forms, prompt.row.copy(), start, prompt.names)
        lengths: list[int] = []

        def plan() -> tuple[list[bytes], list[int]]:  # in a thread: a lookup may query slow tiers
            position = self._position(asked)
            if position is None:
                return [], []
            pieces = position.pieces
            counts = [piece.stop - piece.start if piece.group == BASE else 0 for piece in pieces]
            counts[-1] += position.tokens - start - sum(counts)
            lengths.extend(counts)
            return ids_and_sizes(pieces)

        return Prefetch(self._tiered.prefetch(plan), start, lengths, whole=not whole)

    def pin(
        self,
        tokens: TokensLike,
        seconds: float,
        *,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> int:
        """Protect the stored prefix of ``tokens`` from eviction; return the tokens pinned.

        The pin ends after ``seconds``. It holds in every tier that has the blocks, for at most half
        of each tier. Of snapshots, all that resuming there needs is pinned, or nothing. ``extra``
        as in `put`.
        """
        seconds = seconds_of("seconds", seconds, ends=True)
        prompt, pins = self._prompt(tokens, 0, tenant, extra), self._tiered.pins
        for _ in range(_PIN_TRIES):
            position = self._position(prompt)
            if position is None:
                break
            ids, _ = ids_and_sizes(position.pieces)
            if self._forms.whole:
                count = pins.pin(ids, seconds)
                return position.pieces[count - 1].stop if count else 0
            count = pins.pin_all(ids, seconds)
            if count == len(ids):
                return position.tokens
            # A shorter position may fit: in any case, none behind the last base record that did.
            fits = [piece.stop for piece in position.pieces[:count] if piece.group == BASE]
            prompt = prompt.cut(min(max(fits, default=0), position.tokens - 1))
        return 0

    def unpin(
        self,
        tokens: TokensLike,
        start: int = 0,
        *,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> int:
        """End the pin of a prompt from ``start`` on; return the tokens that were pinned there.

        Blocks with a token before ``start`` stay pinned; of snapshots, those that end before it.
        ``extra`` as in `put`.
        """
        prompt, pins = self._prompt(tokens, start, tenant, extra), self._tiered.pins
        every, start = prompt.behind(0), prompt.start
        if self._forms.whole:
            position = self._position(every)
            pieces = [] if position is None else position.pieces[-(-start // prompt.size) :]
            count = pins.unpin([piece.id for piece in pieces])
            return sum(piece.stop - piece.start for piece in pieces[:count])
        ids = list(every.every(0))
        pinned = pins.pinned(ids)
        tokens_pinned = 0
        for _ in range(_PIN_TRIES if pinned else 0):
            position = self._position(every)  # the longest; those of a shorter one may be pinned
            if position is None:
                break
            if all(piece.id in pinned for piece in position.pieces):
                tokens_pinned = position.tokens
                break
            every = every.cut(position.tokens - 1)
        pins.unpin(list(prompt.every(start)) if start else ids)
        return max(0, tokens_pinned - start)

    def remove(
        self,
        tokens: TokensLike,
        start: int = 0,
        *,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> Removed:
        """Delete the stored blocks of ``tokens[start:]`` from every tier, pinned or not.

        This deletes all blocks with a token from ``start`` on, so ``tokens[:start]`` remains up to
        its last whole block; all tails there, also of shorter prompts; and known blocks of longer
        prompts behind them. The store remembers some 32,000 links between blocks that it put or
        read; other blocks behind remain until they are evicted, and are found only if the same
        prompt is put again. Reads and writes in progress do not bring a block back.

        `Removed.complete` says whether all tiers deleted their blocks; `Removed.failed` names the
        others. Memory of other processes, and their pending writes to shared tiers, are not
        reached. A concurrent `put` of the prompt comes before or after, as a whole or in part.
        The blocks of a public prefix stay; copies that the tenant stored before it was declared, or
        while it was not, are deleted. ``extra`` as in `put`.

        Cost: about 1 µs a token, and one delete of as many names in each shared tier.

        Raises:
            InvalidValue: tokens or ``start`` are wrong.
            IllegalStep: the store is closed.
        """
        prompt = self._prompt(tokens, start, tenant, extra)
        self._tiered.conversations.forget(_chain(prompt), start)
        # Public blocks are not this tenant's to delete; its own copies of them are.
        return self._transfers.remove(prompt)

    def clear(self, *, tenant: str | None = None) -> Removed:
        """Delete all blocks of a tenant in this store's namespace; see `Removed` for failures.

        They are found no more from now on, what is put afterwards is. A tier that fails to list or
        delete, or makes no progress for its timeout, is named in `Removed.failed`: it serves none
        of the old blocks until this store is closed, but other processes find them there, and this
        one after a restart, unless it is cleared again.

        Cost: that of listing every tier, which they do in parallel.
        """
        space = self._names.of(tenant).space
        self._tiered.conversations.clear(space)
        with closed_is_illegal():
            return self._tiered.clear(space)

    def stats(self) -> StoreStats:
        """Return the counts since the store was opened, and the state of every tier."""
        tiers = tuple(self._tiered.stats())
        with self._counting:
            return StoreStats(tiers=tiers, **self._counts)

    def _count(self, **more: int) -> None:
        with self._counting:
            self._counts.update(more)

    def _requested(self, prompt: PromptIds) -> PromptIds:
        """Report a prompt to what follows conversations, if ends of requests are reported."""
        self._tiered.check_open()
        if len(self._tiered.conversations):
            self._tiered.conversations.requested(_chain(prompt))
        return prompt

    def _prompt(
        self, tokens: TokensLike, start: int, tenant: str | None, extra: ExtraLike | None
    ) -> PromptIds:
        """Check the arguments that name a prompt."""
        row = as_tokens(tokens)
        start = whole("start", start, 0, len(row))
        extras = () if extra is None else as_extras(extra, len(row))
        return PromptIds(self._forms, row, start, self._names.of_prompt(tenant, row, extras))

    def __repr__(self) -> str:
        return f"<KVStore of {self.namespace.model} over {self._places}>"


def _announce(tiered: TieredStore, space: bytes, tenant: str | None) -> None:
    """Announce a tenant; a closed store still names blocks (`KVStore.root`)."""
    with suppress(IllegalStep):
        tiered.announce(space, tenant)


def _chain(prompt: PromptIds) -> Chain:
    names = prompt.names
    return Chain(names.root, prompt.full, prompt.size, len(prompt), prompt.row, len(names.public))
