"""`Service`: what the endpoints share: the worker, who runs, who may come, and how it ends."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from kvkeep.core.errors import QueueFull
from kvkeep.core.keys import Namespace
from kvkeep.serve.http import BodyBudget
from kvkeep.serve.server.errors import ApiError, outcome_of
from kvkeep.serve.server.lanes import Lanes
from kvkeep.serve.server.live import Live
from kvkeep.serve.server.metrics import ServerMetrics
from kvkeep.serve.server.record import JobRecorder
from kvkeep.serve.server.watching import Watching
from kvkeep.serve.server.worker import EngineStopped, Generation, Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from kvkeep.bench.traces import Capture
    from kvkeep.core.cache import CacheStats, RemovedPages
    from kvkeep.core.tokens import TokenArray
    from kvkeep.observe.usage import RequestObserver
    from kvkeep.serve.engine import Delta, Engine, Tokenizer
    from kvkeep.serve.server.settings import ServerSettings
    from kvkeep.serve.server.worker import Call, Job
    from kvkeep.store.tiers import Removed

__all__ = ["ServedRequest", "Service"]

Result = TypeVar("Result")

_LONGEST_WAIT_S = 60


class Service:
    """The worker and everything that is counted around it.

    Thread safety: none; it belongs to the event loop. What takes long is done in other threads:
    the engine in the worker's, tokenizers in some of their own.
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
        self.watching = Watching(engine.cache, explain=settings.explain)
        self.metrics = ServerMetrics(self.watching.usage)
        self.metrics.bodies = self.bodies
        self._observers = observers
        if settings.explain:
            self.metrics.reasons = self.watching.computed_tokens
        self.live = Live(self)
        self.worker = Worker(engine, flush_timeout_s=settings.flush_timeout_s)
        self.began = int(time.time())
        self.draining = False
        self._tickets: set[ServedRequest] = set()
        self._all_gone = asyncio.Event()
        self._lanes = Lanes()
        self._mean_seconds = 1.0  # of late requests, each new one weighing a tenth

    def start(self) -> None:
        """Begin to take requests, in the running event loop."""
        self.engine.observe(*self.watching.start(), *self._observers)
        self.worker.start()

    def stop(self) -> None:
        """End; what still runs is given up. Waits for the engine's step at hand, and its store."""
        self.worker.stop()
        self.watching.close()
        self.live.close()
        self._lanes.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's."""
        assert self.engine.tokenizer is not None, "create_app asks for one"
        return self.engine.tokenizer

    @property
    def longest_prompt(self) -> int:
        """In tokens; there is always room for one token after it."""
        longest = self.engine.runner.max_tokens - 1
        told = self.settings.max_prompt_tokens
        return longest if told is None else min(longest, told)

    def namespace(self, salt: str | None) -> Namespace:
        """Where the pages of prompts with this ``cache_salt`` are kept."""
        return Namespace(
            tenant=salt or "",
            model=self.settings.name,
            dtype=self.engine.runner.geometry.dtype,
        )

    async def tokenizing(self, function: Callable[[], Result], size: int) -> Result:
        """``function()``, which tokenizes ``size`` characters for an answer, in a thread."""
        return await self._lanes.tokenizing(function, size)

    async def counting(self, function: Callable[[], Result], size: int = 0) -> Result:
        """The same for those who only want the tokens, or look at what there is."""
        return await self._lanes.counting(function, size)

    async def parsing(self, function: Callable[[], Result], size: int) -> Result:
        """``function()``, which parses a body of ``size`` bytes: a large one in a thread."""
        return await self._lanes.parsing(function, size)

    @property
    def longest_text(self) -> int:
        """In bytes of UTF-8: a longer one cannot be so few tokens as a prompt has at most."""
        return self.longest_prompt * self.tokenizer.longest_token

    async def stats(self) -> tuple[CacheStats, dict[str, int | float]]:
        """What cache and engine hold and have done; the engine's of the moment between steps."""
        cache = await asyncio.to_thread(self.engine.cache.stats)
        engine = await self.worker.call(self.engine.stats)
        return cache, {**engine.as_dict()}

    async def store_stats(self) -> dict[str, Any] | None:
        """What the engine's store holds and has done; None without one."""
        store = self.engine.store
        return None if store is None else (await asyncio.to_thread(store.stats)).as_dict()

    async def clear(self, salt: str | None) -> tuple[int, Removed | None]:
        """Forget one ``cache_salt`` or all, in the pool and in the store: pages, and what there.

        The store first: what is loaded meanwhile is in the pool, and goes with it.
        """
        space = None if salt is None else self.namespace(salt)
        stored = await asyncio.to_thread(self.engine.clear_store, space)
        return await asyncio.to_thread(self.engine.cache.clear, space), stored

    async def remove(
        self, tokens: TokenArray, salt: str | None
    ) -> tuple[RemovedPages, Removed | None]:
        """Forget one prompt of a ``cache_salt``, in the pool and in the store.

        The store first, as `clear`.
        """
        space = self.namespace(salt)
        stored = await asyncio.to_thread(self.engine.remove_stored, tokens, space)
        return await asyncio.to_thread(self.engine.cache.remove, tokens, space), stored

    async def hint(
        self, session: str, salt: str | None, action: str, eta_s: float | None
    ) -> tuple[bool, int]:
        """What is said of a session: whether it is known, and of how many pages of its own."""
        told = self.engine.cache.session(session, self.namespace(salt))

        def tell() -> tuple[bool, int]:
            known = told.known
            if action == "suspend":
                assert eta_s is not None
                return known, told.suspend(eta_s)
            return known, told.supersede() if action == "supersede" else told.close()

        return await asyncio.to_thread(tell)

    # --- requests ----------------------------------------------------------------------------

    @asynccontextmanager
    async def admitted(self, call: Call) -> AsyncIterator[ServedRequest]:
        """Take a client's request in, or refuse it: `ApiError` 503, `QueueFull`.

        While the block lasts the request counts as running; all that its jobs hold is given back
        with it, however it ends.
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
        """`ApiError` 503 or `EngineStopped` when no more requests are taken."""
        if self.draining:
            raise ApiError(503, "this server is shutting down", code="shutting_down")
        if not self.worker.alive:
            raise EngineStopped("the engine has stopped")

    def _refuse_if_full(self) -> None:
        """Before anything is tokenized; the engine itself counts exactly."""
        limits = self.engine.limits
        if limits.max_waiting is None:
            return
        most = limits.max_running + limits.max_waiting
        if len(self._tickets) >= most:
            raise QueueFull(f"{most} requests are running or waiting; try again later")

    @property
    def retry_after_s(self) -> int:
        """Seconds until there may be room, as far as late requests tell."""
        ahead = self.engine.num_waiting + 1
        seconds = self._mean_seconds * ahead / self.engine.limits.max_running
        return max(1, min(_LONGEST_WAIT_S, math.ceil(seconds)))

    def note_seconds(self, seconds: float) -> None:
        """A request took so long."""
        self.metrics.whole.observe(seconds)
        self._mean_seconds += (seconds - self._mean_seconds) / 10

    # --- the end -----------------------------------------------------------------------------

    async def drain(self) -> None:
        """Take no more requests, and wait for those that run, ``drain_timeout_s`` at most."""
        self.draining = True
        if not self._tickets:
            return
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                await self._all_gone.wait()
        except TimeoutError:
            self.give_up()

    def give_up(self) -> None:
        """End all requests that run; their clients are told."""
        error = ApiError(503, "this server has shut down", code="shutting_down")
        for ticket in list(self._tickets):
            ticket.fail(error)


class ServedRequest:
    """One client's request while it runs."""

    def __init__(self, service: Service, call: Call) -> None:
        self._service = service
        self._call = call
        self._begun = time.perf_counter()
        self._last: dict[tuple[int, int], float] = {}  # when each answer's last token came
        self._generation: Generation | None = None
        self._failed: ApiError | None = None
        self._record = (
            None if service.capture is None else JobRecorder(service.capture, call.endpoint)
        )
        self.deadline = asyncio.get_running_loop().time() + service.settings.request_timeout_s
        self.outcome = "gone"  # until it is known better

    def fail(self, error: ApiError) -> None:
        """Let it end with ``error``."""
        self._failed = error
        if self._generation is not None:
            self._generation.fail(error)

    def close(self) -> None:
        """Count it, and give back what is unfinished."""
        self._service.metrics.requests.labels(self._call.endpoint, self.outcome).inc()
        if self._generation is not None and not self._generation.finished:
            self._service.worker.abort(self._generation)
        if self._record is not None:
            self._record.close()

    async def submit(self, jobs: Sequence[Job]) -> None:
        """Hand the jobs to the engine, all or none; raises what `Engine.add` raises."""
        if self._failed is not None:
            raise self._failed
        self._generation = Generation(jobs, self._call)
        arrived = time.perf_counter()
        await self._service.worker.submit(self._generation)
        if self._record is not None:
            self._record.begin(jobs, arrived)

    async def deltas(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """What comes, in the pieces that it comes in, with the number of each delta's job.

        Raises what a job fails with.
        """
        assert self._generation is not None, "submit comes first"
        while arrived := await self._generation.next():
            now = time.perf_counter()
            for number, delta in arrived:
                self._note(number, delta, now)
            yield arrived

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
