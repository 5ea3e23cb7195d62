"""`Keeper`: between an engine and a store that outlives it.

What a request's prompt has in the store, beyond what the pool has, is fetched while it waits and
written into its pages once it is admitted; what is computed is handed to the store behind it. The
scheduler asks the keeper who should wait a little; the step lets it read and write pages. A store
that fails or hangs costs a request ``timeout`` seconds at most, and never an error.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.core.keys import Namespace
from kvkeep.observe.usage import LoadReport, Notifier, PromptStored, RequestLoaded
from kvkeep.serve.engine.offload.evidence import Evidence
from kvkeep.serve.engine.offload.forms import Forms
from kvkeep.serve.engine.offload.loads import Loads
from kvkeep.serve.engine.offload.writes import Writes
from kvkeep.store import Removed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvkeep.core.cache import PagedCache
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.engine.offload.loads import Load, LoadChunk
    from kvkeep.serve.engine.request import Answer
    from kvkeep.serve.engine.runner import Runner
    from kvkeep.serve.engine.stats import EngineStats
    from kvkeep.store import KVStore

__all__ = ["Keeper"]

# Of those that wait, so many have what they need fetched before it is their turn.
_AHEAD = 8
# A pause of an engine that has nothing to compute: how late it sees that a prefetch is done.
_PAUSE_S = 0.002
# For what is on its way to the store when it is cleared.
_CLEAR_S = 5.0
_FOLDED = "namespace "
# Whose namespaces are remembered, so that all of them can be cleared.
_MOST_TENANTS = 65_536


class Keeper:
    """Moves KV between the pages of one runner and a `KVStore` of the same geometry.

    Only full store blocks are written, and at the ends of prompts and answers the tail behind
    them; what is evicted from the pool was written before, so an eviction writes nothing. Pages
    are read and written by the engine's thread alone, in step with its computing.

    Thread safety: none; it belongs to the engine's thread. Raises `InvalidValue` for a store of
    another geometry or model, or whose blocks are not made of whole pages.
    """

    def __init__(
        self,
        store: KVStore,
        runner: Runner,
        cache: PagedCache,
        did: EngineStats,
        *,
        timeout: float,
        notifier: Notifier | None = None,
    ) -> None:
        if store.geometry != runner.geometry:
            raise InvalidValue(
                f"the store has {store.geometry} and the model {runner.geometry}; make the store "
                "with the runner's geometry"
            )
        if store.block_tokens % runner.page_size:
            raise InvalidValue(
                f"blocks of {store.block_tokens} tokens are not made of pages of "
                f"{runner.page_size}; give the store a multiple of the page size"
            )
        if not 0 <= timeout < float("inf"):
            raise InvalidValue(f"the time to load is some seconds, got {timeout!r}")
        store.bind(runner.identity)
        self._store = store
        self._runner = runner
        self._cache = cache
        self._did = did
        self._notifier = notifier or Notifier()
        self._timeout = timeout
        forms = Forms(runner.tensors, store.layout)
        self._writes = Writes(store, runner.tensors, forms, did)
        self._loads = Loads(store, runner.tensors, forms, self._writes.known, timeout=timeout)
        self._tenants: OrderedDict[Namespace, str] = OrderedDict()  # the oldest are forgotten

    def _tenant(self, namespace: Namespace) -> str:
        tenant = self._tenants.get(namespace)
        if tenant is None:
            tenant = self._tenants[namespace] = self.tenant_of(namespace)
            if len(self._tenants) > _MOST_TENANTS:
                self._tenants.popitem(last=False)
        return tenant

    def tenant_of(self, namespace: Namespace) -> str:
        """The store's tenant for what must not be mixed here.

        The store itself separates models, dtypes and so on; what it does not know of is folded in.
        """
        ours = self._store.namespace
        known = {
            field.name: ""
            for field in fields(namespace)
            if field.name != "tenant"
            and getattr(namespace, field.name) == getattr(ours, field.name)
        }
        rest = replace(namespace, **known)
        if rest == Namespace(tenant=rest.tenant) and not rest.tenant.startswith(_FOLDED):
            return rest.tenant
        return _FOLDED + hashlib.sha256(rest.canonical()).hexdigest()

    # --- before admission --------------------------------------------------------------------

    def look_ahead(self, waiting: list[Answer]) -> None:
        """Begin to fetch what the first of those who wait need."""
        for answer in waiting[:_AHEAD]:
            if answer.load is None:
                answer.load = self._seek(answer)

    def _seek(self, answer: Answer) -> Load:
        tokens, namespace = answer.tokens(), answer.request.namespace
        have = self._cache.match(tokens, namespace).num_tokens
        evidence = None
        if bool(self._notifier.observers):
            evidence = Evidence(len(tokens) - 1, self._runner.page_size, self._store.tiers)
        return self._loads.seek(tokens, namespace, self._tenant(namespace), have, evidence)

    def holds_back(self, answer: Answer) -> bool:
        """Whether ``answer``, whose turn it would be, should wait for what is being fetched."""
        load = answer.load
        if load is None:
            load = answer.load = self._seek(answer)
        if load.settled or not self._loads.wanted(load):
            return False
        now = time.monotonic()
        if load.held_since is None:
            load.held_since = now
        if now - load.held_since < self._timeout:
            return True
        self._did.late_loads += 1
        return False

    # --- while it runs -----------------------------------------------------------------------

    def admitted(self, answer: Answer) -> None:
        """``answer`` has its pages: let what was fetched come into them."""
        sequence, load = answer.sequence, answer.load
        assert sequence is not None
        if load is None:
            return
        self._loads.begin(load, sequence.num_cached)
        if not load.loading:
            answer.load = None
            self._tell(answer, load)
            return
        # What comes is written behind what is copied, into the same page.
        self._runner.copy(sequence.copies())

    def feed(self, running: Iterable[Answer]) -> None:
        """Write what has come into the pages of those who wait for it, and publish it."""
        for answer in running:
            load = answer.load
            if load is None:
                continue
            for piece in self._loads.take(load):
                self._write(answer, piece, load)
                self._loads.give_back(piece)
            if self._loads.through(load):
                self._tell(answer, load)
                self.forget(answer)

    def _write(self, answer: Answer, piece: LoadChunk, load: Load) -> None:
        start, tokens, block, _ = piece
        sequence = answer.sequence
        size = self._runner.page_size
        assert sequence is not None
        count = -(-tokens // size)
        pages = sequence.pages[start // size : start // size + count]
        self._runner.tensors.write(pages, block[:count])
        loaded = start + tokens - answer.computed
        evidence = load.evidence
        if evidence is not None:
            evidence.came(answer.computed, start, tokens, piece.sources)
        answer.computed = start + tokens
        if answer.request.store:
            sequence.publish(answer.computed)
        self._did.loaded_tokens += loaded
        if load.counts:
            self._did.cached_tokens += loaded
            answer.request.note_loaded(loaded)

    def _tell(self, answer: Answer, load: Load, *, called_off: bool = False) -> None:
        """Report what came for a request that was admitted, once."""
        if not self._notifier.observers or not load.counts or load.told:
            return
        load.told = True
        report = LoadReport()  # of what began before anybody watched, nothing was noted
        if load.evidence is not None:
            report = self._loads.report(load, load.evidence, called_off=called_off)
        self._notifier.emit(RequestLoaded(answer.request.record, report))

    def pause(self) -> None:
        """Nothing is to be computed: wait a moment, or less, for something to come."""
        self._loads.news.wait(_PAUSE_S)
        self._loads.news.clear()

    def forget(self, answer: Answer) -> None:
        """Nothing more is loaded for ``answer``."""
        load = answer.load
        if load is not None:
            self._loads.cancel(load)
            answer.load = None
            self._tell(answer, load, called_off=True)

    def keep(self, answer: Answer, *, last: bool = False) -> None:
        """Hand over what is computed of ``answer``; with the ``last`` call its tail, too.

        Cost: nothing until a block is complete, then one read of its pages.
        """
        trail, sequence = answer.trail, answer.sequence
        assert sequence is not None
        if answer.request.store and (last or answer.computed >= trail.next):
            tenant = self._tenant(sequence.namespace)
            watched = bool(self._notifier.observers)
            begun, kept = (time.perf_counter(), self._did.kept_tokens) if watched else (0.0, 0)
            self._writes.offer(trail, sequence, answer.computed, tenant, last=last)
            if watched and (tokens := self._did.kept_tokens - kept):
                seconds = time.perf_counter() - begun
                self._notifier.emit(PromptStored(answer.request.record, tokens, seconds))

    # --- the end -----------------------------------------------------------------------------

    def clear(self, namespace: Namespace | None = None) -> Removed:
        """Delete what the store has of one namespace, or of all seen here.

        Safe from any thread. What running requests go on to write is there again afterwards.
        """
        spaces = list(self._tenants) if namespace is None else [namespace]
        self._writes.flush(_CLEAR_S)  # else it would come back by itself
        removed = [self._store.clear(tenant=self.tenant_of(space)) for space in spaces]
        self._writes.known.clear()
        return _together(self._store.tiers, removed)

    def remove(self, tokens: TokenArray, namespace: Namespace) -> Removed:
        """Delete what the store has of a prompt, as `KVStore.remove` does; safe from any thread.

        What running requests go on to write is there again afterwards.
        """
        self._writes.flush(_CLEAR_S)
        removed = self._store.remove(tokens, tenant=self.tenant_of(namespace))
        self._writes.known.clear()
        return removed

    def close(self, timeout: float) -> bool:
        """Wait until the store has and keeps all that was handed over; whether it came to that."""
        end = time.monotonic() + timeout
        self._loads.close()
        written = self._writes.close(timeout)
        try:
            return self._store.flush(max(0.0, end - time.monotonic())) and written
        except IllegalStep:  # its owner closed it before: that flushed what it had
            return written


def _together(tiers: Sequence[str], removed: Sequence[Removed]) -> Removed:
    """Several removals as one, whose tiers are ``tiers``."""
    freed = dict.fromkeys(tiers, 0)
    for one in removed:
        for name, size in one.tiers:
            freed[name] += size
    failed = {name for one in removed for name in one.failed}
    return Removed(tuple(freed.items()), tuple(name for name in tiers if name in failed))
