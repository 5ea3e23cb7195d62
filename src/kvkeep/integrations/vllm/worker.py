"""The worker's side: loads and saves the pages that the scheduler's side plans."""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvkeep.core.errors import KVKeepError
from kvkeep.core.geometry.units import format_bytes
from kvkeep.integrations.load_choice import LoadPace, ProbeEnd
from kvkeep.integrations.options import LOOKUP_S
from kvkeep.integrations.vllm.groups import BlockReach
from kvkeep.integrations.vllm.kept import Loaders, SharedStore, log_fault, log_start
from kvkeep.integrations.vllm.messages import BlockSpan, LoadEnd, Save, WorkerNews
from kvkeep.integrations.vllm.naming import machine_of, namespace_of, warn_of_seeds
from kvkeep.integrations.vllm.outer import require_own_engine
from kvkeep.integrations.vllm.pages import DeviceCopies, pages_of
from kvkeep.integrations.vllm.stats import Counts
from kvkeep.store.blocks.store import BlockStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvkeep.integrations.load_choice import RunCost
    from kvkeep.integrations.vllm.groups import Groups
    from kvkeep.integrations.vllm.messages import PageLoad, Probe, RankLookup, StepPlan
    from kvkeep.integrations.vllm.options import ConnectorOptions
    from kvkeep.integrations.vllm.pages import GroupPages
    from kvkeep.integrations.vllm.stats import KVKeepStats

__all__ = ["WorkerSide"]

_LOG = logging.getLogger("kvkeep.vllm")
_LOOKUPS = 4  # at a time
# While no request can be computed vLLM runs idle steps in a loop, which takes the interpreter lock
# from the loading threads. So an idle step waits this long for a load or a lookup to end; a new
# request is delayed by as much at most.
_PAUSE_S = 0.002


@dataclass(slots=True)
class _Loading:
    """A load in progress or done; ``missing`` are the pages that were not filled."""

    load: PageLoad
    until: float
    cancelled: bool = False
    missing: list[int] = field(default_factory=list)


