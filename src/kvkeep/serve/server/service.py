"""`Service`: the state that all endpoints share: the worker, running requests, admission, drain."""

from __future__ import annotations

import asyncio
import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from kvkeep.bench.traces import Seen, Served
from kvkeep.core.errors import QueueFull
from kvkeep.core.keys import Namespace
from kvkeep.core.returns import stop_after
from kvkeep.observe.explain import Explainer
from kvkeep.observe.usage import TenantLedger, UsageTable
from kvkeep.serve.http import BodyBudget
from kvkeep.serve.server.engine_costs import EngineCosts
from kvkeep.serve.server.errors import ApiError, outcome_of
from kvkeep.serve.server.live import EngineState, Live, ServerLosses, loss_counts
from kvkeep.serve.server.metrics import ServerMetrics
from kvkeep.serve.server.pins import PoolPins, StorePins
from kvkeep.serve.server.worker import EngineStopped, Generation, Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Container, Sequence

    from kvkeep.bench.traces import Capture
    from kvkeep.core.cache import CacheStats, PagedCache
    from kvkeep.observe.usage import RequestObserver
    from kvkeep.observe.usage.history import Counts
    from kvkeep.serve.engine import Completion, Delta, Engine, Tokenizer
    from kvkeep.serve.server.settings import ServerSettings
    from kvkeep.serve.server.worker import Call, Job
    from kvkeep.store.tiers import TierStats

__all__ = ["LARGE", "ServedRequest", "Service", "Watching"]


class Watching:
    """Makes the observers of one server's cache and requests, and ends them.

    ``usage`` and ``tenants`` are always there, with a series in metrics for tenants ``named``;
    ``explainer`` is None before `start`.
    """

    def __init__(self, cache: PagedCache, *, named: Collection[str] = ()) -> None:
        self.usage = UsageTable(cache.num_pages)
        self.tenants = TenantLedger(named=named)
        self.explainer: Explainer | None = None
        self._cache = cache
        for namespace in cache.namespaces():
            for run in cache.runs(namespace):
                self.usage.pages.stored(namespace.tenant, run.pages)
        self._ends: list[Callable[[], None]] = [cache.subscribe(self.usage.pages.see)]

    def start(self) -> tuple[RequestObserver, ...]:
        """Start the explainer's thread; return the observers of requests."""
        cache = self._cache
        self.explainer = explainer = Explainer(
            cache.page_size, cache.policy,
            groups=cache.groups, public=cache.public, reuse=cache.reuse,
        )  # fmt: skip
        self._ends.append(explainer.close)
        return self.usage.see, self.tenants.see, explainer.see_request

    def computed_tokens(self) -> dict[str, int]:
        """Return computed tokens by reason since the start."""
        return {} if self.explainer is None else self.explainer.computed()

    def close(self) -> None:
        """End the subscriptions. Past events can still be queried."""
        for end in self._ends:
            end()
        self._ends.clear()


class JobRecorder:
    """Captures each job of a request once: when the job has ended, or when the request is aborted.

    A job that failed was looked up in the cache, too, and may have published part of its prompt;
    it is captured without an answer. ``named`` are tokens that were added by name.
    """

    def __init__(self, capture: Capture, kind: str, named: Container[int]) -> None:
        self._capture = capture
        self._kind = kind
        self._named = named
        self._arrived = 0.0
        self._jobs: dict[int, Job] = {}

    def begin(self, jobs: Sequence[Job], arrived: float) -> None:
        """Note jobs that the engine has accepted; ``arrived`` is a time of `time.perf_counter`."""
        self._jobs = dict(enumerate(jobs))
        self._arrived = arrived

    def end(self, number: int, done: Completion) -> None:
        """Capture job ``number``, which is complete."""
        served = Served(done.cached_tokens, done.loaded_tokens, done.ttft_s, done.seconds)
        first = done.choices[0]
        stop: str = first.finish_reason
        if stop == "stop" and first.tokens:
            stop = "stop text" if first.stop else stop_after(first.tokens, self._named)
        self._note(self._jobs.pop(number), first.tokens, served, stop)

    def close(self) -> None:
        """Capture the jobs that were not completed."""
        for job in self._jobs.values():
            self._note(job, (), None)
        self._jobs.clear()

    def _note(self, job: Job, answer: Sequence[int], served: Served | None, stop: str = "") -> None:
        self._capture.note(
            Seen(
                arrived=self._arrived,
                prompt=job.prompt,
                namespace=job.namespace,
                answer=answer,
                store=job.store,
                session=job.session,
                kind=self._kind,
                served=served,
                stop=stop,
            )
        )


