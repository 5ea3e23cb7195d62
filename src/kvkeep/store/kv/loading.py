"""`PromptLoads`: the half of `KVStore` that reads the KV of stored prompts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from kvkeep.core.errors import InvalidValue, UnsupportedModel, check_type, switch, told, whole
from kvkeep.store.blocks.stats import closed_is_illegal
from kvkeep.store.kv.forms import Form
from kvkeep.store.kv.groups import SnapshotRecords
from kvkeep.store.kv.kept import WholeBlocks
from kvkeep.store.kv.paying import choose_load
from kvkeep.store.kv.prompts import PromptStore
from kvkeep.store.kv.removal import Followers
from kvkeep.store.kv.snapshots import SnapshotTransfers
from kvkeep.store.kv.transfers import KVTransfers

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.extras import ExtraLike
    from kvkeep.core.tokens import TokensLike
    from kvkeep.store.kv.forms import KV
    from kvkeep.store.kv.names import PromptBlocks
    from kvkeep.store.kv.options import StoreConfig
    from kvkeep.store.kv.paying import LoadChoice, LoadPiece
    from kvkeep.store.kv.snapshot import Snapshot
    from kvkeep.store.tiers import Miss

__all__ = ["PromptLoads"]


class PromptLoads(PromptStore):
    """Reads the KV of prompts: a prefix, or a snapshot.

    Thread safety: all methods.
    """

    def __init__(self, config: StoreConfig) -> None:
        followers = Followers()
        self._form = config.form
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
    ) -> tuple[KV | None, int]:
        """Return the KV of the longest stored prefix of ``tokens`` from ``start`` on.

        The result is ``(kv, n)`` with the KV of ``tokens[start : start + n]``, or ``(None, 0)``.
        It ends before the first block that is missing, damaged, or not read in time.

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
        return loaded.kv, loaded.tokens

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
