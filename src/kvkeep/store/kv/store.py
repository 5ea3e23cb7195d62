"""KVStore: the KV of prompts, kept by their tokens beyond the GPU, the process and the machine."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, Required, Self, TypedDict, Unpack, cast

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.extras import as_extras
from kvkeep.core.geometry import KVGeometry, parse_bytes
from kvkeep.core.tokens import as_tokens
from kvkeep.store.blocks.pinning import pin_memory
from kvkeep.store.blocks.shared import ClosedUse, SharedStores, places_of
from kvkeep.store.blocks.stats import (
    Lookup,
    Put,
    StoreCounters,
    closed_is_illegal,
    runs_of,
    seconds_of,
)
from kvkeep.store.blocks.timing import Timing
from kvkeep.store.identity import is_loaded
from kvkeep.store.kv.forms import Form
from kvkeep.store.kv.names import Names, store_namespace
from kvkeep.store.kv.removal import Followers, ids_of
from kvkeep.store.kv.why import fates_behind
from kvkeep.store.tiers import Inclusive, TieredStore, TieringPolicy, note_of, open_tiers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    import torch

    from kvkeep.core.extras import ExtraLike
    from kvkeep.core.tokens import TokenArray, TokensLike
    from kvkeep.store.backends import Backend
    from kvkeep.store.blocks.stats import StoreStats
    from kvkeep.store.blocks.timing import Operation
    from kvkeep.store.kv.forms import KV, Layout
    from kvkeep.store.tiers import BlockPrefetch, Miss, Removed

__all__ = ["KVStore", "Prefetch"]

_SHARED: SharedStores[KVStore] = SharedStores("KVStore")
PATIENCE = 60.0
"""Seconds that `KVStore.put` with ``wait`` gives every tier."""


class StoreOptions(TypedDict, total=False):
    """What `KVStore` takes by name."""

    model: Required[str | torch.nn.Module]
    revision: str
    tiers: Sequence[str | Backend]
    layout: Layout
    block_tokens: int
    tenant: str
    lora: str
    rank: str
    policy: TieringPolicy | None
    quotas: Mapping[str, int | str] | None


def _configuration(geometry: KVGeometry, options: StoreOptions) -> dict[str, object]:
    """All that makes a store another store, as it is compared."""
    layout, block_tokens = options.get("layout", "NHD"), options.get("block_tokens", 256)
    namespace = store_namespace(
        geometry, layout, block_tokens,
        model=options.get("model", ""), revision=options.get("revision", ""),
        tenant=options.get("tenant", ""), lora=options.get("lora", ""),
        rank=options.get("rank", ""),
    )  # fmt: skip
    return {
        "geometry": geometry,
        "layout": layout,
        "block_tokens": block_tokens,
        "namespace": namespace,
        "tiers": places_of(options.get("tiers", ("memory://1GiB",))),
        "policy": repr(options.get("policy") or Inclusive()),
        "quotas": dict(options.get("quotas") or {}),
    }


class Prefetch:
    """A prompt's KV on its way into memory.

    Once the store is closed it is `done` and can be cancelled; all else raises `IllegalStep`.

    Thread safety: all methods.
    """

    __slots__ = ("_blocks", "_lengths", "start")

    def __init__(self, blocks: BlockPrefetch, start: int, lengths: Sequence[int]) -> None:
        self._blocks = blocks
        self._lengths = lengths  # filled when it is known what there is
        self.start = start
        """The first token of the first block that was asked for."""

    @property
    def done(self) -> bool:
        """Nothing more comes: all is in memory, or the rest is not to be had."""
        return self._blocks.done

    @property
    def tokens(self) -> int:
        """Tokens of the prompt, from its beginning, that are in memory by now."""
        return self._count(self._blocks.ready)

    @property
    def sources(self) -> tuple[tuple[str, int], ...]:
        """``(tier, tokens)`` of what is in memory by now, in order from `start` on."""
        names = self._blocks.sources
        return runs_of(zip(names, self._lengths, strict=False))

    def wait(self, timeout: float | None = None) -> int:
        """Wait until `done`, ``timeout`` seconds at most; `tokens` then."""
        timeout = None if timeout is None else seconds_of("timeout", timeout)
        return self._count(self._blocks.wait(timeout))

    def cancel(self) -> None:
        """Start no more reads; what is on its way still arrives."""
        self._blocks.cancel()

    def _count(self, ready: int) -> int:
        return self.start + sum(self._lengths[:ready]) if ready else 0


class KVStore:
    """The KV of one model, kept in blocks of ``block_tokens`` under hashes of their tokens.

    Two stores find each other's blocks when they agree on model, revision, dtype, geometry, layout,
    block size, LoRA, rank and tenant: all of that is part of every key.

    A place that fails, hangs or returns wrong bytes never makes a call fail: `get` returns less,
    `put` drops, and `stats` says so. Exceptions are for the caller's mistakes.

    Args:
        geometry: of the model, or of one rank.
        model: a loaded ``torch.nn.Module``, or a model directory, whose identity is then taken
            (`kvkeep.store.model_identity`), or ``"name@revision"``, or a name together with
            ``revision``.
        tiers: URLs, fastest first, or backends; see docs/store.md. What is read and written passes
            through memory, so if the first is no ``memory://``, a buffer of 256 MiB is put there.
        layout: of the caller's tensors, "NHD" or "HND"; blocks are stored as they are.
        block_tokens: tokens of a block: what is found and moved as one.
        tenant, lora, rank: further parts of the namespace; ``tenant`` can be given at each call.
        policy: what moves where; `kvkeep.store.tiers.Inclusive` unless given.
        quotas: bytes that a tenant may hold in each tier, by tenant.

    Raises:
        InvalidValue: one of them is wrong; nothing stays open.

    Notes
    -----
    Thread safety: all methods, from any thread. Once the store is closed, or another thread closes
    it meanwhile, all methods raise `IllegalStep` but `close`, `root`, `stats` and `check`.

    Cost: `put` hashes the prompt and copies what is new once; slower tiers follow in threads of
    theirs. `get` copies once, and reads what is not in memory ahead in several threads.
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
    ) -> None:
        if not isinstance(geometry, KVGeometry):
            raise InvalidValue(f"geometry is {geometry!r}; a KVGeometry is needed")
        if policy is not None and not isinstance(policy, TieringPolicy):
            raise InvalidValue(f"policy is {policy!r}; a TieringPolicy is needed, as Inclusive()")
        self.geometry = geometry
        self.layout = layout
        self.block_tokens = whole("block_tokens", block_tokens, 1, 1 << 20)
        self._form = Form(geometry, layout)
        self.namespace = store_namespace(
            geometry, layout, block_tokens,
            model=model, revision=revision, tenant=tenant, lora=lora, rank=rank,
        )  # fmt: skip
        revision = self.namespace.revision
        # Whose KV this is, once known; a list, so that all users of a `shared` store have the same.
        self._bound = [revision] if is_loaded(revision) else []
        self._binding = threading.Lock()
        self._replacing = threading.Lock()
        self._names: dict[str, Names] = {}
        self._notes: dict[bytes, bytes] = {}
        self._asked = StoreCounters()
        self._timing = Timing("tokens")
        self._followers = Followers()
        limits = {
            self._names_of(tenant).space: parse_bytes(limit)
            for tenant, limit in (quotas or {}).items()
        }
        front, below = open_tiers(tiers, self._form.block_shape)
        self._tiered = TieredStore(front, below, policy, notes=self._notes)
        self._unpin = pin_memory(front.backend)
        for space, limit in limits.items():
            self._tiered.set_quota(space, limit)
        self._tiered.expect(self._names_of(None).space)
        self._shared_as: list[str] = []  # one name, until its user closes it

    @staticmethod
    def shared(name: str, geometry: KVGeometry, **options: Unpack[StoreOptions]) -> KVStore:
        """The store called ``name`` in this process, opened by whoever asks first.

        Everybody who gives the same name and the same configuration gets the same tiers, counters
        and subscribers. Each user closes it once; then it is closed for that user, and the last
        one closes it for all. ``options`` are those of the constructor.

        Raises:
            InvalidValue: the name is open with another configuration; it names what differs.
        """
        unknown = sorted(options.keys() - StoreOptions.__annotations__.keys())
        if unknown:
            raise TypeError(f"KVStore.shared() got an unexpected keyword argument {unknown[0]!r}")
        given = _configuration(geometry, options)
        store = _SHARED.take(name, given, lambda: KVStore(geometry, **options))
        store._shared_as = [name]
        return store

    @property
    def tiers(self) -> tuple[str, ...]:
        """The names of its tiers, fastest first: what is read and written passes the first."""
        return (self._tiered.memory.name, *(tier.name for tier in self._tiered.tiers))

    def bind(self, identity: str) -> None:
        """Say that the KV to come is of the model with this `kvkeep.store.model_identity`.

        Engines call it before their first `put` and `get`. A store whose revision is the identity
        of a loaded model takes no other. One that was named in another way belongs to the first
        model that it is given to, for as long as it is open: its name alone says which model's KV
        was stored before.

        Raises:
            InvalidValue: the store is another model's.
        """
        self._tiered.check_open()
        if not is_loaded(identity):
            raise InvalidValue(
                f"the identity is {identity!r}; what kvkeep.store.model_identity says of a loaded "
                "model is needed"
            )
        with self._binding:
            if not self._bound:
                self._bound.append(identity)
        if self._bound != [identity]:
            raise InvalidValue(
                f"the store {self.namespace.model!r} holds KV of the model {self._bound[0]}, and "
                f"this model is {identity}: its weights, configuration or adapters are others; "
                "open a store for it with KVStore(geometry, model=…)"
            )

    # --- the three that matter -------------------------------------------------------------------

    def put(
        self,
        tokens: TokensLike,
        kv: KV,
        start: int = 0,
        *,
        wait: bool = False,
        tail: bool = False,
        replace: bool = False,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> Put:
        """Keep the KV of ``tokens[start:]``.

        ``kv`` is ``[layers, 2, tokens, heads, dim]`` (NHD), ``[layers, 2, heads, tokens, dim]``
        (HND), ``[layers, tokens, width]`` for latent attention, or a pair ``(k, v)`` a layer, each
        with or without a leading batch of 1; on any device. ``start`` may lie anywhere: what comes
        before the first whole block is left out. What is stored already is skipped, and its bytes
        are not touched. ``tail`` keeps what comes behind the last whole block as well, to be found
        by prompts that go on just so. ``extra`` are bytes that belong to tokens, as those of an
        image to its placeholder: ``[(position, bytes)]``, positions counted from the first of
        ``tokens`` whatever ``start`` is. They are part of the names of the blocks from there on.

        ``replace`` puts it in place of what is stored: that goes first, as by `remove` from the
        first whole block on, and what is known to continue the prompt goes with it. A `get` that
        began before returns old KV alone, one that begins later new KV alone, and less of it until
        this returns. `Put.failed` names tiers that could not delete the old. Replacements wait for
        each other; a put of the old without ``replace`` that goes on meanwhile may be kept.

        Returns as soon as memory has it. With ``wait`` it returns when the slower tiers have it,
        too, or have failed to: 60 seconds at most for each.

        Raises:
            InvalidValue: tokens, ``start``, or the shape or dtype of ``kv`` are wrong.
            IllegalStep: the store is closed.
        """
        began = self._timing.begin()
        row = as_tokens(tokens)
        whole("start", start, 0, len(row))
        self._form.check(kv, len(row) - start)
        names, size = self._names_of(tenant, extra, len(row)), self.block_tokens
        first = -(-start // size)  # the first block that is all there
        full = names.full(row)
        blocks, lengths = full[first:], [size] * max(0, len(full) - first)
        end = len(full) * size
        if tail and max(end, start) < len(row) and start <= end:
            blocks.append(names.tails(full, row[end:])[-1])
            lengths.append(len(row) - end)
        failed: tuple[str, ...] = ()

        def fill(at: int, raw: memoryview) -> None:
            begin = (first + at) * size - start
            self._form.write(self._form.cut(kv, begin, begin + lengths[at]), raw, lengths[at])

        with self._replacing if replace else nullcontext(), closed_is_illegal():
            if replace:
                failed = self._remove(names, row, first * size, self._tiered.supersede).failed
            self._followers.note([*full[:first], *blocks])
            written = self._tiered.write(
                blocks, self._sizes(lengths), fill, wait=PATIENCE if wait else None
            )
        kept = sum(lengths[at] for at in written.kept)
        skipped = sum(lengths[at] for at in written.already)
        dropped = sum(lengths) - kept - skipped
        partial = len(row) - start - sum(lengths)
        self._asked.count(puts=1, put_tokens=kept, skipped_tokens=skipped, dropped_tokens=dropped)
        if began:
            self._timing.end(
                began, "put", asked=len(row) - start, moved=kept,
                size=self._form.raw_bytes(kept), tiers=[(self.tiers[0], kept)] if kept else [],
            )  # fmt: skip
        return Put(kept, skipped, dropped, partial, failed)

    def get(
        self,
        tokens: TokensLike,
        start: int = 0,
        *,
        deadline: float | None = None,
        tenant: str | None = None,
        out: KV | None = None,
        form: Literal["tensor", "tuples"] = "tensor",
        sources: list[tuple[str, int]] | None = None,
        extra: ExtraLike | None = None,
    ) -> tuple[KV | None, int]:
        """The KV of the longest stored prefix of ``tokens`` beyond ``start``, and its tokens.

        ``(kv, n)``: kv is of ``tokens[start : start + n]``, ``(None, 0)`` when nothing is stored.
        Blocks are read in parallel, and end at the first that is missing, bad, or not there
        ``deadline`` seconds from now. ``out`` is room for all of ``tokens[start:]``, in any form
        that `put` takes, to copy into; kv is then its front. Otherwise new CPU memory is taken:
        one tensor, or ``form="tuples"``. ``sources`` is given ``(tier, tokens)`` of what comes, in
        order: where each was read from. ``extra`` as in `put`.

        Raises:
            InvalidValue: tokens, ``start``, ``out`` or ``form`` are wrong.
            IllegalStep: the store is closed.
        """
        began = self._timing.begin()
        row = as_tokens(tokens)
        whole("start", start, 0, len(row))
        if form not in ("tensor", "tuples"):
            raise InvalidValue(f"form is {form!r}; it is 'tensor' or 'tuples'")
        if out is not None:
            self._form.check_room(out, len(row) - start)
        until = None
        if deadline is not None:
            until = time.monotonic() + seconds_of("deadline", deadline)
        names = self._names_of(tenant, extra, len(row))
        blocks, levels, lengths = self._find(names, row, start, until)
        skip = start % self.block_tokens if lengths else 0
        if sum(lengths) <= skip:
            self._got(began, len(row) - start, 0, ())
            return None, 0
        into = (
            self._form.empty(sum(lengths) - skip, tuples=form == "tuples") if out is None else out
        )
        ends = [end - skip for end in accumulate(lengths)]

        def take(at: int, raw: memoryview) -> None:
            begin = ends[at - 1] if at else 0
            part = self._form.cut(into, begin, ends[at])
            self._form.read(raw, lengths[at], part, skip=0 if at else skip)

        left = None if until is None else max(0.0, until - time.monotonic())
        sizes = self._sizes(lengths)
        with closed_is_illegal():
            places: list[str] | None = [] if began or sources is not None else None
            count = self._tiered.read(
                blocks, sizes, take, levels=levels, deadline=left, sources=places
            )
        self._followers.note(blocks[:count])
        got = ends[count - 1] if count else 0
        came: tuple[tuple[str, int], ...] = ()
        if places:
            came = runs_of(zip(places, [lengths[0] - skip, *lengths[1:]], strict=False))
        if sources is not None:
            sources += came
        self._got(began, len(row) - start, got, came)
        return (self._form.cut(into, 0, got), got) if got else (None, 0)

    def _got(self, began: float, asked: int, got: int, tiers: tuple[tuple[str, int], ...]) -> None:
        self._asked.count(gets=1, asked_tokens=asked, hit_tokens=got)
        if began:
            size = self._form.raw_bytes(got)
            self._timing.end(began, "get", asked=asked, moved=got, size=size, tiers=tiers)

    def lookup(
        self,
        tokens: TokensLike,
        *,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> Lookup:
        """How many tokens are stored as a prefix, and in which tiers; transfers nothing.

        A promise it is not: what is found now may be evicted, or turn out bad, before it is read.
        Tiers that others may write to are asked about what is not known here. ``extra`` as in
        `put`.
        """
        row = as_tokens(tokens)
        _, levels, lengths = self._find(self._names_of(tenant, extra, len(row)), row, 0)
        tiers = self.tiers
        names = [tiers[level] for level in levels]
        return Lookup(sum(lengths), runs_of(zip(names, lengths, strict=True)))

    def root(self, *, tenant: str | None = None) -> bytes:
        """The name that stands before the first block of a tenant, for `keepers`."""
        return self._names_of(tenant).root

    def keepers(self, blocks: Sequence[bytes]) -> list[tuple[str, ...]]:
        """The tiers that each of some blocks is known to be in, fastest first, by their names.

        A name is `root` without its last 32 bytes, and a key chained to those by
        `kvkeep.core.keys.chain_keys`. Asks nobody: what others wrote to a shared tier, and was not
        looked up here since, may be missing. Cost: about 1 µs a block and tier.
        """
        tiers = self.tiers
        return [tuple(tiers[level] for level in levels) for levels in self._tiered.holders(blocks)]

    def why(
        self,
        tokens: TokensLike,
        start: int = 0,
        *,
        tenant: str | None = None,
        since: float | None = None,
        extra: ExtraLike | None = None,
    ) -> tuple[Miss, ...]:
        """What became of what is missing of a prompt, behind the first ``start`` tokens.

        ``start`` is what `lookup` found; without it, what is known to be there without asking
        anybody is passed over. In order and without gaps, to the end of the prompt. What lies
        behind a block that is missing, and is there, shares its fate: it cannot be used.

        ``since`` (Unix seconds): a tier that failed or was late since then counts as unavailable,
        also for what it holds: to be asked after a read that brought less than was found.
        ``extra`` as in `put`.

        Reads nothing and waits for nobody. Cost: a few µs a block behind ``start``.

        Raises:
            InvalidValue: tokens or ``start`` are wrong.
        """
        row = as_tokens(tokens)
        whole("start", start, 0, len(row))
        fates_of = partial(self._tiered.losses_of, since=since)
        return fates_behind(self._names_of(tenant, extra, len(row)), fates_of, row, start)

    def unkept(
        self,
        tokens: TokensLike,
        start: int = 0,
        *,
        tenant: str | None = None,
        answer: bool = False,
        extra: ExtraLike | None = None,
    ) -> None:
        """Say that the full blocks of ``tokens[start:]`` were never put.

        For want of time or room; or because they are an ``answer`` that is not to be stored.
        Nothing changes but what `why` tells of them. ``extra`` as in `put`.
        """
        self._tiered.check_open()
        row = as_tokens(tokens)
        whole("start", start, 0, len(row))
        names = self._names_of(tenant, extra, len(row))
        blocks = names.full(row)[-(-start // self.block_tokens) :]
        if answer:
            self._tiered.losses.note(blocks, "", "refused", "answer")
        else:
            self._tiered.losses.note(blocks, self._tiered.memory.name, "dropped", "queue full")

    def touch(
        self,
        tokens: TokensLike,
        *,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> None:
        """Say that a prompt used the KV of ``tokens``, found elsewhere; transfers nothing.

        `get` and `put` say so themselves. Without it, what an engine has in its own memory all the
        time would be what goes first here. Blocks that are not stored are passed over. ``extra`` as
        in `put`.
        """
        row = as_tokens(tokens)
        with closed_is_illegal():
            self._tiered.used(self._names_of(tenant, extra, len(row)).full(row))

    def prefetch(
        self,
        tokens: TokensLike,
        start: int = 0,
        *,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> Prefetch:
        """Start bringing the KV of ``tokens`` beyond ``start`` into memory; returns at once.

        As much as half of the memory tier holds. `get` then finds it there. ``extra`` as in `put`.
        """
        row = as_tokens(tokens)
        whole("start", start, 0, len(row))
        names = self._names_of(tenant, extra, len(row))
        base = start - start % self.block_tokens
        found: list[int] = []

        def plan() -> tuple[list[bytes], list[int]]:
            blocks, _, lengths = self._find(names, row, start)
            found.extend(lengths)
            return blocks, self._sizes(lengths)

        handle = self._tiered.prefetch(plan)
        return Prefetch(handle, base, found)

    # --- keeping and letting go ------------------------------------------------------------------

    def pin(
        self,
        tokens: TokensLike,
        seconds: float,
        *,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> int:
        """Keep what is stored of a prompt from eviction for so long; tokens that are pinned now.

        In every tier that has it, each up to half of the tier. ``extra`` as in `put`.
        """
        seconds = seconds_of("seconds", seconds, ends=True)
        row = as_tokens(tokens)
        blocks, _, lengths = self._find(self._names_of(tenant, extra, len(row)), row, 0)
        return sum(lengths[: self._tiered.pin(blocks, seconds)])

    def unpin(
        self,
        tokens: TokensLike,
        *,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> int:
        """Let a prompt's blocks be evicted again; tokens that were pinned.

        ``extra`` as in `put`.
        """
        row = as_tokens(tokens)
        blocks, _, lengths = self._find(self._names_of(tenant, extra, len(row)), row, 0)
        return sum(lengths[: self._tiered.unpin(blocks)])

    def remove(
        self,
        tokens: TokensLike,
        start: int = 0,
        *,
        tenant: str | None = None,
        extra: ExtraLike | None = None,
    ) -> Removed:
        """Delete what is stored of ``tokens[start:]`` in every tier, pinned or not.

        That is each block with a token from ``start`` on, so ``tokens[:start]`` is kept up to the
        last whole block, and each tail, also those that shorter prompts with the same beginning
        put. Blocks of longer prompts behind that were put or read by this store go with them, as
        far as it remembers them (some 32,000 blocks); others lie there until they are evicted, and
        are found again only when the same prompt is put again. Writes and reads that are on their
        way do not bring it back.

        `Removed.complete` says whether all tiers did; where it is False, `Removed.failed` names
        those that may have some of it still. What other processes hold in their memory, or are
        about to write to a shared tier, is theirs to remove. A `put` of the same prompt in another
        thread comes before or after it, as a whole or in part. ``extra`` as in `put`.

        Cost: about 1 µs a token, and a deletion of as many names in tiers that have to be asked.

        Raises:
            InvalidValue: tokens or ``start`` are wrong.
            IllegalStep: the store is closed.
        """
        row = as_tokens(tokens)
        whole("start", start, 0, len(row))
        names = self._names_of(tenant, extra, len(row))
        return self._remove(names, row, start, self._tiered.remove)

    def _remove(
        self, names: Names, row: TokenArray, start: int, by: Callable[[list[bytes]], Removed]
    ) -> Removed:
        self._tiered.check_open()
        ids = ids_of(names, row, start)
        with closed_is_illegal():
            return by([*ids, *self._followers.take(ids)])

    def clear(self, *, tenant: str | None = None) -> Removed:
        """Delete all blocks of the tenant (of this model, in this store's form).

        Tiers that failed are named; see `Removed`. Takes as long as listing the tiers takes.
        """
        with closed_is_illegal():
            return self._tiered.clear(self._names_of(tenant).space)

    def watch(self, hook: Callable[[Operation], object]) -> Callable[[], None]:
        """Call ``hook`` with an `Operation` after each put and get; returns what ends that.

        In the thread that made the call, before it returns. The logger ``kvkeep.store`` has the
        same at DEBUG.
        """
        self._tiered.check_open()
        return self._timing.watch(hook)

    def flush(self, timeout: float | None = PATIENCE) -> bool:
        """Have the slower tiers hold, as durably as their options say, what was put before.

        True promises it for all that was not dropped; False: some tier could not, or not in
        ``timeout`` seconds.

        Raises `IllegalStep` when another thread closes the store meanwhile.
        """
        timeout = None if timeout is None else seconds_of("timeout", timeout)
        with closed_is_illegal():
            return self._tiered.flush(timeout)

    def close(self, timeout: float = 10.0) -> bool:
        """`flush`, then give threads, files and memory back; a second call does nothing.

        Of a `shared` store, the last user's call does so.
        """
        timeout = seconds_of("timeout", timeout)
        if isinstance(self._tiered, ClosedUse) or self._tiered.inherited:
            return True
        if self._shared_as:
            with suppress(IndexError):  # two threads close it at once
                name = self._shared_as.pop()
                self._tiered = cast("TieredStore", ClosedUse(self._tiered))
                return _SHARED.give_back(name, lambda store: store.close(timeout))
            return True
        self._unpin()
        return self._tiered.close(timeout)

    def stats(self) -> StoreStats:
        """Counts since the start, and every tier at this moment."""
        return self._asked.stats(tuple(self._tiered.stats()))

    def check(self) -> None:
        """Recount everything while nothing is on its way; AssertionError: a fault of kvkeep."""
        self._tiered.check()

    # --- inside ----------------------------------------------------------------------------------

    def _names_of(
        self, tenant: str | None, extra: ExtraLike | None = None, length: int = 0
    ) -> Names:
        """The names of a tenant's blocks; of a prompt of that length with ``extra``, its own."""
        if tenant is None:
            tenant = self.namespace.tenant
        if not isinstance(tenant, str):
            raise InvalidValue(f"tenant is {tenant!r}; it is text")
        names = self._names.get(tenant)
        if names is None:
            if len(self._names) > 4096:
                self._names.clear()
                self._notes.clear()
            namespace = replace(self.namespace, tenant=tenant)
            names = Names(namespace, self.block_tokens)
            self._notes[names.space] = note_of(namespace)
            self._names[tenant] = names
        return names if extra is None else names.having(as_extras(extra, length))

    def _sizes(self, lengths: Sequence[int]) -> list[int]:
        return [self._form.raw_bytes(tokens) for tokens in lengths]

    def _find(
        self, names: Names, row: TokenArray, start: int, until: float | None = None
    ) -> tuple[list[bytes], list[int], list[int]]:
        """Blocks stored of ``row``, from the one with token ``start`` on: ids, levels, tokens."""
        full = names.full(row)
        first = start // self.block_tokens
        with closed_is_illegal():
            levels = self._tiered.locate(full[first:], until)
        upto = first + len(levels)
        blocks, lengths = full[first:upto], [self.block_tokens] * len(levels)
        tail = self._find_tail(names, full[:upto], row[upto * self.block_tokens :], until)
        if tail is not None:
            level = self._tiered.locate([tail[0]], until)
            if level:
                blocks.append(tail[0])
                levels += level
                lengths.append(tail[1])
        return blocks, levels, lengths

    def _find_tail(
        self, names: Names, blocks: list[bytes], rest: TokenArray, until: float | None
    ) -> tuple[bytes, int] | None:
        """The longest tail that is known to follow ``blocks``, and its tokens.

        Places that have to be asked are asked for the whole rest alone.
        """
        rest = rest[: self.block_tokens]
        if not len(rest):
            return None
        ids = names.tails(blocks, rest)
        if len(ids) == self.block_tokens:
            ids.pop()  # that is a whole block, and it was not there
        elif self._tiered.locate(ids[-1:], until):
            return ids[-1], len(ids)
        for count in range(len(ids), 0, -1):
            if self._tiered.knows(ids[count - 1]):
                return ids[count - 1], count
        return None

    def __enter__(self) -> Self:
        self._tiered.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        places = ", ".join(tier.place for tier in self._tiered.stats())
        return f"<KVStore of {self.namespace.model} over {places}>"