Result = TypeVar("Result")

LARGE = 64 << 10
"""Characters or bytes. A tokenizer takes about a tenth of a second for so many."""
# Two, so that one long prompt does not delay all others.
_TOKENIZER_THREADS = 2


class ThreadPools:
    """Threads for work that would block the event loop: to generate, to inspect, and large work.

    Work larger than `LARGE` runs in a thread of its own, so that it never delays small work. Work
    whose request ends before its turn is dropped.

    Thread safety: for the event loop.
    """

    def __init__(self) -> None:
        self._tokenizing = ThreadPoolExecutor(_TOKENIZER_THREADS, "kvkeep tokenizer")
        self._inspecting = ThreadPoolExecutor(1, "kvkeep counter")
        self._large = ThreadPoolExecutor(1, "kvkeep large texts")

    async def for_generation(self, function: Callable[[], Result], size: int) -> Result:
        """Run ``function``, which tokenizes ``size`` characters of a generation request."""
        return await _run(self._large if size > LARGE else self._tokenizing, function)

    async def for_inspection(self, function: Callable[[], Result], size: int = 0) -> Result:
        """Run ``function``, which tokenizes ``size`` characters of another request, or queries."""
        return await _run(self._large if size > LARGE else self._inspecting, function)

    async def for_parsing(self, function: Callable[[], Result], size: int) -> Result:
        """Run ``function``, which parses ``size`` bytes: in a thread only if they are many."""
        return await _run(self._large, function) if size > LARGE else function()

    def close(self) -> None:
        """Wait for running work and drop the rest."""
        for pool in (self._tokenizing, self._inspecting, self._large):
            pool.shutdown(cancel_futures=True)


