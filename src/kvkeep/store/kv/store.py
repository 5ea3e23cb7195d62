"""KVStore: the KV of prompts, kept by their tokens beyond the GPU, the process and the machine."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, Unpack

from kvkeep.core.errors import InvalidValue, UnsupportedModel, check_type, switch, told, whole
from kvkeep.core.returns import Ended
from kvkeep.store.blocks.stats import Lookup, closed_is_illegal, runs_of
from kvkeep.store.kv.forms import Form
from kvkeep.store.kv.kept import (
    Followers,
    KeptPrompts,
    Prefetch,
    WholeBlocks,
    delete_ids,
    first_miss,
    misses_behind,
)
from kvkeep.store.kv.options import StoreConfig, StoreOptions
from kvkeep.store.kv.paying import choose_load
from kvkeep.store.kv.positions import BASE, PositionFinder, PositionNames
from kvkeep.store.kv.prompts import PromptStore
from kvkeep.store.kv.records import window_start
from kvkeep.store.kv.snapshots import SnapshotTransfers, piece_of, tokens_by_tier
from kvkeep.store.kv.transfers import Get, KVTransfers
from kvkeep.store.tiers import Loss, Miss

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from kvkeep.core.cost import CostModel
    from kvkeep.core.extras import ExtraLike
    from kvkeep.core.geometry import KVGeometry
    from kvkeep.core.tokens import TokensLike
    from kvkeep.store.backends import Backend
    from kvkeep.store.blocks.stats import Put
    from kvkeep.store.kv.forms import KV, Layout
    from kvkeep.store.kv.names import PromptBlocks
    from kvkeep.store.kv.paying import LoadChoice, LoadPiece
    from kvkeep.store.kv.positions import Position
    from kvkeep.store.kv.records import RecordForms, Snapshot
    from kvkeep.store.tiers import Removed, TieredStore, TieringPolicy

__all__ = ["KVStore"]

_PIN_TRIES: Final = 8
"""Positions that a pin tries, ever shorter ones, until one is not larger than pins may be."""

_UNKNOWN = Ended()


class PromptLoads(PromptStore):
    """Reads the KV of prompts: a prefix, or a snapshot.

    Thread safety: all methods.
    """

    def __init__(self, config: StoreConfig) -> None:
        followers = Followers()
        self._whole: KVTransfers | None = None
        self._snapshots: SnapshotTransfers | None = None
        if isinstance(config.form, Form):
            self._whole = KVTransfers(config.form, followers)
            super().__init__(config, WholeBlocks(config.form, followers))
        else:
            self._snapshots = SnapshotTransfers(config.form, followers)
            super().__init__(config, SnapshotRecords(config.form, followers))

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
        slower: list[Miss] | None = None,
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
            slower: a list to which the reasons are appended for tokens that are stored and were
                not loaded because computing is faster.
            extra: as in `put`.

        Raises:
            InvalidValue: tokens, ``start``, ``out`` or ``form`` are wrong.
            IllegalStep: the store is closed.
        """
        began = self._timing.begin()
        given: object = form
        if not isinstance(given, str) or given not in ("tensor", "tuples"):
            raise InvalidValue(f"form is {told(form)}; it is 'tensor' or 'tuples'")
        _check_lists(sources, slower)
        if sink is not None and not callable(sink):
            raise InvalidValue(f"sink is {told(sink)}; a function of each block's KV is needed")
        prompt = self._requested(self._prompt(tokens, start, tenant, extra))
        loaded = self._transfers("get", "get_snapshot").get(
            self._tiered, prompt, out, sink=sink, tuples=form == "tuples", deadline=deadline,
            sources=bool(began) or sources is not None,
            choose=self._choosing(prompt, len(prompt.row)) if switch("pays", pays) else None,
        )  # fmt: skip
        if sources is not None:
            sources += loaded.tiers
        if slower is not None:
            slower += loaded.slower
        self._reporter.get(began, len(prompt.row) - start, loaded)
        return loaded.result

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
        length = len(prompt.row) if length is None else whole("length", length, len(prompt.row))
        with closed_is_illegal():
            pieces = self._kept.pieces(self._tiered, prompt, self.tiers)
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
        slower: list[Miss] | None = None,
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
            pays, slower: as in `get`; the position is loaded whole or not at all.

        The tensors are new, in CPU memory and in the store's layout. Layers with a window have the
        tokens from `window_start` on.

        Raises:
            InvalidValue: tokens, ``start`` or ``limit`` are wrong.
            UnsupportedModel: the store keeps blocks of all layers.
            IllegalStep: the store is closed.
        """
        transfers = self._kept_snapshots("get_snapshot")
        began = self._timing.begin()
        prompt = self._requested(self._prompt(tokens, start, tenant, extra))
        choose = self._choosing(prompt, len(prompt.row)) if switch("pays", pays) else None
        _check_lists(sources, slower)
        if limit is not None:
            limit = whole("limit", limit, start, len(prompt.row))
            prompt = prompt._replace(row=prompt.row[:limit])
        loaded = transfers.get(
            self._tiered, prompt, deadline=deadline, sources=bool(began) or sources is not None,
            choose=choose,
        )  # fmt: skip
        if sources is not None:
            sources += loaded.tiers
        if slower is not None:
            slower += loaded.slower
        self._reporter.get(began, len(prompt.row) - start, loaded)
        return loaded.snapshot

    @property
    def snapshots(self) -> bool:
        """Whether this store keeps snapshots; if not, it keeps blocks of all layers."""
        return self._snapshots is not None

    def _choosing(
        self, prompt: PromptBlocks, length: int
    ) -> Callable[[list[LoadPiece]], LoadChoice]:
        return partial(choose_load, self.cost, prompt.start, length)

    def _transfers(self, call: str, instead: str) -> KVTransfers:
        if self._whole is None:
            raise UnsupportedModel(
                f"this store keeps snapshots, as the layers of the model differ; use {instead} "
                f"instead of {call}"
            )
        return self._whole

    def _kept_snapshots(self, call: str) -> SnapshotTransfers:
        self._tiered.check_open()
        if self._snapshots is None:
            raise UnsupportedModel(
                f"this store keeps blocks of all layers, with put and get; {call} needs "
                "KVStore(…, snapshots=True)"
            )
        return self._snapshots


def _check_lists(sources: object, slower: object) -> None:
    for name, value in (("sources", sources), ("slower", slower)):
        check_type(name, value, list | None, "a list")


class SnapshotRecords(KeptPrompts):
    """Records of each group of layers. A prompt resumes where all of them agree."""

    def __init__(self, forms: RecordForms, followers: Followers) -> None:
        self.block_shape = forms.block_shape
        self._forms = forms
        self._followers = followers

    def _finder(
        self, tiered: TieredStore, prompt: PromptBlocks, *, ask: bool = True
    ) -> PositionFinder:
        return PositionFinder(tiered, PositionNames(self._forms, prompt), ask=ask)

    def lookup(self, tiered: TieredStore, prompt: PromptBlocks, tiers: Sequence[str]) -> Lookup:
        since = time.time()
        finder = self._finder(tiered, prompt)
        position = finder.longest()
        stored = finder.stored if self._forms.base is not None else 0
        tokens = 0 if position is None else position.tokens
        if stored > tokens:
            ends = range(tokens - tokens % finder.size + finder.size, stored + 1, finder.size)
            miss: Miss | None = self._state_miss(tiered, finder.names, tokens, ends, since)
        else:
            miss = first_miss(tiered, prompt, tokens, since)
        if position is None:
            return Lookup(0, (), stored, miss)
        named = [tiers[level] for level in position.levels]
        parts = tokens_by_tier(zip(position.pieces, named, strict=True), position.tokens, 0)
        return Lookup(position.tokens, runs_of(parts), max(stored, position.tokens), miss)

    def pieces(
        self, tiered: TieredStore, prompt: PromptBlocks, tiers: Sequence[str]
    ) -> list[LoadPiece]:
        names = PositionNames(self._forms, prompt)
        position = PositionFinder(tiered, names, start=prompt.start).longest()
        return [] if position is None else [piece_of(position, prompt.start, tiers)]

    def why(
        self, tiered: TieredStore, prompt: PromptBlocks, since: float | None
    ) -> tuple[Miss, ...]:
        row, start, names = prompt
        losses_of = partial(tiered.losses_of, since=since)
        if start == len(row):
            return ()
        ids = PositionNames(self._forms, prompt)
        size = names.block_tokens
        first, stored = start // size, len(row)
        if self._forms.base is not None:
            losses = losses_of(ids.full[first:])
            blocks = first + next((at for at, loss in enumerate(losses) if loss), len(losses))
            tails = [] if blocks * size == len(row) else losses_of(ids.tails(blocks))
            tail = max((count for count, loss in enumerate(tails, start=1) if not loss), default=0)
            stored = max(start, blocks * size + tail)
        # Up to `stored`, the missing records are those that only resuming needs.
        ends = [*range((first + 1) * size, stored + 1, size)]
        if start < stored and stored % size:
            ends.append(stored)
        gap = None
        if stored > start:
            gap = replace(self._state_miss(tiered, ids, start, ends, since), stop=stored)
        if stored == len(row):
            return () if gap is None else (gap,)
        return misses_behind(names, losses_of, row, stored, gap)

    def _state_miss(
        self,
        tiered: TieredStore,
        ids: PositionNames,
        start: int,
        ends: Sequence[int],
        since: float | None,
    ) -> Miss:
        """Return why no state or window at ``ends`` lets a model go on; base records are there."""
        losses = tiered.losses_of(self._beside(ids, ends), since)
        found = [loss for loss in losses if loss and loss.at]
        last = max(found, key=lambda loss: loss.at or 0.0, default=Loss("", "never", None, "state"))
        return Miss(start, max(ends, default=start), *last)

    def _beside(self, ids: PositionNames, ends: Sequence[int]) -> list[bytes]:
        """Return the ids of the states and windows that end at some positions."""
        found = [ids.state(end) for end in ends] if self._forms.states is not None else []
        for group in range(len(self._forms.windows)):
            found += [ids.window(group, end) for end in ends]
        return found

    def touch(self, tiered: TieredStore, prompt: PromptBlocks) -> None:
        position = self._finder(tiered, prompt, ask=False).longest()
        if position is not None:
            tiered.used([piece.id for piece in position.pieces])

    def beside(self, tiered: TieredStore, prompt: PromptBlocks, full: list[bytes]) -> list[bytes]:
        ids = PositionNames(self._forms, prompt, full)
        position = PositionFinder(tiered, ids, ask=False).longest()
        if position is None:
            return []
        size = ids.size
        return [one.id for one in position.pieces if one.group != BASE or one.stop % size]

    def prefetch(self, tiered: TieredStore, prompt: PromptBlocks) -> Prefetch:
        lengths: list[int] = []

        def plan() -> tuple[list[bytes], list[int]]:  # in a thread: a lookup may query slow tiers
            position = self._finder(tiered, prompt).longest()
            pieces = [] if position is None else position.pieces
            lengths.extend(_lengths(position))
            return [piece.id for piece in pieces], [piece.raw_bytes for piece in pieces]

        return Prefetch(tiered.prefetch(plan), 0, lengths, whole=True)

    def pin(self, tiered: TieredStore, prompt: PromptBlocks, seconds: float) -> int:
        for _ in range(_PIN_TRIES):
            position = self._finder(tiered, prompt).longest()
            if position is None:
                break
            ids = [piece.id for piece in position.pieces]
            count = tiered.pins.pin_all(ids, seconds)
            if count == len(ids):
                return position.tokens
            # A shorter position may fit: in any case, none behind the last base record that did.
            fits = [p.stop for p in position.pieces[:count] if p.group == BASE]
            most = min(max(fits, default=0), position.tokens - 1)
            prompt = prompt._replace(row=prompt.row[:most])
        return 0

    def unpin(self, tiered: TieredStore, prompt: PromptBlocks) -> int:
        ids, start = list(PositionNames(self._forms, prompt).every(0)), prompt.start
        pinned = tiered.pins.pinned(ids)
        whole = prompt._replace(start=0)
        tokens = self._longest_pinned(tiered, whole, pinned) if pinned else 0
        if start:
            ids = list(PositionNames(self._forms, prompt).every(start))
        tiered.pins.unpin(ids)
        return max(0, tokens - start)

    def _longest_pinned(self, tiered: TieredStore, prompt: PromptBlocks, pinned: set[bytes]) -> int:
        """Return the longest position whose records are all ``pinned``; longer ones may follow."""
        for _ in range(_PIN_TRIES):
            position = self._finder(tiered, prompt).longest()
            if position is None:
                break
            if all(piece.id in pinned for piece in position.pieces):
                return position.tokens
            prompt = prompt._replace(row=prompt.row[: position.tokens - 1])
        return 0

    def remove(self, tiered: TieredStore, prompt: PromptBlocks) -> Removed:
        tiered.check_open()
        ids = list(PositionNames(self._forms, prompt).every(prompt.start))
        return delete_ids(ids, self._followers, tiered.remove)


def _lengths(position: Position | None) -> list[int]:
    """Return for each record of a position the tokens that it adds; in all, its tokens."""
    if position is None:
        return []
    lengths = [p.stop - p.start if p.group == BASE else 0 for p in position.pieces]
    lengths[-1] += position.tokens - sum(lengths)
    return lengths


class KVStore(PromptLoads):
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
        config = StoreConfig.of(
            geometry, model=model, revision=revision, tiers=tiers, layout=layout,
            block_tokens=block_tokens, tenant=tenant, lora=lora, rank=rank, policy=policy,
            quotas=quotas, shares=shares, snapshots=snapshots, cost=cost,
        )  # fmt: skip
        super().__init__(config)

    @staticmethod
    def shared(name: str, geometry: KVGeometry, **options: Unpack[StoreOptions]) -> KVStore:
        """Return the store called ``name`` in this process; the first caller opens it.

        All callers with the same name and configuration share tiers and counters. Each closes
        its own handle; the last `close` closes the store. ``options`` are the keyword
        arguments of the constructor.

        Raises:
            InvalidValue: the store is open with another configuration; the message names the
                difference.
        """
        given = StoreConfig.of(geometry, **options).compared()
        return KVStore._take(name, given, lambda: KVStore(geometry, **options))

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
        began = self._timing.begin()
        transfers = self._transfers("put", "put_snapshot")
        wait, tail, replace = switch("wait", wait), switch("tail", tail), switch("replace", replace)
        if exact is not None:
            exact = whole("exact", exact, 0)
        prompt = self._prompt(tokens, start, tenant, extra)
        if not start:  # else parts of it were asked for, or put, before
            self._requested(prompt)
        stop = len(prompt.row)
        if answer is not None:
            stop = self._keep_until(prompt, answer, ended, tenant)
        put = transfers.put(
            self._tiered, prompt, kv, stop=stop, wait=wait, tail=tail, replace=replace, exact=exact
        )
        self._reporter.put(began, len(prompt.row) - start, put, self._tiered.memory.name)
        return put

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
        transfers = self._kept_snapshots("put_snapshot")
        began = self._timing.begin()
        prompt = self._prompt(tokens, 0, tenant, extra)
        transfers.check(snapshot, len(prompt.row))
        wait, replace = switch("wait", wait), switch("replace", replace)
        if not snapshot.start:
            self._requested(prompt)
        prompt = prompt._replace(row=prompt.row[: snapshot.tokens])
        put = transfers.put(self._tiered, prompt, snapshot, wait=wait, replace=replace)
        given = snapshot.tokens - snapshot.start
        self._reporter.put(began, given, put, self._tiered.memory.name)
        return put

    def _keep_until(
        self, prompt: PromptBlocks, answer: int, ended: Ended, tenant: str | None
    ) -> int:
        tokens = len(prompt.row)
        answer = whole("answer", answer, 0, tokens)
        check_type("ended", ended, Ended, "an Ended(…)")
        first = int(prompt.row[answer]) if answer < tokens else None
        worth = self.worth(tokens - answer, ended=ended, first=first, tenant=tenant)
        stop = max(prompt.start, answer + worth)
        if stop < tokens:
            self._unread(prompt.names.full(prompt.row)[stop // self.block_tokens :], tokens - stop)
        return stop

    def __repr__(self) -> str:
        return f"<KVStore of {self.namespace.model} over {self._places}>"
