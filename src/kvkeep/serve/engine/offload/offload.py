"""`Offload`: the engine's side of a store that outlives it.

Once a request is admitted, `Offload` loads the stored prefix of its prompt that the pool lacks into
its pages, if that is expected to be faster than computing it; the rest is computed. While a request
waits, its KV may be read into memory. Computed KV is written to the store in the background. A
store that fails, hangs or is slow costs a request little time, never an error.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.core.keys import Namespace
from kvkeep.core.public import FOLDED
from kvkeep.observe.usage import LoadReport, Notifier, PromptStored, RequestLoaded
from kvkeep.serve.engine.offload.load import Evidence, Load
from kvkeep.serve.engine.offload.movers import Mover, PageMover, SnapshotMover
from kvkeep.serve.engine.offload.writes import NEVER
from kvkeep.store import Removed, choose_load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvkeep.core.cache import PagedCache
    from kvkeep.core.cost import CostModel
    from kvkeep.core.pages import PageCopy
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.engine.offload.load import LoadChunk
    from kvkeep.serve.engine.offload.loads import Loads
    from kvkeep.serve.engine.request import Answer
    from kvkeep.serve.engine.runner import Runner
    from kvkeep.serve.engine.stats import EngineStats
    from kvkeep.store import KVStore

__all__ = ["Offload"]

_LOOKUP_S: Final = 0.02  # for which a lookup is waited for at least …
_LOOKUP_SHARE: Final = 0.02  # … and this part of what computing the prompt takes
_RELEARN_S: Final = 10.0  # after which a tier is read again, as it may have become fast


def lookup_patience_s(compute_s: float | None, timeout: float) -> float:
    """Return the seconds that a prompt waits for its lookup, if computing it takes ``compute_s``.

    None: unknown.
    """
    if compute_s is None:
        return timeout
    return min(timeout, max(_LOOKUP_S, _LOOKUP_SHARE * compute_s))


class LoadPlanner:
    """Plans the loads of one engine, oldest prompt first.

    A prompt waits for its lookup, and then for its read if that is expected to pay, until one
    deadline: when computing would be as fast, or the read is much later than expected; ``timeout``
    seconds while the cost of computing is unknown. Behind what has come by then, it is computed. A
    prompt of which nothing comes for ``timeout`` seconds does not wait any longer.

    ``step_tokens`` are the most of a pass, ``token_bytes`` those of a token's KV. Thread safety:
    none; the engine's thread calls it.
    """

    def __init__(
        self,
        loads: Loads,
        cost: CostModel,
        *,
        step_tokens: int,
        token_bytes: float,
        timeout: float,
    ) -> None:
        self.choose_load = choose_load
        """The decision; benchmarks replace it."""
        self._loads = loads
        self._cost = cost
        self._step_tokens = step_tokens
        self._token_bytes = token_bytes
        self.timeout = timeout

    def waiting(self, running: Iterable[Answer], end: Callable[[Load], None]) -> set[int]:
        """Return the `id` of each answer that is not computed now, because KV of it may come.

        ``end`` is called for each load that has ended: nothing more of it is worth waiting for.
        """
        prompts = [answer for answer in running if not answer.decoding]
        waits: set[int] = set()
        if not any(answer.loading for answer in prompts):
            return waits
        now = time.monotonic()
        compute_free_s = load_free_s = 0.0
        for answer in prompts:
            load, begin = answer.load, answer.computed
            if load is not None and not load.done:
                if not load.answered:
                    if self._waits_for_lookup(answer, load, now):
                        waits.add(id(answer))
                elif self._waits_for_read(answer, load, now, compute_free_s, load_free_s):
                    waits.add(id(answer))
                    load_free_s = max(load_free_s, load.ends_at - now)
                    begin = load.stop
                else:
                    end(load)
            compute_free_s += self._compute_s(begin, answer.num_tokens)
        return waits

    def _waits_for_lookup(self, answer: Answer, load: Load, now: float) -> bool:
        """Whether to wait for a lookup; else the prompt is computed until it is answered."""
        seconds = None
        if self._cost.prefill.known:
            seconds = self._compute_s(answer.computed, answer.num_tokens)
        return now - load.alive_at <= lookup_patience_s(seconds, self.timeout)

    def _waits_for_read(
        self, answer: Answer, load: Load, now: float, compute_free_s: float, load_free_s: float
    ) -> bool:
        """Whether to wait for a read, which is queued if it pays and has not begun."""
        if load.has_read:
            return True  # its last chunks are not written yet
        if load.deadline is not None and (
            now > load.deadline or now - max(load.alive_at, self._loads.alive_at) > self.timeout
        ):
            load.late = True
            return False
        if load.reading:
            return True
        start = answer.computed
        pieces = load.pieces(start, self._token_bytes, whole=self._loads.whole)
        if not pieces or load.found - start < self._loads.page_size or self._loads.stuck:
            return False
        choice = self.choose_load(
            self._cost, start, answer.num_tokens, pieces, compute_s=self._compute_s,
            compute_free_s=compute_free_s, load_free_s=load_free_s,
        )  # fmt: skip
        if load.evidence is not None:
            load.evidence.choice = choice
        if not choice.pays:
            if self._cost.reading(pieces[-1].tier).age_s > _RELEARN_S:
                self._loads.relearn(load, start)
            return False
        load.stop, load.ends_at = choice.tokens, now + load_free_s + choice.load_s
        if load.deadline is None:
            load.alive_at = now
            patience = self.timeout if choice.patience_s is None else choice.patience_s
            load.deadline = now + patience
        self._loads.queue(answer.order, load, start)
        return True

    def _compute_s(self, start: int, stop: int) -> float:
        """Return the seconds to compute tokens in passes of the engine; 0 if unknown."""
        seconds = self._cost.prefill.prefill_s(start, stop)
        more = math.ceil((stop - start) / self._step_tokens) - 1
        return seconds + max(0, more) * self._cost.prefill.cost.seconds_fixed


class LossyPages:
    """Which pages of a pool begin KV that is not exact, for all answers that share them.

    Pages are marked where the inexact KV of a sequence begins: what lies behind one is not exact
    either. Thread safety: none; the engine's thread calls it. Memory: at most one number a page.
    """

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._pages: set[int] = set()

    def copied(self, copies: Iterable[PageCopy]) -> None:
        """Mark the copies of marked pages."""
        if self._pages:
            for copy in copies:
                (self._pages.add if copy.src in self._pages else self._pages.discard)(copy.dst)

    def loaded(self, answer: Answer, exact: int) -> None:
        """Note that the KV of ``answer`` is not exact from token ``exact`` on."""
        before = answer.trail.exact
        answer.trail.exact = exact if before is None else min(before, exact)
        self.follow(answer)

    def follow(self, answer: Answer) -> None:
        """Note of ``answer`` what its cached pages are, and of its pages what the answer is."""
        trail, sequence = answer.trail, answer.running_sequence
        if not self._pages and trail.exact is None:
            return
        pages = sequence.pages.tolist()
        cached = -(-sequence.num_cached // self._size)
        first = next((at for at, page in enumerate(pages[:cached]) if page in self._pages), None)
        if first is not None and (trail.exact is None or first * self._size < trail.exact):
            trail.exact = first * self._size
        root = len(pages) if trail.exact is None else trail.exact // self._size
        self._pages.difference_update(pages[cached:root])  # of others that had these pages before
        self._pages.update(pages[root : root + 1])


# Waiting answers, from the front of the queue, whose KV is prefetched.
_AHEAD = 8
# Seconds a step waits for a load when it has nothing to compute.
_PAUSE_S = 0.002
# Seconds for queued writes to reach the store before it is cleared.
_CLEAR_S = 5.0
# Namespaces remembered, for clearing all of them: the oldest are forgotten.
_MOST_TENANTS = 65_536


class Offload:
    """Moves KV between the pages of one runner and a `KVStore` of the same geometry.

    Full store blocks are written when they are computed, and tails at the ends of prompts and
    answers; so what the pool evicts is stored already, and an eviction writes nothing. Only the
    engine's thread reads and writes pages, between its forward passes.

    Thread safety: none, except `clear`, `remove` and `tenant_of`; the engine's thread calls it.
    Raises `InvalidValue` for a store of another geometry or model, or whose blocks are not a
    multiple of the page size.
    """

    def __init__(
        self,
        store: KVStore,
        runner: Runner,
        cache: PagedCache,
        stats: EngineStats,
        *,
        timeout: float,
        step_tokens: int,
        notifier: Notifier | None = None,
    ) -> None:
        if store.geometry != runner.geometry:
            raise InvalidValue(
                f"the store has {store.geometry} and the model {runner.geometry}; make the store "
                "with the runner's geometry"
            )
        if store.snapshots != (runner.layout is not None):
            raise InvalidValue(
                f"the store keeps {'snapshots' if store.snapshots else 'blocks of all layers'}; "
                f"this model needs KVStore(…, snapshots={runner.layout is not None})"
            )
        if store.block_tokens % runner.page_size:
            raise InvalidValue(
                f"blocks of {store.block_tokens} tokens are not made of pages of "
                f"{runner.page_size}; give the store a multiple of the page size"
            )
        if not 0 <= timeout < float("inf"):
            raise InvalidValue(f"load_timeout is 0 seconds or more, got {timeout!r}")
        store.bind(runner.identity)
        self._store = store
        self._runner = runner
        self._cache = cache
        self._stats = stats
        self._notifier = notifier or Notifier()
        kind = PageMover if runner.layout is None else SnapshotMover
        self._mover: Mover = kind(store, runner, stats)
        self._loads = self._mover.loads
        self._planner = LoadPlanner(
            self._loads, store.cost, step_tokens=step_tokens,
            token_bytes=runner.geometry.bytes_per_token, timeout=timeout,
        )  # fmt: skip
        self._lossy = LossyPages(runner.page_size)
        self._admitted: list[Answer] = []  # whose loads were not reported
        self._tenants: OrderedDict[Namespace, str] = OrderedDict()

    def _tenant(self, namespace: Namespace) -> str:
        tenant = self._tenants.get(namespace)
        if tenant is None:
            tenant = self._tenants[namespace] = self.tenant_of(namespace)
            if len(self._tenants) > _MOST_TENANTS:
                self._tenants.popitem(last=False)
        return tenant

    def tenant_of(self, namespace: Namespace) -> str:
        """Return the store's tenant for ``namespace``.

        The store's own namespace separates models, dtypes and so on; a hash in the tenant
        separates what else differs.
        """
        ours = self._store.namespace
        known = {
            field.name: ""
            for field in fields(namespace)
            if field.name != "tenant"
            and getattr(namespace, field.name) == getattr(ours, field.name)
        }
        rest = replace(namespace, **known)
        if rest == Namespace(tenant=rest.tenant) and not rest.tenant.startswith(FOLDED):
            return rest.tenant
        return FOLDED + hashlib.sha256(rest.canonical()).hexdigest()

    # --- before admission --------------------------------------------------------------------

    def prefetch(self, waiting: list[Answer]) -> None:
        """Look up the first of the ``waiting`` answers, and read their KV into memory.

        They are read while no running answer is.
        """
        busy = self._loads.busy
        for answer in waiting[:_AHEAD]:
            load = self.look_up(answer)
            if busy:
                load.end_prefetch()
                load.prefetched = False
            elif load.waited:  # it was not admitted in the step in which it came
                self._loads.prefetch(load)
            load.waited = True

    def look_up(self, answer: Answer) -> Load:
        """Return the answer's load, started now if it has none."""
        if answer.load is None:
            tokens, namespace = answer.tokens(), answer.request.namespace
            in_pool = self._cache.match(tokens[:-1], namespace).num_tokens
            evidence = None
            if self._notifier.observers:
                evidence = Evidence(len(tokens) - 1, self._runner.page_size, self._store.tiers)
            answer.load = Load(tokens, namespace, self._tenant(namespace), in_pool, evidence)
            self._loads.start(answer.load)
        return answer.load

    # --- while it runs -----------------------------------------------------------------------

    def admitted(self, answer: Answer) -> None:
        """Begin to load behind the tokens that the pool has; ``answer`` has its pages now."""
        load = self.look_up(answer)
        answer.trail.exact = None  # it may have had other pages before
        load.admitted(answer.running_sequence.num_cached, self._runner.page_size)
        self._admitted.append(answer)

    def waiting(self, running: Iterable[Answer]) -> set[int]:
        """Return the `id` of each answer that the next pass leaves out: it waits for its load."""
        return self._planner.waiting(running, self._end)

    def receive(self, running: Iterable[Answer]) -> None:
        """Write chunks that have arrived to the pages of their answers, and publish them."""
        for answer in running:
            load = answer.load
            if load is None or load.done:
                continue
            over = load.has_read  # before the chunks: none arrives afterwards
            for chunk in load.take():
                if chunk.start <= answer.computed < chunk.stop:
                    self._restore(answer, load, chunk)
                self._loads.give_back(chunk)
            if over or answer.decoding:
                self._end(load)
        self._report_all()

    def _restore(self, answer: Answer, load: Load, chunk: LoadChunk) -> None:
        """Write a chunk to the pages of its answer, which then goes on behind it."""
        at, sequence = answer.computed, answer.running_sequence
        self.copy(sequence.copies())
        if not self._mover.restore(answer, chunk):
            return
        answer.computed, load.alive_at = chunk.stop, time.monotonic()
        if chunk.exact is not None:  # before others may share its pages
            size = self._loads.page_size  # a page that was computed in part is written as a whole
            self._lossy.loaded(answer, max(chunk.exact, at // size * size))
        if load.evidence is not None:
            load.evidence.came(chunk.start, chunk.sources, at)
        if answer.request.store:
            sequence.publish(chunk.stop)
        self._stats.loaded_tokens += chunk.stop - at
        if load.is_first:
            self._stats.cached_tokens += chunk.stop - at
            answer.request.note_loaded(chunk.stop - at, chunk.lossy(at))

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages in the runner's memory."""
        self._runner.copy(copies)
        self._lossy.copied(copies)

    def _end(self, load: Load) -> None:
        """End a load that is of no more use; its report follows when its read has returned."""
        if load.late or not load.answered:
            self._stats.late_loads += 1
            if load.evidence is not None:
                load.evidence.late()
        load.done = True
        self._loads.cancel(load)

    def _report_all(self) -> None:
        """Report loads that are over."""
        left: list[Answer] = []
        for answer in self._admitted:
            load = answer.load
            if load is None:
                continue
            if not load.done or load.reading:
                left.append(answer)
                continue
            answer.load = None
            self._report(answer, load)
        self._admitted = left

    def _report(self, answer: Answer, load: Load, *, called_off: bool = False) -> None:
        """Report an admitted answer's load to the observers, once."""
        if not self._notifier.observers or not load.is_first or load.reported:
            return
        load.reported = True
        # A load from before the observers came has no evidence, and an empty report.
        report = self._loads.report(load, called_off=called_off) or LoadReport()
        self._notifier.emit(RequestLoaded(answer.request.record, report))

    def pause(self) -> None:
        """Wait until a load makes progress, 2 ms at most; for steps with nothing to compute."""
        self._loads.arrival.wait(_PAUSE_S)
        self._loads.arrival.clear()

    def cancel(self, answer: Answer) -> None:
        """Stop the load of ``answer``, if it has one."""
        load = answer.load
        if load is not None:
            self._loads.cancel(load)
            answer.load = None
            self._report(answer, load, called_off=not load.done)

    def save(self, answer: Answer, *, last: bool = False) -> None:
        """Queue computed blocks of ``answer`` for the store; in the ``last`` call also its tail.

        Cost: nothing until a block is complete, then one read of its pages.
        """
        if answer.request.store and (last or self._mover.has_news(answer)):
            tenant = self._tenant(answer.running_sequence.namespace)
            self._lossy.follow(answer)
            watched = bool(self._notifier.observers)
            began, before = (time.perf_counter(), self._stats.kept_tokens) if watched else (0.0, 0)
            self._hold_back(answer, tenant, last=last)
            if last:
                self._note_withheld(answer, tenant)
            self._mover.offer(answer, tenant, last=last)
            if last:
                self._mover.drop(answer)
                self._tell_end(answer, tenant)
            if watched and (tokens := self._stats.kept_tokens - before):
                seconds = time.perf_counter() - began
                self._notifier.emit(PromptStored(answer.request.record, tokens, seconds))

    def _hold_back(self, answer: Answer, tenant: str, *, last: bool) -> None:
        """Write nothing of an answer that may be never read again, before it has ended, nor then.

        Nothing is held back until the store has learned of answers that are not read.
        """
        trail, prompt = answer.trail, len(answer.request.prompt)
        grown = answer.computed - prompt
        if grown <= 0:
            return
        ended, length = (answer.ended, len(answer.generated)) if last else (None, grown)
        first = answer.generated[0]
        with suppress(IllegalStep):  # its owner has closed the store
            worth = self._store.worth(length, ended=ended, first=first, tenant=tenant)
            trail.held = NEVER if worth >= grown else prompt + worth
            begin, stop = self._mover.held_back(answer)
            if last and begin < min(stop, trail.limit):
                tokens = answer.running_sequence.tokens[:stop]
                self._store.unkept(tokens, begin, tenant=tenant, unread=True)

    def leave(self, answer: Answer, *, resumes: bool = False) -> None:
        """Write what was held back of a running answer that loses its pages before its end.

        If it ``resumes``, it reads all of that again; else the part that is worth it is written.
        """
        trail = answer.trail
        if not answer.request.store or trail.held == NEVER:
            return
        tenant = self._tenant(answer.running_sequence.namespace)
        if resumes:
            trail.held = NEVER
        else:
            self._hold_back(answer, tenant, last=True)
        self._mover.offer(answer, tenant, last=False)
        self._mover.drop(answer)
        trail.held = NEVER

    def _tell_end(self, answer: Answer, tenant: str) -> None:
        """Tell the store of the conversation, which waits from now on."""
        tokens, prompt, ended = answer.tokens(), len(answer.request.prompt), answer.ended

        def tell() -> None:
            with suppress(IllegalStep):  # its owner has closed the store
                self._store.ended(tokens, prompt=prompt, ended=ended, tenant=tenant)

        self._mover.later(tell, tokens.nbytes)

    def _note_withheld(self, answer: Answer, tenant: str) -> None:
        """Tell the store, for `KVStore.why`, of generated tokens that are not to be stored."""
        trail, computed = answer.trail, answer.computed
        if trail.withheld and computed > trail.limit:
            begin = trail.limit // self._store.block_tokens * self._store.block_tokens
            tokens = answer.running_sequence.tokens[:computed]
            with suppress(IllegalStep):  # its owner has closed the store
                self._store.unkept(tokens, begin, tenant=tenant, answer=True)

    # --- the end -----------------------------------------------------------------------------

    def clear(self, namespace: Namespace | None = None) -> Removed:
        """Delete the stored KV of ``namespace``; None: of the namespaces used so far.

        Safe from any thread. Running requests store what they compute afterwards.
        """
        spaces = list(self._tenants) if namespace is None else [namespace]
        self._mover.flush(_CLEAR_S)  # else queued blocks would be stored after the clear
        removed = [self._store.clear(tenant=self.tenant_of(space)) for space in spaces]
        self._mover.known.clear()
        return _together(self._store.tiers, removed)

    def remove(self, tokens: TokenArray, namespace: Namespace) -> Removed:
        """Delete the stored KV of a prompt, as `KVStore.remove` does; safe from any thread.

        Running requests store what they compute afterwards.
        """
        self._mover.flush(_CLEAR_S)
        removed = self._store.remove(tokens, tenant=self.tenant_of(namespace))
        self._mover.known.clear()
        return removed

    def close(self, timeout: float) -> bool:
        """Wait ``timeout`` seconds for all writes to be durable; return whether they are."""
        end = time.monotonic() + timeout
        self._loads.close()
        written = self._mover.close(timeout)
        try:
            return self._store.flush(max(0.0, end - time.monotonic())) and written
        except IllegalStep:  # its owner has closed the store, which flushed it
            return written


def _together(tiers: Sequence[str], removed: Sequence[Removed]) -> Removed:
    """Return the sum of several removals from a store with these ``tiers``."""
    freed = dict.fromkeys(tiers, 0)
    for one in removed:
        for name, size in one.tiers:
            freed[name] += size
    failed = {name for one in removed for name in one.failed}
    return Removed(tuple(freed.items()), tuple(name for name in freed if name in failed))
