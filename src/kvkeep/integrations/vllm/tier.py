"""`KVKeepTier`: kvkeep as a secondary tier of vLLM's own offloading, and `KVKeepSpec`.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVKeepOffloadingConnector",
      "kv_connector_module_path": "kvkeep.integrations.vllm.tier",
      "kv_role": "kv_both", "kv_connector_extra_config": {"spec_name": "KVKeepSpec",
      "spec_module_path": "kvkeep.integrations.vllm.tier", "cpu_bytes_to_use": 8589934592,
      "secondary_tiers": [{"type": "KVKeepTier", "module_path": "kvkeep.integrations.vllm.tier",
      "tiers": ["file:///var/lib/kvkeep?size=500GiB"]}]}}'

vLLM moves KV between the GPU and its memory; kvkeep keeps what is there on disks and servers.

vLLM's key of a chunk is a block's hash and the number of a group: the same for other weights, other
settings, another number of ranks. A row is opaque bytes besides, in the order in which this
engine's workers put their pages. The namespace names all that; where rows are the same for every
number of ranks, it names vLLM's format of such rows instead of the ranks.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    canonical_format_id,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingManager,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry.units import format_bytes
from kvkeep.integrations.vllm.kept import OpenStore, join_logs, log_start
from kvkeep.integrations.vllm.naming import (
    computed_by,
    engine_namespace,
    numbers_of,
    plain,
    ranks_of,
    warn_of_seeds,
)
from kvkeep.integrations.vllm.offload.engine import KVKeepOffloadingConnector
from kvkeep.integrations.vllm.offload.jobs import TierJobs
from kvkeep.integrations.vllm.offload.lookups import ChunkChoices, ChunkLookups
from kvkeep.integrations.vllm.offload.notes import ChunkRows
from kvkeep.integrations.vllm.offload.requests import TierRequest
from kvkeep.integrations.vllm.offload.spec import KVKeepSpec
from kvkeep.integrations.vllm.options import OffloadOptions, RequestMistakes, RequestOptions
from kvkeep.integrations.vllm.public import PublicBlocks, prefixes_in
from kvkeep.integrations.vllm.stats import METRICS, NOW, TIER_COUNTERS, TIER_GAUGES, metric_of
from kvkeep.integrations.vllm.transfer import NO_ENGINE
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.blocks.store import BlockStore
from kvkeep.store.tiers import PROMPT_TOKENS, PassThrough, buffer_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import (
        OffloadingMetricMetadata,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from kvkeep.core.keys import Namespace
    from kvkeep.integrations.vllm.offload.engine import OffloadEngine
    from kvkeep.integrations.vllm.offload.notes import WorkerNote
    from kvkeep.integrations.vllm.stats import Counts

__all__ = ["KVKeepOffloadingConnector", "KVKeepSpec", "KVKeepTier", "namespace_of_rows"]


# While no request can be computed vLLM runs idle steps in a loop, which takes the interpreter lock
# from the threads that load. So an idle step waits this long for one of them; a new request is
# delayed by as much at most.
_PAUSE_S = 0.002
_PREFIX = "vllm:kvkeep_tier_"


class KVKeepTier(SecondaryTierManager):
    """A secondary tier of vLLM that keeps chunks in kvkeep's tiers.

    Chunks are stored as records with a checksum, under keys that name everything their bytes
    depend on. No request fails or waits longer than its timeouts because of a tier: chunks that do
    not arrive are computed.

    Options are those of `kvkeep.integrations.vllm.options.OffloadOptions`, in the tier's
    entry in ``secondary_tiers``; a request's, in ``kv_transfer_params["kvkeep"]``, those of
    `kvkeep.integrations.vllm.options.RequestOptions`.

    Raises:
        InvalidValue: an option is wrong, or the spec is not `KVKeepSpec`.

    Notes
    -----
    Thread safety: none; vLLM calls all methods in the scheduler's thread. None of them waits for a
    tier, except `drain_jobs` and `shutdown`.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: TieringOffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        locality: str | None = None,
        **options: Any,
    ) -> None:
        join_logs()
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._options = OffloadOptions.parse(options)
        self.locality = None if locality is None else Locality(locality)
        config = offloading_spec.config
        if not isinstance(offloading_spec, KVKeepSpec):
            raise InvalidValue(NO_ENGINE)
        self._engine = offloading_spec.engine
        self._hashed_tokens = config.cache.tokens_per_hash
        notes = offloading_spec.notes
        namespace = namespace_of_rows(self._engine, self._options, offloading_spec, notes)
        chunk_tokens = {
            group.group_id: group.tokens_per_block * config.cache.blocks_per_chunk
            for group in config.groups
        }
        self._public = self._public_chunks(chunk_tokens)
        self._whole = whole = self._engine.whole_groups(config)
        counted = next(iter(sorted(whole)), min(chunk_tokens))
        self._counts = self._engine.counts
        self._mistakes = RequestMistakes(self._counts)
        self._news = threading.Event()
        rows = _rows(offloading_spec, notes)
        prompt_bytes = sum(
            PROMPT_TOKENS * rows.size(group) // tokens for group, tokens in chunk_tokens.items()
        )
        buffer = MemoryBackend(buffer_bytes(prompt_bytes))
        store = BlockStore(
            namespace,
            tiers=[buffer, *self._options.tiers],
            policy=PassThrough(),
        )
        self._store = OpenStore(store)
        for size in {rows.size(group) for group in chunk_tokens}:
            store.prepare_reads(size)
        self._choices = None
        if self._options.compare_costs:
            self._choices = ChunkChoices(
                self._store, self._engine.config, self._counts,
                sizes={group: rows.size(group) for group in chunk_tokens},
                chunk_tokens=chunk_tokens, divisible=len(whole) == len(chunk_tokens),
            )  # fmt: skip
        self._lookups = ChunkLookups(
            self._store, self._counts, whole=whole, chunk_tokens=chunk_tokens,
            news=self._news, choices=self._choices,
        )  # fmt: skip
        self._jobs = TierJobs(
            self._store, primary_kv_view, rows, self._counts,
            counted={counted: chunk_tokens[counted]}, load_timeout=self._options.load_timeout,
            news=self._news,
        )  # fmt: skip
        self._live: dict[str, TierRequest] = {}
        self._held = 0  # steps in which nothing may be loaded
        if self._options.resets:
            self._engine.clear = self._clear
        largest = format_bytes(offloading_spec.kv_bytes_per_chunk)
        log_start(store, f"chunks of up to {largest}", below=True)

    def _public_chunks(self, chunk_tokens: Mapping[int, int]) -> dict[int, PublicBlocks]:
        """Return what names the chunks in public prefixes, by group; empty without prefixes."""
        file = self._options.public_prefixes
        if not file:
            return {}
        public = prefixes_in(file, self._engine.config, max(chunk_tokens.values()))
        return {group: PublicBlocks(public, size) for group, size in chunk_tokens.items()}

    # --- requests --------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Track a new request; wrong options of a request are ignored and counted."""
        arrival = self._engine.arrival
        if arrival is None:  # of another engine: only its keys are known
            request = TierRequest(RequestOptions(), kept=not self._engine.config.lora_config)
        else:
            options = self._mistakes.options(req_context.req_id, arrival.params)
            request = TierRequest(options, arrival.request)
            if arrival.request.lora_request is not None:
                request.adapter = self._engine.content.adapter(arrival.request)
                request.kept = request.adapter is not None
            request.public = {
                group: public.renamed(arrival.request, self._hashed_tokens)
                for group, public in self._public.items()
            }
        self._live[req_context.req_id] = request
        req_context.set_state(request)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget a request; its loads end with the chunk that they are at."""
        request = self._live.pop(req_context.req_id, None)
        if request is not None:
            request.over = True
            self._lookups.forget(request)
            if request.options.pin is not None and request.kept:
                self._jobs.pin(request, self._whole)

    # --- lookups and jobs ------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether a chunk is stored; RETRY while shared tiers are asked."""
        request = req_context.get_state(TierRequest)
        if request is None or not request.kept or not request.options.load:
            return LookupResult.MISS
        found = self._lookups.find(request, key, req_context)
        return LookupResult.RETRY if self._held and found is LookupResult.HIT else found

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to store rows."""
        request = job_metadata.req_context.get_state(TierRequest)
        if request is not None and request.kept and request.options.store:
            self._jobs.save(job_metadata, request)
        else:
            self._jobs.skip(job_metadata)

    def submit_load(self, job_metadata: TransferJob, *, expedited: bool = False) -> None:
        """Begin to fill rows. All loads are begun at once, ``expedited`` or not.

        The request may have ended since its lookups: its load ends at once, then.
        """
        del expedited
        request = job_metadata.req_context.get_state(TierRequest)
        assert request is not None, "a lookup found the chunks for a request"
        self._jobs.load(job_metadata, request)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the results of jobs that have ended; what was not loaded is a miss from now on.

        What a cancelled load left out is no miss: other requests may still want it.
        """
        results = []
        for ended in self._jobs.finished():
            if ended.slow and self._choices is not None:
                self._choices.came_late(ended.slow)
            if ended.job.is_promotion and ended.failed and not ended.cancelled:
                # For all requests: those that wait for the same chunk would wait one by one.
                for request in self._live.values():
                    request.failed.update(ended.failed)
                    request.step = -1
            results.append(ended.result())
        return results

    def has_pending_work(self) -> bool:
        """Return whether jobs have not ended."""
        return self._jobs.running

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """End a step: if vLLM computes nothing and waits for the tier, wait for a moment."""
        for request_id in context.new_req_ids:
            request = self._live.get(request_id)
            if request is not None:
                request.computed = True
        if self._choices is not None:
            self._choices.step(self._live, context.new_req_ids)
        self._held = max(0, self._held - 1)
        self._jobs.delete_expired()
        self._lookups.next_step()
        live = self._live.values()
        # Requests that wait for a chunk which another one loads have no job of their own.
        if not any(one.computed for one in live) and any(one.waits for one in live):
            self._news.wait(_PAUSE_S)
        self._news.clear()

    # --- the end ---------------------------------------------------------------------------------

    def drain_jobs(self) -> None:
        """Wait until no job reads or writes vLLM's memory.

        vLLM is about to give all rows away. Its workers end their copies, and make those that are
        due, in the next step; but a tier fills rows in the scheduler, as soon as that step is
        planned. So loads wait; since 0.33 vLLM holds them back itself.
        """
        self._jobs.drain()
        if not hasattr(OffloadingManager, "on_reset_flushed"):
            self._held = max(self._held, self._engine.config.max_concurrent_batches)

    def _clear(self) -> None:
        """Delete the namespace: weights may be others after a reset, under the same name."""
        for request in self._live.values():
            request.answered.clear()
            request.step = -1
        self._store.clear()

    def shutdown(self) -> None:
        """End all jobs, and let the store write queued chunks, for at most `FLUSH_S`."""
        for request in self._live.values():
            request.over = True
        self._lookups.close()
        if self._choices is not None:
            self._choices.close()
        self._jobs.close()
        self._primary_kv_view = memoryview(b"")
        self._store.close()

    # --- figures ---------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Return the tier's metrics, for vLLM's Prometheus page."""
        return _definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the counts since the last call, once a second with those of tiers."""
        self._store.count_tiers(self._counts, states=True)
        return _taken(self._counts)


def _rows(spec: TieringOffloadingSpec, notes: list[WorkerNote]) -> ChunkRows:
    """Return which bytes of a row are stored."""
    whole = spec.replicated_layout or notes[0].canonical
    return ChunkRows.of_notes(
        notes[:1] if whole else notes,
        [group.group_id for group in spec.config.groups],
        row_bytes=int(spec.kv_bytes_per_chunk),
        rank_bytes=int(spec.cpu_page_size_per_worker),
        blocks=spec.config.cache.blocks_per_chunk,
    )


def _definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the metrics by name, for vLLM to declare."""
    found: dict[str, OffloadingMetricMetadata] = {
        _PREFIX + name: OffloadingCounterMetadata(documentation=text)
        for name, text in METRICS.items()
    }
    found |= {
        _PREFIX + metric_of(name): OffloadingCounterMetadata(
            documentation=text.replace("Blocks", "Chunks").replace("blocks", "chunks"),
            labelnames=("tier",),
        )
        for name, text in TIER_COUNTERS.items()
    }
    found |= {
        _PREFIX + name: OffloadingGaugeMetadata(
            documentation=f"{text}, at the last step", labelnames=("tier",)
        )
        for name, text in TIER_GAUGES.items()
    }
    return found


