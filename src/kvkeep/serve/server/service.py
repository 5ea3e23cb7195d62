"""`Service`: the state that all endpoints share: the worker, running requests, admission, drain."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import QueueFull
from kvkeep.core.keys import Namespace
from kvkeep.serve.http import BodyBudget
from kvkeep.serve.server.engine_costs import EngineCosts
from kvkeep.serve.server.errors import ApiError, outcome_of
from kvkeep.serve.server.live import EngineState, Live
from kvkeep.serve.server.losses import ServerLosses, loss_counts
from kvkeep.serve.server.metrics import ServerMetrics
from kvkeep.serve.server.pins import PoolPins, StorePins
from kvkeep.serve.server.record import JobRecorder
from kvkeep.serve.server.thread_pools import ThreadPools
from kvkeep.serve.server.watching import Watching
from kvkeep.serve.server.worker import EngineStopped, Generation, Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from kvkeep.bench.traces import Capture
    from kvkeep.core.cache import CacheStats
    from kvkeep.observe.explain import Explainer
    from kvkeep.observe.usage import RequestObserver
    from kvkeep.observe.usage.history import Counts
    from kvkeep.serve.engine import Delta, Engine, Tokenizer
    from kvkeep.serve.server.settings import ServerSettings
    from kvkeep.serve.server.worker import Call, Job
    from kvkeep.store.tiers import TierStats

__all__ = ["ServedRequest", "Service"]

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
    def explainer(self) -> Explainer | None:
        """What explains requests; None before the server runs."""
        return self.watching.explainer

    @property
    def unexplained(self) -> str:
        """Why requests are not explained, if they are not."""
        return "this server does not run yet"

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
