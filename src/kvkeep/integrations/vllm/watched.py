"""`WatchedSchedulerSide`: the scheduler's side with a status that is served over HTTP."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import vllm

from kvkeep.core.keys import Namespace
from kvkeep.integrations.engine_status import EngineFacts, EngineStatus
from kvkeep.integrations.loss_runs import LossRun, misses_of
from kvkeep.integrations.request_watch import WatchedLoad
from kvkeep.integrations.status_options import loopback_names
from kvkeep.integrations.vllm.ends import SUCCEEDED
from kvkeep.integrations.vllm.messages import WorkerNews
from kvkeep.integrations.vllm.scheduler import SchedulerSide
from kvkeep.serve.http import url_of
from kvkeep.serve.server.status_app import StatusServer, create_status_app
from kvkeep.store import Miss

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvkeep.integrations.load_choice import LoadDecision
    from kvkeep.integrations.request_watch import Misses
    from kvkeep.integrations.vllm.groups import Groups
    from kvkeep.integrations.vllm.messages import LoadEnd, StepPlan
    from kvkeep.integrations.vllm.options import ConnectorOptions
    from kvkeep.integrations.vllm.requests import FollowedRequest
    from kvkeep.observe.usage import Outcome
    from kvkeep.store.tiers import TierStats

__all__ = ["WatchedSchedulerSide"]

_LOG = logging.getLogger("kvkeep.vllm")
_OUTCOMES: Final[dict[str, Outcome]] = {
    **dict.fromkeys(SUCCEEDED, "done"),
    "FINISHED_ABORTED": "aborted",
}


class WatchedSchedulerSide(SchedulerSide):
    """A `SchedulerSide` that tells a status what it sees, and serves that at ``bound``.

    The status is read in threads of its own, and ends with this side.

    Thread safety: as `SchedulerSide`. Cost: 5 to 10 µs a request in the scheduler's thread, and a
    microsecond a step.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        options: ConnectorOptions,
        groups: Groups,
        *,
        loads: bool,
        saves: bool,
        bound: socket.socket,
    ) -> None:
        super().__init__(vllm_config, options, groups, loads=loads, saves=saves)
        served = vllm_config.model_config.served_model_name
        self._model = served if isinstance(served, str) else str(served[0])
        self._pool: BlockPool | None = None
        self._tiers: dict[int, list[TierStats]] = {}  # by rank, as workers told last
        facts = EngineFacts(
            engine=f"vLLM {vllm.__version__}",
            model=self._model,
            page_tokens=groups.block_tokens,
            num_pages=vllm_config.cache_config.num_gpu_blocks or 1,
        )
        self._status = EngineStatus(
            facts, self._cost, tiers=self._tiers_now, free_pages=self._free_pages
        )
        self._watch = self._status.watch
        host = bound.getsockname()[0]
        make = partial(
            create_status_app,
            self._status,
            key=options.key,
            hosts=loopback_names(host),
        )
        url = url_of(bound)
        self._server = StatusServer(make, bound)
        _LOG.info("kvkeep serves its status at %s", url)

    # --- what is told ----------------------------------------------------------------------------

    def bind_pool(self, pool: BlockPool) -> None:
        """Take vLLM's pool of pages, which says how many are free."""
        super().bind_pool(pool)
        self._pool = pool

    def _free_pages(self) -> int | None:
        return None if self._pool is None else int(self._pool.get_num_free_blocks())

    def _tiers_now(self) -> list[tuple[int, TierStats]]:
        """Return the tiers by rank: of workers in other processes as of the last step."""
        if self._shared is not None:
            return [(0, tier) for tier in self._shared.store.stats()]
        return [(rank, tier) for rank, tiers in sorted(self._tiers.items()) for tier in tiers]

    # --- requests --------------------------------------------------------------------------------

    def follow(self, request: Request) -> None:
        """Track a new request, and watch it."""
        super().follow(request)
        followed = self._followed.get(request.request_id)
        self._watch.arrived(
            request.request_id,
            request.prompt_token_ids or (),
            self._namespace(request),
            at=request.arrival_time,
            store=self._saves and followed is not None and followed.options.store,
            extra=[
                (feature.mm_position.offset, str(feature.identifier).encode())
                for feature in getattr(request, "mm_features", None) or ()
            ],
        )

    def _namespace(self, request: Request) -> Namespace:
        lora = request.lora_request
        return Namespace(
            tenant=request.cache_salt or "",
            model=self._model,
            lora="" if lora is None else lora.lora_name,
        )

    def matched(self, request: Request, computed: int) -> int | None:
        """As `SchedulerSide.matched`."""
        self._watch.found(request.request_id, computed)
        return super().matched(request, computed)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """As `SchedulerSide.allocated`; tell what is loaded, and why the rest is not."""
        size, counted = self._groups.block_tokens, self._groups.counted
        followed = self._followed.get(request.request_id)
        # Taken before: `SchedulerSide` forgets them with the load.
        choice = None if followed is None else followed.choice
        lookup = None if followed is None else followed.lookup
        super().allocated(request, blocks, external)
        loading = None
        if followed is not None and self._loads:
            begin = followed.local + external
            if external:
                loading = followed.local, begin
            told = () if lookup is None else lookup.losses
            asked = choice, begin // size, told, time.time()
            followed.misses = partial(self._misses, followed, *asked)
        tables = blocks.get_block_ids()
        self._watch.admitted(
            request.request_id,
            tables[counted],
            others=[page for at, table in enumerate(tables) if at != counted for page in table],
            loading=loading,
            misses=None if followed is None else followed.misses,
            turn=request.num_preemptions,
        )

    def _misses(
        self,
        followed: FollowedRequest,
        choice: LoadDecision | None,
        begin: int,
        told: Sequence[LossRun],
        at: float,
    ) -> list[Miss]:
        """In a thread: why blocks from ``begin`` on are not loaded, as of ``at`` (Unix seconds).

        ``told`` is what workers in other processes said of those that were not found.
        """
        size, request = self._groups.block_tokens, followed.request
        found, last = followed.reached, request.num_prompt_tokens - 1
        misses: list[Miss] = []
        if choice is not None and choice.refused and begin < found:
            misses.append(
                Miss.slower(
                    begin * size,
                    min(found * size, last),
                    choice.refused,
                    load_s=choice.load_s,
                    compute_s=choice.compute_s,
                )
            )
        hashes = followed.hashes(found, request.num_prompt_tokens // size)
        if self._shared is not None:
            # Later losses are of what the request itself computed and stored.
            told = [
                LossRun(end, None if loss is not None and (loss.at or 0) > at else loss)
                for end, loss in self._shared.losses(hashes)
            ]
        if followed.unanswered is not None:
            told = told or [LossRun(len(hashes), None)]
        return misses + misses_of(told, found, size, followed.unanswered)

    def receive(self, output: KVConnectorOutput) -> None:
        """As `SchedulerSide.receive`; tell which loads have ended."""
        super().receive(output)
        news = output.kv_connector_worker_meta
        if isinstance(news, WorkerNews):
            self._tiers |= news.tiers
            for id, end in news.loads.items():
                loading = self._watch.loading(id)
                if loading is not None:
                    self._watch.loaded(id, *self._load(id, loading, end))

    def _load(self, id: str, loading: tuple[int, int], end: LoadEnd) -> tuple[WatchedLoad, Misses]:
        """Return what a load of the tokens ``loading`` brought, and what tells why not the rest."""
        size, (first, stop) = self._groups.block_tokens, loading
        came = min(stop, first + -(-end.tokens // size) * size)
        sources, start = [], first
        for blocks, tier in end.tiers:
            until = min(came, first + blocks * size)
            if until > start:
                sources.append((start, until, tier))
                start = until
        if start < came:  # the counted layers need no block before a window
            sources.append((start, came, end.tiers[-1][1] if end.tiers else ""))
        followed = self._followed.get(id)
        behind = None if followed is None else followed.misses

        def misses() -> list[Miss]:
            found = [] if behind is None else list(behind())
            if came < stop:
                found.append(_lost(came, stop, end))
            return found

        return WatchedLoad(tuple(sources), end.seconds, end.late), misses

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """As `SchedulerSide.plan`; tell which pages are given away, and which are full."""
        made = super().plan(output)
        counted = self._groups.counted
        running = output.scheduled_cached_reqs
        for id, tables in zip(running.req_ids, running.new_block_ids, strict=True):
            # Those of resumed requests were told of when they were allocated.
            if tables is not None and id not in running.resumed_req_ids:
                others = [page for at, new in enumerate(tables) if at != counted for page in new]
                self._watch.grown(id, tables[counted], others)
        for one in self._watch.unanswered:
            scheduled = output.num_scheduled_tokens.get(one.id)
            followed = self._followed.get(one.id)
            if scheduled is None or followed is None:
                continue
            if followed.request.num_output_tokens:
                self._watch.answering(one)
            self._watch.computed(one, followed.request.num_computed_tokens + scheduled)
        return made

    def finished(self, request: Request, tables: tuple[list[int], ...]) -> None:
        """As `SchedulerSide.finished`; tell how the request ended."""
        followed = self._followed.get(request.request_id)
        super().finished(request, tables)
        self._watch.ended(
            request.request_id,
            _OUTCOMES.get(request.status.name, "failed"),
            answer=tuple(request.output_token_ids),
            # The last token was never an input of the model.
            computed=min(request.num_computed_tokens, request.num_tokens - 1),
            kept=0 if followed is None else followed.saved * self._groups.block_tokens,
        )

    def clear(self) -> bool:
        """As `SchedulerSide.clear`; vLLM has emptied its own cache before."""
        self._watch.cleared()
        return super().clear()

    def close(self) -> None:
        """As `SchedulerSide.close`; end the status first, and give its port back."""
        self._server.close()
        self._status.close()
        super().close()


def _lost(start: int, stop: int, end: LoadEnd) -> Miss:
    """Return why these tokens of a load did not come."""
    if end.late or end.loss is None:
        tier = end.failed or (end.tiers[-1][1] if end.tiers else "")
        return Miss(start, stop, tier, "late", time.time(), "too slow")
    loss = end.loss
    return Miss(start, stop, loss.tier, loss.what, loss.at, loss.detail)