async def _run(pool: ThreadPoolExecutor, function: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(pool, function)


_LONGEST_WAIT_S = 60


class Service:
    """The worker, and everything around it that endpoints share.

    Thread safety: none; for the event loop. Slow work runs in other threads: the engine's in the
    worker's, tokenizers in ``threads``.
    """

    def __init__(
        self,
        engine: Engine,
        settings: ServerSettings,
        capture: Capture | None = None,
        observers: Sequence[RequestObserver] = (),
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.capture = capture
        self.bodies = BodyBudget(
            largest=settings.max_body_bytes,
            budget=settings.body_budget_bytes,
            seconds=min(settings.body_timeout_s, settings.request_timeout_s),
        )
        self.watching = Watching(engine.cache, named=settings.weights)
        self.metrics = ServerMetrics(self.watching.usage)
        self.costs = EngineCosts(engine.cost)
        self.metrics.costs = self.costs
        self.metrics.bodies = self.bodies
        self.metrics.tenants = self.watching.tenants
        self._observers = observers
        self.metrics.reasons = self.watching.computed_tokens
        self.pool_pins = PoolPins(engine.cache)
        self.tier_pins = None if engine.store is None else StorePins(engine)
        self.metrics.pool_pins, self.metrics.tier_pins = self.pool_pins, self.tier_pins
        self.losses = ServerLosses(self.loss_counts)
        self.live = Live(EngineState(self))
        self.worker = Worker(engine, flush_timeout_s=settings.flush_timeout_s)
        self.began = int(time.time())
        self.draining = False
        self._tickets: set[ServedRequest] = set()
        self._all_gone = asyncio.Event()
        self.threads = ThreadPools()
        self._mean_seconds = 1.0  # per request, with a weight of a tenth for each new one

    def start(self) -> None:
        """Begin to take requests, in the running event loop."""
        self.engine.observe(*self.watching.start(), self.costs.see, *self._observers)
        self.losses.start()
        self.worker.start()

    def stop(self) -> None:
        """Abort running requests; return after the engine's current step and its store's flush."""
        self.worker.stop()
        if self.tier_pins is not None:
            self.tier_pins.close()
        self.watching.close()
        self.live.close()
        self.losses.close()
        self.threads.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer."""
        assert self.engine.tokenizer is not None, "create_app checks it"
        return self.engine.tokenizer

    @property
    def explainer(self) -> Explainer:
        """What explains requests, while the server runs."""
        assert self.watching.explainer is not None, "requests come after the start"
        return self.watching.explainer

    @property
    def decode(self) -> Callable[[Sequence[int]], str] | None:
        """What makes text of tokens for explanations; None if they are to have none."""
        return self.tokenizer.decode if self.settings.text else None

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt accepted; at least one token fits behind it."""
        return self.engine.runner.max_tokens - 1

    def namespace(self, salt: str | None) -> Namespace:
        """Return the namespace of prompts with this ``cache_salt``."""
        return Namespace(
            tenant=salt or "",
            model=self.settings.name,
            dtype=self.engine.runner.geometry.dtype,
        )

    @property
    def longest_text(self) -> int:
        """Bytes of UTF-8 above which a text has more tokens than the longest prompt."""
        return self.longest_prompt * self.tokenizer.longest_token

    async def stats(self) -> tuple[CacheStats, dict[str, int | float]]:
        """Return the statistics of cache and engine; the engine's are taken between two steps."""
        cache = await asyncio.to_thread(self.engine.cache.stats)
        engine = await self.worker.call(self.engine.stats)
        return cache, {**engine.as_dict()}

    async def store_stats(self) -> dict[str, Any] | None:
        """Return the statistics of the engine's store, None without one."""
        store = self.engine.store
        return None if store is None else (await asyncio.to_thread(store.stats)).as_dict()

    def loss_counts(
        self, cache: CacheStats | None = None, tiers: Sequence[TierStats] | None = None
    ) -> Counts:
        """Return what was lost, from these statistics or those of now. Thread safety: safe."""
        if cache is None:
            cache = self.engine.cache.stats()
        if tiers is None:
            tiers = () if self.engine.store is None else self.engine.store.stats().tiers
        return loss_counts(cache.evicted_pages, tiers, self.metrics.requests)

    def keep(self, job: Job) -> None:
        """Pin what a job wants to be kept of its prompt, which is computed. Thread safety: safe."""
        if job.keep is not None:
            self.pool_pins.keep(job.prompt, job.namespace, job.keep)
        if job.retain is None:
            return
        if self.tier_pins is None:
            job.retain.refuse("no_tiers")
        elif not job.store:
            job.retain.refuse("not_stored")
        else:
            self.tier_pins.keep(job.prompt, job.namespace, job.retain)

    # --- requests ----------------------------------------------------------------------------

    @asynccontextmanager
    async def admitted(self, call: Call) -> AsyncIterator[ServedRequest]:
        """Admit a client's request, or refuse it with `ApiError` 503 or `QueueFull`.

        Within the block the request counts as running. Its jobs are aborted when the block ends,
        however it ends.
        """
        ticket = ServedRequest(self, call)
        try:
            self.refuse_if_closed()
            self._refuse_if_full()
            self._tickets.add(ticket)
            self._all_gone.clear()
            yield ticket
        except Exception as error:
            ticket.outcome = outcome_of(error)
            raise
        finally:
            self._tickets.discard(ticket)
            ticket.close()
            if not self._tickets:
                self._all_gone.set()

    def refuse_if_closed(self) -> None:
        """Raise `ApiError` 503 or `EngineStopped` if no more requests are accepted."""
        if self.draining:
            raise ApiError(503, "this server is shutting down", code="shutting_down")
        if not self.worker.alive:
            raise EngineStopped("the engine has stopped")

    def refuse_if_stuck(self) -> None:
        """Raise `EngineStopped` or `ApiError` 503 if the engine's thread is dead or stuck."""
        if not self.worker.alive:
            raise EngineStopped("the engine has stopped")
        busy, limit = self.worker.busy_s, self.settings.step_limit_s
        if busy > limit:
            message = f"a step of the engine has taken {busy:.0f} s so far, longer than {limit:g} s"
            raise ApiError(503, message, code="engine_stuck")

    def _refuse_if_full(self) -> None:
        """Refuse early, before tokenizing, by the number of requests; the engine counts exactly."""
        limits = self.engine.limits
        if limits.max_waiting is None:
            return
        most = limits.max_running + limits.max_waiting
        if len(self._tickets) >= most:
            raise QueueFull(f"{most} requests are running or waiting; try again later")

    @property
    def retry_after_s(self) -> int:
        """Estimated seconds until there is room, from the duration of recent requests."""
        ahead = self.engine.num_waiting + 1
        seconds = self._mean_seconds * ahead / self.engine.limits.max_running
        return max(1, min(_LONGEST_WAIT_S, math.ceil(seconds)))

    def note_seconds(self, seconds: float) -> None:
        """Record the duration of a request."""
        self.metrics.whole.observe(seconds)
        self._mean_seconds += (seconds - self._mean_seconds) / 10

    # --- shutdown ----------------------------------------------------------------------------

    async def drain(self) -> None:
        """Refuse new requests and wait for running ones, at most ``drain_timeout_s``."""
        self.draining = True
        if not self._tickets:
            return
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                await self._all_gone.wait()
        except TimeoutError:
            self.give_up()

    def give_up(self) -> None:
        """Abort all running requests; their clients get an error."""
        error = ApiError(503, "this server has shut down", code="shutting_down")
        for ticket in list(self._tickets):
            ticket.fail(error)


class ServedRequest:
    """A client's request while it runs."""

    def __init__(self, service: Service, call: Call) -> None:
        self._service = service
        self._call = call
        self._begun = time.perf_counter()
        self._last: dict[tuple[int, int], float] = {}  # time of each answer's last token
        self._generation: Generation | None = None
        self._kept: set[int] = set()  # jobs whose prompts were pinned
        self._failed: ApiError | None = None
        self._record = (
            None
            if service.capture is None
            else JobRecorder(service.capture, call.endpoint, service.tokenizer.named)
        )
        self.deadline = asyncio.get_running_loop().time() + service.settings.request_timeout_s
        self.outcome = "gone"  # the client's disconnect sets none

    def fail(self, error: ApiError) -> None:
        """End the request with ``error``."""
        self._failed = error
        if self._generation is not None:
            self._generation.fail(error)

    def close(self) -> None:
        """Count the request, and abort jobs that are unfinished."""
        self._service.metrics.requests.labels(self._call.endpoint, self.outcome).inc()
        if self._generation is not None and not self._generation.finished:
            self._service.worker.abort(self._generation)
        if self._record is not None:
            self._record.close()

    async def submit(self, jobs: Sequence[Job]) -> None:
        """Submit the jobs, all or none; raises what `Engine.add` raises."""
        if self._failed is not None:
            raise self._failed
        self._generation = Generation(jobs, self._call)
        arrived = time.perf_counter()
        await self._service.worker.submit(self._generation)
        if self._record is not None:
            self._record.begin(jobs, arrived)

    async def deltas(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """Yield lists of deltas as they arrive, each with the number of its job.

        Raises the error of a job.
        """
        assert self._generation is not None, "call submit first"
        while arrived := await self._generation.next():
            now = time.perf_counter()
            for number, delta in arrived:
                self._note(number, delta, now)
                await self._keep(number, delta)
            yield arrived

    async def _keep(self, number: int, delta: Delta) -> None:
        """Pin what the job wants to be kept, once: its prompt is computed with the first token."""
        if number in self._kept or not delta.tokens:
            return
        assert self._generation is not None
        self._kept.add(number)
        job = self._generation.jobs[number]
        if job.keep is not None or job.retain is not None:
            # In a thread: comparing a long prompt takes milliseconds.
            await asyncio.to_thread(self._service.keep, job)

    def _note(self, number: int, delta: Delta, now: float) -> None:
        metrics = self._service.metrics
        if delta.tokens:
            metrics.generated_tokens.inc(len(delta.tokens))
            answer = number, delta.index
            if not self._last:
                prompt, reused = delta.request.prompt_tokens, delta.request.cached_tokens or 0
                metrics.note_first_token(
                    now - self._begun, prompt_tokens=prompt, reused_tokens=reused
                )
            elif answer in self._last:
                each = (now - self._last[answer]) / len(delta.tokens)
                for _ in delta.tokens:
                    metrics.between_tokens.observe(each)
            self._last[answer] = now
        done = delta.completion
        if done is not None:
            metrics.prompt_tokens.inc(done.prompt_tokens)
            metrics.cached_tokens.inc(done.cached_tokens)
            metrics.loaded_tokens.inc(done.loaded_tokens)
            self.outcome = done.choices[0].finish_reason
            self._service.note_seconds(now - self._begun)
            if self._record is not None:
                self._record.end(number, done)
