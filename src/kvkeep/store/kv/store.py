"""KVStore: the KV of prompts, kept by their tokens beyond the GPU, the process and the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from kvkeep.core.errors import check_type, switch, whole
from kvkeep.core.returns import Ended
from kvkeep.store.kv.loading import PromptLoads
from kvkeep.store.kv.options import StoreConfig, StoreOptions
from kvkeep.store.kv.records import window_start

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from kvkeep.core.cost import CostModel
    from kvkeep.core.extras import ExtraLike
    from kvkeep.core.geometry import KVGeometry
    from kvkeep.core.tokens import TokensLike
    from kvkeep.store.backends import Backend
    from kvkeep.store.blocks.stats import Put
    from kvkeep.store.kv.forms import KV, Layout
    from kvkeep.store.kv.names import PromptBlocks
    from kvkeep.store.kv.snapshot import Snapshot
    from kvkeep.store.tiers import TieringPolicy

__all__ = ["KVStore"]

_UNKNOWN = Ended()


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

        All callers with the same name and configuration share tiers, counters and hooks. Each
        closes its own handle; the last `close` closes the store. ``options`` are the keyword
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
            exact: how many leading tokens have exact KV, where the caller knows. From there on it
                is not, as it was decoded by a lossy codec, or computed behind such KV, and tiers
                with an exact codec do not take it. None: by what this store gave out.
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
