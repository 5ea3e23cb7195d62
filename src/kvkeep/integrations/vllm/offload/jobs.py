"""Copies between rows of vLLM's memory and the store, in threads.

A row belongs to a job until its result is given, and then to anyone: so rows are only read and
written in the thread of the job, before its result. A tier that hangs does so in threads of the
store, with memory of the store; a record is copied into its row once it has arrived and verified.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.kv_offload.tiering.base import JobResult

from kvkeep.core.errors import KVKeepError
from kvkeep.integrations.load_choice import LoadPace, TimedLoads
from kvkeep.integrations.records import gather, scatter
from kvkeep.integrations.vllm.kept import Loaders, log_fault
from kvkeep.integrations.vllm.offload.requests import group_of

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from vllm.v1.kv_offload.base import OffloadKey
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from kvkeep.integrations.records import Bytes
    from kvkeep.integrations.vllm.kept import OpenStore
    from kvkeep.integrations.vllm.offload.notes import ChunkRows
    from kvkeep.integrations.vllm.offload.requests import TierRequest
    from kvkeep.integrations.vllm.stats import Counts

__all__ = ["TierJobs"]

_LOG = logging.getLogger("kvkeep.vllm")


@dataclass(slots=True)
class FinishedJob:
    """A job that has ended: the keys of the chunks that were moved, and of those that were not.

    ``cancelled``: it was told to end early, so what it has not moved may well be there. ``until``:
    when a load ends, in monotonic seconds. ``compute_s``: what computing its chunks takes, 0 if
    unknown. ``late``: they came too slowly; ``slow``: the tier that did.
    """

    job: TransferJob
    request: TierRequest | None
    moved: list[OffloadKey] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0
    failed: list[OffloadKey] = field(default_factory=list)
    cancelled: bool = False
    until: float = 0.0
    compute_s: float = 0.0
    late: bool = False
    slow: str = ""

    @property
    def of_one_group(self) -> bool:
        """Whether all its chunks are of one group."""
        return len({group_of(key) for key in self.job.keys}) == 1

    def result(self) -> JobResult:
        """Return what vLLM is told."""
        some = tuple(self.moved) if self.failed and self.job.is_promotion else None
        return JobResult(
            self.job.job_id, not self.failed, some or None, self.seconds, self.bytes
        )  # fmt: skip


@dataclass(slots=True)
class _Part:
    """Chunks of one group in a job: keys in order, their rows and the keys of the store."""

    group: int
    keys: list[OffloadKey]
    rows: list[int]
    names: list[bytes]


class TierJobs:
    """Runs the jobs of a tier: loads in threads, four at a time, and saves in one, in order.

    ``view`` is vLLM's memory, int8 [chunks, row bytes]. ``counted`` has the tokens of a chunk of
    the group that is counted. ``news`` is set when a load has ended.

    No failure of the store raises. A load ends within ``load_timeout`` of its submission.

    Thread safety: all methods are called by the scheduler's thread.
    """

    def __init__(
        self,
        store: OpenStore,
        view: memoryview,
        rows: ChunkRows,
        counts: Counts,
        *,
        counted: Mapping[int, int],
        load_timeout: float,
        news: threading.Event,
    ) -> None:
        self._store = store
        self._view: Bytes = np.asarray(view).view(np.uint8)
        self._rows = rows
        self._counts = counts
        self._counted = counted
        self._load_timeout = load_timeout
        self._news = news
        self._costs = TimedLoads(store.store)
        self._loaders = Loaders()
        self._saver = ThreadPoolExecutor(1, "kvkeep save")
        self._running: dict[int, Future[None]] = {}
        self._done: deque[FinishedJob] = deque()
        self._draining = False

    def load(self, job: TransferJob, request: TierRequest) -> None:
        """Begin to fill the rows of ``job``."""
        until = time.monotonic() + min(self._load_timeout, request.patience)
        request.loads += 1
        self._counts.add(hit_tokens=self._tokens(job.keys))
        ended = FinishedJob(job, request, until=until, compute_s=request.compute_s)
        cancelled = partial(self._is_cancelled, ended)
        self._begun(
            ended,
            self._loaders.submit(partial(self._move, ended), until=until, cancelled=cancelled),
        )

    def save(self, job: TransferJob, request: TierRequest) -> None:
        """Begin to store the rows of ``job``."""
        ended = FinishedJob(job, request)
        self._begun(ended, self._saver.submit(self._move, ended))

    def skip(self, job: TransferJob) -> None:
        """End ``job`` at once: its rows are not to be stored."""
        self._done.append(FinishedJob(job, None))

    def pin(self, request: TierRequest, whole: frozenset[int]) -> None:
        """Begin to pin the chunks of a request that has ended; ``whole``: see `ChunkLookups`."""
        self._saver.submit(self._pin, request, whole).add_done_callback(log_fault)

    def _pin(self, request: TierRequest, whole: frozenset[int]) -> None:
        assert request.options.pin is not None
        for group, names in request.all_names().items():
            # Behind a window, and without a state, chunks are missing that are not needed.
            for some in [names] if group in whole else ([name] for name in names):
                self._store.pin(some, request.options.pin)

    def delete_expired(self) -> None:
        """Begin to delete the chunks whose time is over."""
        if self._store.has_expired:
            self._saver.submit(self._store.delete_expired).add_done_callback(log_fault)

    def _begun(self, ended: FinishedJob, future: Future[None]) -> None:
        future.add_done_callback(log_fault)
        self._running[ended.job.job_id] = future

    def finished(self) -> list[FinishedJob]:
        """Return the jobs that have ended since the last call."""
        ended: list[FinishedJob] = []
        while self._done:
            one = self._done.popleft()
            self._running.pop(one.job.job_id, None)
            if one.job.is_promotion and one.request is not None:
                one.request.loads -= 1
            ended.append(one)
        return ended

    @property
    def running(self) -> bool:
        """Whether a job has not been returned by `finished`."""
        return bool(self._running or self._done)

    # --- in threads ------------------------------------------------------------------------------

    def _move(self, ended: FinishedJob, went_on: Callable[[], None] | None = None) -> None:
        """Move the chunks of a job; ``went_on`` is called after each that is loaded."""
        job, began = ended.job, time.monotonic()
        try:
            for part in self._parts(ended):
                if went_on is not None:
                    count = self._load(part, ended, went_on)
                else:
                    count = self._save(part, ended)
                ended.moved += part.keys[:count]
                ended.bytes += count * self._rows.size(part.group)
        except KVKeepError as error:
            _LOG.warning("chunks were not %s: %s", "loaded" if job.is_promotion else "saved", error)
        finally:
            moved = set(ended.moved)
            ended.failed = [key for key in job.keys if key not in moved]
            ended.seconds = time.monotonic() - began
            self._count(ended)
            self._done.append(ended)
            self._news.set()

    def _parts(self, ended: FinishedJob) -> list[_Part]:
        """Return the chunks of a job by group, in the order of the prompt."""
        job, request = ended.job, ended.request
        assert request is not None
        position = job.req_context.get_offload_key_position
        places: dict[int, list[tuple[int, OffloadKey, int]]] = {}
        for key, row in zip(job.keys, job.chunk_ids, strict=True):
            end = position(key) or 0
            places.setdefault(group_of(key), []).append((end, key, int(row)))
        parts = []
        for group, found in places.items():
            found.sort()
            keys = [key for _, key, _ in found]
            rows = [row for _, _, row in found]
            parts.append(_Part(group, keys, rows, request.names(keys, group)))
        return parts

    def _is_cancelled(self, ended: FinishedJob) -> bool:
        """Return whether a load is to end now; from then on it is, whoever asks."""
        assert ended.request is not None
        ended.cancelled = ended.cancelled or ended.request.over or self._draining
        return ended.cancelled

    def _load(self, part: _Part, ended: FinishedJob, went_on: Callable[[], None]) -> int:
        runs, view = self._rows.runs[part.group], self._view

        def sink(at: int, raw: memoryview) -> None:
            row = view[part.rows[at]]
            scatter(raw, (row[offset : offset + size] for offset, size in runs))
            went_on()

        if self._is_cancelled(ended):
            return 0
        read = self._costs.read(
            part.names,
            [self._rows.size(part.group)] * len(part.keys),
            sink,
            LoadPace(ended.until, ended.compute_s if ended.of_one_group else 0.0),
            partial(self._is_cancelled, ended),
        )
        ended.late, ended.slow = read.late, read.failed
        return read.blocks

    def _save(self, part: _Part, ended: FinishedJob) -> int:
        runs, view = self._rows.runs[part.group], self._view
        request, names = ended.request, part.names
        assert request is not None

        def fill(at: int, raw: memoryview) -> None:
            row = view[part.rows[at]]
            gather((row[offset : offset + size] for offset, size in runs), raw)

        sizes = [self._rows.size(part.group)] * len(part.keys)
        ttl = request.options.ttl
        # Without any end there is none to set or to lift, so nobody needs to know what is new.
        unknown = self._store.unknown(names) if ttl is not None or self._store.has_ends else []
        count = self._store.store.write(names, sizes, fill)
        new = [names[at] for at in unknown if at < count]
        self._store.expire(new if ttl is None else request.own(new, part.group), ttl)
        return count

    def _count(self, ended: FinishedJob) -> None:
        moved, failed = self._tokens(ended.moved), self._tokens(ended.failed)
        if not ended.job.is_promotion:
            self._counts.add(saved_tokens=moved, dropped_tokens=failed, save_seconds=ended.seconds)
            return
        late = failed if ended.late or time.monotonic() >= ended.until else 0
        self._counts.add(
            loaded_tokens=moved, failed_tokens=failed, late_tokens=late,
            load_seconds=ended.seconds,
        )  # fmt: skip
        self._store.count_tiers(self._counts)

    def _tokens(self, keys: object) -> int:
        assert hasattr(keys, "__iter__")
        return sum(self._counted.get(group_of(key), 0) for key in keys)

    # --- the end ---------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until all jobs have ended; loads end with the chunk that they are at."""
        self._draining = True
        self._loaders.wake()
        try:
            wait(list(self._running.values()))
        finally:
            self._draining = False

    def close(self) -> None:
        """Drain, and release vLLM's memory."""
        self.drain()
        self._loaders.close(wait=True)
        self._saver.shutdown(wait=True)
        self._view = np.zeros((0, 0), np.uint8)