class WorkerSide:
    """Moves the pages of one rank. vLLM's thread calls it; separate threads load.

    No failure of the store raises: pages that were not loaded are reported, blocks that were not
    saved are counted.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        options: ConnectorOptions,
        groups: Groups,
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._groups = groups
        self._loaders = Loaders()
        self._lookers = ThreadPoolExecutor(_LOOKUPS, "kvkeep lookup")
        self._teller = ThreadPoolExecutor(1, "kvkeep returns")
        self._prober = ThreadPoolExecutor(1, "kvkeep probe")
        self._loading: dict[str, _Loading] = {}
        self._running: set[Future[None]] = set()  # the threads of loads
        self._done: deque[_Loading] = deque()
        self._lookup_results: deque[tuple[int, BlockReach, list[RunCost]]] = deque()
        self._load_ends: deque[tuple[str, LoadEnd]] = deque()
        self._probe_ends: deque[ProbeEnd] = deque()
        self._errors: set[int] = set()
        self._rests = False
        self._pages: list[GroupPages] = []
        self._device: DeviceCopies | None = None
        self.counts = Counts()
        self.shared: SharedStore | None = None

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Describe the engine's pages, and open the store for them.

        Raises:
            UnsupportedModel: a page is not one piece of memory.
            InvalidValue: a tier's URL is wrong, or the pages belong to another engine.
        """
        require_own_engine(self._vllm_config.kv_transfer_config)
        self._pages, described = pages_of(self._groups, self._kv_cache_config, kv_caches)
        if self.shared is None:  # otherwise vLLM allocated its caches anew: the store stays
            self.shared = self._share(described)
        if self._device is not None:
            self._device.close()
        if self._pages[0].device.type != "cpu":
            self.shared.store.pin_memory()
            self._device = DeviceCopies(self._pages, self._write, self._drop)

    def _share(self, described: str) -> SharedStore:
        """Open the store; ``described`` is the layout of the pages in memory."""
        config = self._vllm_config
        warn_of_seeds(config)
        where = f"{machine_of(config, self._groups.layers, self._pages[0].device)} {described}"
        namespace = namespace_of(config, self._options, self._groups, where)
        sizes = [pages.record_bytes for pages in self._pages]
        states = sum(sizes[at] for at in self._groups.states)
        token_bytes = (sum(sizes) - states) // self._groups.block_tokens
        tiers = self._options.tiers
        store = BlockStore(namespace, tiers=tiers, token_bytes=token_bytes)
        engine = config.kv_transfer_config.engine_id
        rank = config.parallel_config.rank
        shared = SharedStore(engine, store, self._groups, sizes, rank=rank)
        if rank == 0:  # once for each engine
            log_start(store, self._described(sum(sizes) - states, states))
        return shared

    def _described(self, block: int, states: int) -> str:
        """Return what is stored, in words; both arguments are in bytes."""
        words = f"blocks of {self._groups.block_tokens} tokens ({format_bytes(block)})"
        if states:
            words += f" and states ({format_bytes(states)})"
        ranks = self._vllm_config.parallel_config.world_size
        return words if ranks == 1 else f"{words} of rank 0 of {ranks}, each with tiers of its own,"

    # --- loads -----------------------------------------------------------------------------------

    def start(self, plan: StepPlan) -> None:
        """Start the loads and lookups of a step, and pin; return at once."""
        shared = self._open()
        while shared.generation < plan.generation:  # a scheduler in another process was told
            shared.clear()
        # Before the loads: their pages are free, so others may be filled from here on.
        self._save(plan.late, plan.generation)
        if plan.returns:  # in a thread: it takes 3 µs a block of each request that has ended
            self._teller.submit(shared.tell, plan.returns).add_done_callback(log_fault)
        shared.delete_expired()
        for keys, seconds in plan.pins:
            shared.pin(keys, seconds)
        begun = None if self._device is None else self._device.mark()
        for load in plan.loads:
            patience = min(self._options.load_timeout, load.patience)
            loading = _Loading(load, time.monotonic() + patience)
            self._loading[load.request] = loading
            running = self._loaders.submit(
                partial(self._load, loading, begun), until=loading.until,
                cancelled=partial(getattr, loading, "cancelled"),
            )  # fmt: skip
            self._running.add(running)
            running.add_done_callback(self._running.discard)
            running.add_done_callback(log_fault)
        for lookup in plan.lookups:
            self._lookers.submit(self._look_up, lookup).add_done_callback(log_fault)
        for probe in plan.probes:
            self._prober.submit(self._probe, probe).add_done_callback(log_fault)

    def _probe(self, probe: Probe) -> None:
        """In a thread: read a few blocks from a tier, for no request."""
        shared, end = self._open(), ProbeEnd(probe.tier, 0.0, 0.0, came=False)
        try:
            sizes = [shared.sizes[probe.group]] * len(probe.keys)
            end = shared.costs.probe(probe.tier, probe.keys, sizes)
        except KVKeepError as error:
            _LOG.warning("a probe of %s failed: %s", probe.tier, error)
        finally:
            self._probe_ends.append(end)

    def _load(
        self, loading: _Loading, begun: torch.cuda.Event | None, went_on: Callable[[], None]
    ) -> None:
        """In a thread: fill pages in order, up to the first block that does not arrive."""
        shared = self._open()
        started = time.monotonic()
        spans = loading.load.spans
        loading.missing = [page for span in spans for page in span.pages]
        nbytes = sum(len(span.keys) * shared.sizes[span.group] for span in spans)
        filled, late, failed = 0, False, ""
        try:
            for span in spans:
                if loading.cancelled:
                    break
                if self._device is None or begun is None:
                    sink = self._pages[span.group].sinker(span.pages)
                else:
                    sink = self._device.sinker(span, begun)
                size = shared.sizes[span.group]
                share = size * len(span.keys) / nbytes
                read = shared.costs.read(
                    span.keys,
                    [size] * len(span.keys),
                    _telling(sink, went_on),
                    LoadPace(loading.until, loading.load.compute_s * share),
                    lambda: loading.cancelled,
                )
                filled += read.blocks
                late, failed = read.late, read.failed
                if read.blocks < len(span.keys):
                    break
        except KVKeepError as error:
            _LOG.warning("a load ended early: %s", error)
        finally:
            loading.missing = loading.missing[filled:]
            seconds = time.monotonic() - started
            self._count(loading, seconds, late=late)
            self._load_ends.append((loading.load.request, LoadEnd(seconds, failed)))
            self._done.append(loading)
            shared.news.set()

    def _count(self, loading: _Loading, seconds: float, *, late: bool) -> None:
        """Count a load that has ended."""
        if loading.cancelled:
            return
        load, missing = loading.load, len(loading.missing)
        whole = missing and (len(load.spans) > 1 or self._groups.states)
        failed = load.tokens if whole else min(load.tokens, missing * self._groups.block_tokens)
        self.counts.add(
            loaded_tokens=load.tokens - failed, failed_tokens=failed,
            late_tokens=failed if late else 0, load_seconds=seconds,
        )  # fmt: skip
        self._open().count_tiers(self.counts)

    def _look_up(self, lookup: RankLookup) -> None:
        """In a thread: look up blocks in the store, in shared tiers too."""
        shared, there = self._open(), BlockReach(lookup.first, lookup.first)
        runs: list[RunCost] = []
        until = time.monotonic() + LOOKUP_S
        try:
            there = self._groups.reach(
                lookup.hashes,
                lookup.first,
                lambda keys: shared.lookup(keys, max(0.0, until - time.monotonic())),
            )
            runs = shared.runs(lookup.hashes, lookup.first, there.end)
        except KVKeepError as error:
            _LOG.warning("a lookup failed: %s", error)
        finally:
            self._lookup_results.append((lookup.number, there, runs))
            shared.news.set()

    def finished(self, ended: set[str], plan: StepPlan) -> KVConnectorTransferResults:
        """Return loads that ended since the last call; cancel those of requests in ``ended``."""
        for request in ended:
            if request in self._loading:
                self._loading[request].cancelled = True
        news = self._open().news
        if plan.idle and (plan.waiting or self._loading):
            news.clear()
            if not self._done and not self._lookup_results:
                news.wait(_PAUSE_S)
        results = KVConnectorTransferResults()
        # vLLM computes a request whole where a page says nothing about the ones before it.
        whole = len(self._groups.groups) > 1 or bool(self._groups.states)
        while self._done:
            loading = self._done.popleft()
            request = loading.load.request
            self._loading.pop(request, None)
            results.finished_recving.add(request)
            if loading.missing and whole:
                results.failed_recving.add(request)
            elif loading.missing and not loading.cancelled:
                self._errors.update(loading.missing)
        # The last step for long, maybe: vLLM ends with one that computes nothing.
        self._rests = plan.idle and not plan.waiting and not self._loading
        return results

    def take_errors(self) -> set[int]:
        """Return and forget the pages that were not filled."""
        errors, self._errors = self._errors, set()
        return errors

    def news(self, plan: StepPlan) -> WorkerNews | None:
        """Return what has ended since the last call, for the scheduler; None: nothing."""
        news = WorkerNews(step=plan.step if plan.reports else -1)
        while self._lookup_results:
            number, there, runs = self._lookup_results.popleft()
            news.found[number], news.runs[number] = [there], [runs]
        while self._load_ends:
            request, end = self._load_ends.popleft()
            news.loads[request] = end
        while self._probe_ends:
            news.probes.append(self._probe_ends.popleft())
        told = news.step >= 0 or news.found or news.loads or news.probes
        return news if told else None

    def figures(self) -> KVKeepStats | None:
        """Return the counts since the last call, with those of tiers once a second and at rest."""
        if self.shared is not None:
            self.shared.count_tiers(self.counts, states=True, now=self._rests)
        return self.counts.take()

    # --- saves -----------------------------------------------------------------------------------

    def save(self, plan: StepPlan) -> None:
        """Copy complete blocks out of the pages, which may be overwritten when this returns."""
        self._save(plan.saves, plan.generation)

    def _save(self, saves: list[Save], generation: int) -> None:
        if saves:
            started = time.monotonic()
            for save in saves:
                # Checked here again: a scheduler in another process cannot see this store.
                new = [span.only(self._open().unknown(span.keys)) for span in save.spans]
                save = Save([span for span in new if span.keys], save.ttl, generation)  # noqa: PLW2901
                if self._device is not None:
                    self._device.save(save)
                    continue
                for span in save.spans:
                    self._write(span, self._pages[span.group].filler(span.pages), save)
            self.counts.add(save_seconds=time.monotonic() - started)

    def _write(self, span: BlockSpan, fill: Callable[[int, memoryview], None], save: Save) -> None:
        shared, there = self._open(), 0
        try:
            sizes = [shared.sizes[span.group]] * len(span.keys)
            there = shared.write(span.keys, sizes, fill, save.generation)
        except KVKeepError as error:
            _LOG.warning("nothing was saved: %s", error)
        shared.expire(span.keys[:there], save.ttl)
        tokens = self._groups.block_tokens if span.group == self._groups.counted else 0
        self.counts.add(
            saved_tokens=there * tokens, dropped_tokens=(len(span.keys) - there) * tokens
        )

    def _drop(self, span: BlockSpan) -> None:
        tokens = self._groups.block_tokens if span.group == self._groups.counted else 0
        self.counts.add(dropped_tokens=len(span.keys) * tokens)

    # --- the end ---------------------------------------------------------------------------------

    def end_copies(self) -> None:
        """Cancel loads, and wait until no thread copies from or to the pages.

        Waits for a block of each load, and for the copies that were begun.
        """
        for loading in self._loading.values():
            loading.cancelled = True
        self._loaders.wake()
        wait(list(self._running))
        if self._device is not None:
            self._device.drain()

    def close(self) -> None:
        """Cancel loads, and let the store write queued blocks."""
        for loading in self._loading.values():
            loading.cancelled = True
        self._loaders.close(wait=False)
        self._lookers.shutdown(wait=False, cancel_futures=True)
        self._teller.shutdown(wait=False, cancel_futures=True)
        self._prober.shutdown(wait=False, cancel_futures=True)
        if self._device is not None:
            self._device.close()
        if self.shared is not None:
            self.shared.close()

    def _open(self) -> SharedStore:
        assert self.shared is not None, "vLLM did not register its caches"
        return self.shared


def _telling(
    sink: Callable[[int, memoryview], None], went_on: Callable[[], None]
) -> Callable[[int, memoryview], None]:
    """Return ``sink``, followed by ``went_on``."""

    def both(at: int, raw: memoryview) -> None:
        sink(at, raw)
        went_on()

    return both
