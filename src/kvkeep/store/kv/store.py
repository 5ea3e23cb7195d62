"""KVStore: the KV of prompts, kept by their tokens beyond the GPU, the process and the machine."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, Unpack

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.extras import as_extras
from kvkeep.core.geometry import parse_bytes
from kvkeep.core.tokens import as_tokens
from kvkeep.store.blocks.base import Store
from kvkeep.store.blocks.stats import Lookup, closed_is_illegal, runs_of, seconds_of
from kvkeep.store.kv.binding import ModelBinding
from kvkeep.store.kv.lookup import find_stored
from kvkeep.store.kv.names import Names, PromptBlocks, TenantNames
from kvkeep.store.kv.options import StoreConfig, StoreOptions
from kvkeep.store.kv.prefetch import Prefetch, start_prefetch
from kvkeep.store.kv.removal import Followers, delete_from
from kvkeep.store.kv.reporting import KVReporter
from kvkeep.store.kv.transfers import KVTransfers
from kvkeep.store.kv.why import misses_behind
from kvkeep.store.tiers import TieredStore, open_tiers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from kvkeep.core.extras import ExtraLike
    from kvkeep.core.geometry import KVGeometry
    from kvkeep.core.tokens import TokensLike
    from kvkeep.store.backends import Backend
    from kvkeep.store.blocks.stats import Put, StoreStats
    from kvkeep.store.kv.forms import KV, Layout
    from kvkeep.store.tiers import Miss, Removed, TieringPolicy

__all__ = ["KVStore"]


class KVStore(Store):
    """The KV of one model, stored in blocks of ``block_tokens`` tokens over several tiers.

    A block's key is a hash of all tokens up to its end and of a namespace: model, revision, dtype,
    geometry, layout, block size, tenant, LoRA and rank. Two stores over the same tiers find each
    other's blocks when all of these agree.

    A tier that fails, hangs or returns wrong bytes makes no call fail: `get` returns less, `put`
    drops blocks, and `stats` counts both. Exceptions report mistakes of the caller.

    Args:
        geometry: KV shape of the model, or of one rank.
        model: a loaded ``torch.nn.Module`` or a model directory, whose
            `kvkeep.store.model_identity` becomes the revision; or ``"name@revision"``; or a name
            together with ``revision``.
        tiers: URLs, fastest first, or backends; see docs/store.md. All reads and writes pass
            through memory, so a buffer of 256 MiB is put in front if the first tier is no
            ``memory://``.
        layout: layout of the caller's tensors, "NHD" or "HND"; blocks are stored in it.
        block_tokens: tokens of a block, the unit in which KV is found and moved.
        tenant: the default tenant; calls can name another one.
        lora, rank: further parts of the namespace.
        policy: decides which blocks move to which tier; `kvkeep.store.tiers.Inclusive` by default.
        quotas: for tenants with a limit, the bytes that each may hold in a tier.

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
    ) -> None:
        config = StoreConfig.of(
            geometry, model=model, revision=revision, tiers=tiers, layout=layout,
            block_tokens=block_tokens, tenant=tenant, lora=lora, rank=rank, policy=policy,
            quotas=quotas,
        )  # fmt: skip
        self.geometry = geometry
        self.layout = layout
        self.block_tokens = config.block_tokens
        self.namespace = config.namespace
        self._binding = ModelBinding(self.namespace.model, self.namespace.revision)
        self._form = config.form
        self._names = TenantNames(self.namespace, self.block_tokens)
        self._followers = Followers()
        self._transfers = KVTransfers(self._form, self._followers)
        limits = {
            self._names_of(name).space: parse_bytes(limit) for name, limit in config.quotas.items()
        }
        front, below = open_tiers(tiers, self._form.block_shape)
        super().__init__(TieredStore(front, below, policy, notes=self._names.notes), "tokens")
        self._reporter = KVReporter(self._form, self._timing)
        self._pin_memory()
        for space, limit in limits.items():
            self._tiered.set_quota(space, limit)
        self._tiered.expect(self._names_of().space)

    @staticmethod
    def shared(name: str, geometry: KVGeometry, **options: Unpack[StoreOptions]) -> KVStore:
        """Return the store called ``name`` in this process; the first caller opens it.

        All callers with the same name and configuration share tiers, counters and hooks. Each
        closes its own handle; the last `close` closes the store. ``options`` are the keyword
        arguments of the constructor.

        Raises:
            InvalidValue: the store is open with another configuration; the message names the
                difference.
        """
        given = StoreConfig.of(geometry, **options).compared()
        return KVStore._take(name, given, lambda: KVStore(geometry, **options))

    @property
    def tiers(self) -> tuple[str, ...]:
        """The names of the tiers, fastest first. The first one is in memory."""
        return (self._tiered.memory.name, *(tier.name for tier in self._tiered.tiers))

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
        self._binding.bind(identity)

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
            extra: ``[(position, bytes)]``: bytes that belong to tokens, such as an image to its
                placeholder. Positions count from ``tokens[0]``. They become part of the keys of
                all blocks from there on.

        Raises:
            InvalidValue: tokens, ``start``, or the shape or dtype of ``kv`` are wrong.
            IllegalStep: the store is closed.
        """
        began = self._timing.begin()
        prompt = self._prompt(tokens, start, tenant, extra)
        put = self._transfers.put(self._tiered, prompt, kv, wait=wait, tail=tail, replace=replace)
        self._reporter.put(began, len(prompt.row) - start, put, self._tiered.memory.name)
        return put

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
        """Return the KV of the longest stored prefix of ``tokens`` from ``start`` on.

        The result is ``(kv, n)`` with the KV of ``tokens[start : start + n]``, or ``(None, 0)``.
        It ends before the first block that is missing, damaged, or not read in time.

        Args:
            deadline: seconds from now.
            out: room for all of ``tokens[start:]``, in any form that `put` takes; the result is
                its beginning. Otherwise new CPU memory is allocated.
            form: of new memory: one tensor, or "tuples", a pair for each layer.
            sources: a list to which ``(tier, tokens)`` of the tokens read is appended, in order.
            extra: as in `put`.

        Raises:
            InvalidValue: tokens, ``start``, ``out`` or ``form`` are wrong.
            IllegalStep: the store is closed.
        """
        began = self._timing.begin()
        if form not in ("tensor", "tuples"):
            raise InvalidValue(f"form is {form!r}; it is 'tensor' or 'tuples'")
        prompt = self._prompt(tokens, start, tenant, extra)
        loaded = self._transfers.get(
            self._tiered, prompt, out, tuples=form == "tuples", deadline=deadline,
            sources=bool(began) or sources is not None,
        )  # fmt: skip
        if sources is not None:
            sources += loaded.tiers
        self._reporter.get(began, len(prompt.row) - start, loaded)
        return loaded.kv, loaded.tokens

    def lookup(
        self, tokens: TokensLike, *, tenant: str | None = None, extra: ExtraLike | None = None
    ) -> Lookup:
        """Return how many tokens are stored as a prefix, and in which tiers; read no KV.

        Blocks may be evicted, or prove damaged, before a later `get`. Shared tiers are queried
        about blocks that are not known here. ``extra`` as in `put`.
        """
        found = find_stored(self._tiered, self._prompt(tokens, 0, tenant, extra))
        names = map(self.tiers.__getitem__, found.levels)
        return Lookup(sum(found.lengths), runs_of(zip(names, found.lengths, strict=True)))

    def root(self, *, tenant: str | None = None) -> bytes:
        """Return the block id before the first block of a tenant's prompts, for `keepers`."""
        return self._names_of(tenant).root

    def keepers(self, blocks: Sequence[bytes]) -> list[tuple[str, ...]]:
        """Return, for each block id, the names of the tiers known to hold it, fastest first.

        A block id is `root` without its last 32 bytes, followed by a key of the chain that
        `kvkeep.core.keys.chain_keys` makes from these 32 bytes. Shared tiers are not queried, so
        blocks of other writers that were never looked up here are missing. Cost: about 1 µs a
        block and tier.
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
        row, start, names = self._prompt(tokens, start, tenant, extra)
        return misses_behind(names, partial(self._tiered.losses_of, since=since), row, start)

    def unkept(
        self,
        tokens: TokensLike,
        start: int = 0,
        *,
        tenant: str | None = None,
        answer: bool = False,
        extra: ExtraLike | None = None,
    ) -> None:
        """Record that the full blocks of ``tokens[start:]`` were never put, for `why`.

        The recorded reason is a full queue or, with ``answer``, that generated tokens are not to be
        stored. ``extra`` as in `put`.
        """
        self._tiered.check_open()
        row, start, names = self._prompt(tokens, start, tenant, extra)
        blocks = names.full(row)[-(-start // self.block_tokens) :]
        if answer:
            self._tiered.losses.note(blocks, "", "refused", "answer")
        else:
            self._tiered.losses.note(blocks, self._tiered.memory.name, "dropped", "queue full")

    def touch(
        self, tokens: TokensLike, *, tenant: str | None = None, extra: ExtraLike | None = None
    ) -> None:
        """Count a use of the stored blocks of ``tokens``, whose KV was found elsewhere.

        Engines call it on hits in their own memory; otherwise the most used prefixes would be the
        first to be evicted here. `get` and `put` count as uses themselves. Transfers nothing.
        ``extra`` as in `put`.
        """
        prompt = self._prompt(tokens, 0, tenant, extra)
        with closed_is_illegal():
            self._tiered.used(prompt.names.full(prompt.row))

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
        return start_prefetch(self._tiered, self._form, self._prompt(tokens, start, tenant, extra))

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
        of each tier. ``extra`` as in `put`.
        """
        seconds = seconds_of("seconds", seconds, ends=True)
        found = find_stored(self._tiered, self._prompt(tokens, 0, tenant, extra))
        return sum(found.lengths[: self._tiered.pin(found.ids, seconds)])

    def unpin(
        self, tokens: TokensLike, *, tenant: str | None = None, extra: ExtraLike | None = None
    ) -> int:
        """End the pin of a prompt; return the tokens that were pinned. ``extra`` as in `put`."""
        found = find_stored(self._tiered, self._prompt(tokens, 0, tenant, extra))
        return sum(found.lengths[: self._tiered.unpin(found.ids)])

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
        ``extra`` as in `put`.

        Cost: about 1 µs a token, and one delete of as many names in each shared tier.

        Raises:
            InvalidValue: tokens or ``start`` are wrong.
            IllegalStep: the store is closed.
        """
        prompt = self._prompt(tokens, start, tenant, extra)
        with closed_is_illegal():
            return delete_from(self._tiered, prompt, self._followers, self._tiered.remove)

    def clear(self, *, tenant: str | None = None) -> Removed:
        """Delete all blocks of a tenant in this store's namespace; see `Removed` for failures.

        Cost: that of listing every tier.
        """
        with closed_is_illegal():
            return self._tiered.clear(self._names_of(tenant).space)

    def stats(self) -> StoreStats:
        """Return the counts since the store was opened, and the state of every tier."""
        return self._reporter.counters.stats(tuple(self._tiered.stats()))

    def _names_of(self, tenant: str | None = None) -> Names:
        return self._names.of(tenant)

    def _prompt(
        self, tokens: TokensLike, start: int, tenant: str | None, extra: ExtraLike | None
    ) -> PromptBlocks:
        """Check the arguments that name a prompt."""
        row = as_tokens(tokens)
        whole("start", start, 0, len(row))
        names = self._names_of(tenant)
        if extra is not None:
            names = names.having(as_extras(extra, len(row)))
        return PromptBlocks(row, start, names)

    def __repr__(self) -> str:
        return f"<KVStore of {self.namespace.model} over {self._places}>"