def _taken(counts: Counts) -> OffloadingConnectorStats | None:
    """Return and reset the counts; None if all are zero."""
    stats = counts.take()
    if stats is None:
        return None
    told = OffloadingConnectorStats()
    for name, amount in stats.data.items():
        counter, _, tier = name.partition(" ")
        if name.startswith(NOW):
            gauge, _, tier = name.removeprefix(NOW).split(" ", 2)
            told.set_gauge(_PREFIX + gauge, amount, (tier,))
        elif counter in TIER_COUNTERS:
            told.increase_counter(_PREFIX + metric_of(counter), amount, (tier,))
        else:
            told.increase_counter(_PREFIX + name, amount)
    return told


_FORMAT = "row 1"  # version of our records: the used bytes of a row, in order
# Fields of specs that tell of one rank. The workers' notes tell the bytes of a page of all ranks,
# and the model's configuration tells all heads.
_SHARES = frozenset({"num_kv_heads", "page_size_padded"})


def namespace_of_rows(
    engine: OffloadEngine,
    options: OffloadOptions,
    spec: TieringOffloadingSpec,
    notes: Sequence[WorkerNote],
) -> Namespace:
    """Return the namespace of an engine's rows; ``notes`` are those of all its workers."""
    warn_of_seeds(engine.config)
    config = spec.config
    any_ranks = all(note.portable for note in notes)
    groups = plain(
        [
            [
                group.group_id,
                group.tokens_per_block,
                engine.caches.kv_cache_groups[group.group_id].kv_cache_spec,
                *group.layer_names,
            ]
            for group in config.groups
        ]
    )
    computed = computed_by(numbers_of(engine.config, any_ranks=any_ranks))
    layout: dict[str, object] = {
        "format": _FORMAT,
        "chunk": [config.cache.tokens_per_hash, config.cache.blocks_per_chunk],
        "shared": _shared(engine.caches),
        "groups": groups,
    }
    if any_ranks:
        assert all(note == notes[0] for note in notes), "rows are the same for all ranks"
        assert config.kv_cache_layout is not None, "vLLM has placed the pages"
        layout |= {
            "groups": _of_all_ranks(groups),
            "layout": canonical_format_id(config.kv_cache_layout),
            "workers": plain(notes[0]),
        }
        return engine_namespace(engine.config, options, layout, computed=computed, rank="")
    layout |= {
        "row": [spec.kv_bytes_per_chunk, spec.cpu_page_size_per_worker],
        "layout": [config.kv_cache_layout, config.canonical_layout, spec.replicated_layout],
        "workers": plain(list(notes)),
    }
    ranks = ranks_of(engine.config, "all")
    return engine_namespace(engine.config, options, layout, computed=computed, rank=ranks)


def _of_all_ranks(groups: object) -> object:
    """Return ``groups`` without what specs say of one rank's share."""
    if isinstance(groups, dict):
        return {name: _of_all_ranks(each) for name, each in groups.items() if name not in _SHARES}
    return [_of_all_ranks(each) for each in groups] if isinstance(groups, list) else groups


def _shared(caches: KVCacheConfig) -> list[list[str]]:
    """Return which layers share their pages with layers of other groups."""
    places: dict[int, list[str]] = {}
    for tensor in caches.kv_cache_tensors:
        for at, name in enumerate(tensor.layers):
            places.setdefault(tensor.offset + at * tensor.layer_stride, []).append(name)
    return list(places.values())
