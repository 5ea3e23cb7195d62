"""`Worker`: the thread that owns the engine, and its interface for the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from kvkeep.observe.usage import RequestOrigin

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.engine import Delta, Engine, Request, SamplingParams
    from kvkeep.serve.server.pins import Keep

__all__ = ["Call", "EngineStopped", "Generation", "Job", "Worker"]

log = logging.getLogger("kvkeep.server")

Result = TypeVar("Result")


class EngineStopped(RuntimeError):
    """The engine's thread has ended, so nothing can be computed any more."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One prompt for the engine."""

    prompt: TokenArray
    params: SamplingParams
    namespace: Namespace
    store: bool
    answers: bool = True
    session: str | None = None
    keep: Keep | None = None
    """Prefixes to pin in the pool."""
    retain: Keep | None = None
    """Prefixes to keep in the tiers."""


@dataclass(frozen=True, slots=True)
class Call:
    """A client's request: the ``id`` of its response, the endpoint, and its HTTP headers."""

    id: str
    endpoint: str
    headers: Mapping[str, str] = field(repr=False)

    def origin(self, number: int) -> RequestOrigin:
        """Return the origin of job ``number``, with id.1, id.2 … for the jobs after the first."""
        id = f"{self.id}.{number}" if number else self.id
        return RequestOrigin(id, self.endpoint, self.headers)


class Generation:
    """The deltas of the jobs of one ``call``, each with the number of its job.

    Thread safety: none; for the event loop. Memory: while a client does not read, up to one delta
    per token that its jobs may generate waits here. The engine never waits.
    """

    def __init__(self, jobs: Sequence[Job], call: Call) -> None:
        self.jobs = jobs
        self.call = call
        self._deltas: deque[tuple[int, Delta]] = deque()
        self._unfinished = len(jobs)
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    @property
    def finished(self) -> bool:
        """Whether the engine has finished all jobs."""
        return not self._unfinished

    async def next(self) -> list[tuple[int, Delta]]:
        """Wait for deltas and return all that arrived; an empty list after the last.

        Raises the error of a job, after the deltas before it.
        """
        while not self._deltas and self._error is None and self._unfinished:
            self._changed.clear()
            await self._changed.wait()
        if not self._deltas and self._error is not None:
            raise self._error
        arrived = list(self._deltas)
        self._deltas.clear()
        return arrived

    def put(self, number: int, delta: Delta) -> None:
        """Add a delta of job ``number``."""
        if delta.error is not None:
            self.fail(delta.error)
            return
        self._deltas.append((number, delta))
        self._unfinished -= delta.completion is not None
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """End with ``error``, unless an earlier error did."""
        self._error = self._error or error
        self._changed.set()


class Worker:
    """The thread that owns an engine: it runs commands, steps while there is work, else sleeps.

    Commands run in order between two steps, so pages freed by an abort are free in the next step.
    The deltas of a step reach the event loop together. An exception from a step fails all requests
    in the engine, but no later ones; an exception from an abort ends the thread.

    Thread safety: `start`, `submit`, `abort` and `call` are for the event loop.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        flush_timeout_s: float = 10.0,
    ) -> None:
        self._engine = engine
        self._flush_timeout_s = flush_timeout_s
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvkeep engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        # Held to close the command queue: no command is accepted afterwards.
        self._closing = threading.Lock()
        self._closed = False
        self._busy_since: float | None = None  # written by the thread alone
        # For the worker's thread only:
        self._requests: dict[int, tuple[Request, Generation, int]] = {}
        self._outbox: list[Callable[[], None]] = []

    @property
    def alive(self) -> bool:
        """Whether the engine accepts commands."""
        return self._thread.is_alive() and not self._closed

    @property
    def busy_s(self) -> float:
        """Seconds that the running step or command has taken so far; 0 between them."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def start(self) -> None:
        """Start the thread; results go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current step, abort all requests, and wait for the thread.

        The thread waits up to ``flush_timeout_s`` for the engine's store to write computed KV.
        """

        def stop() -> None:
            self._stopping = True

        self._post(stop)
        self._thread.join()

    async def submit(self, generation: Generation) -> None:
        """Add all jobs of ``generation`` to the engine, or none; raises what `Engine.add` does."""
        await self.call(partial(self._add, generation))

    def abort(self, generation: Generation) -> None:
        """Abort the unfinished jobs of ``generation`` before the engine's next step."""
        self._post(partial(self._abort, generation))

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run ``function`` in the engine's thread, between two steps; raises what it raises."""
        assert self._loop is not None, "call start first"
        answer: asyncio.Future[Result] = self._loop.create_future()

        def command() -> None:
            if self._stopping:
                self._outbox.append(partial(_refuse, answer, EngineStopped("the engine stops")))
                return
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 - raised in the caller
                self._outbox.append(partial(_refuse, answer, error))
            else:
                self._outbox.append(partial(_resolve, answer, result))

        if not self._post(command):
            raise EngineStopped("the engine has stopped")
        return await answer

    # --- in the thread -----------------------------------------------------------------------

    def _post(self, command: Callable[[], None]) -> bool:
        """Queue a command. Return False if it was refused; a queued command always runs."""
        with self._closing:
            if not self._closed:
                self._commands.put(command)
            return not self._closed

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_commands(wait=not self._engine.has_work)
                self._send()  # so that an answer can begin before the first step ends
                if self._engine.has_work and not self._stopping:
                    self._timed(self._step)
                self._send()
        except Exception:
            log.exception("the engine's thread has ended: an abort failed")
        finally:
            self._finish()

    def _run_commands(self, *, wait: bool) -> None:
        if wait:
            self._timed(self._commands.get())
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            self._timed(command)

    def _timed(self, work: Callable[[], None]) -> None:
        self._busy_since = time.monotonic()
        try:
            work()
        finally:
            self._busy_since = None

    def _step(self) -> None:
        try:
            deltas = self._engine.step()
        except Exception as error:
            # The engine reports errors of single requests in their deltas; this is any other.
            log.exception("an engine step failed; all its requests are aborted")
            self._fail_all(error)
            return
        for delta in deltas:
            known = self._requests.get(delta.request.id)
            if known is None:
                continue
            _, generation, number = known
            self._outbox.append(partial(generation.put, number, delta))
            if delta.completion is not None or delta.error is not None:
                del self._requests[delta.request.id]

    def _add(self, generation: Generation) -> None:
        added: list[Request] = []
        try:
            for number, job in enumerate(generation.jobs):
                added.append(
                    self._engine.add(
                        job.prompt,
                        job.params,
                        namespace=job.namespace,
                        store=job.store,
                        answers=job.answers,
                        session=job.session,
                        origin=generation.call.origin(number),
                    )
                )
        except Exception:
            for request in added:
                self._engine.abort(request)
            raise
        for number, request in enumerate(added):
            self._requests[request.id] = request, generation, number

    def _abort(self, generation: Generation) -> None:
        own = [request for request, other, _ in self._requests.values() if other is generation]
        for request in own:
            del self._requests[request.id]
            self._engine.abort(request)

    def _fail_all(self, error: Exception) -> None:
        failed = list(self._requests.values())
        self._requests.clear()
        for _, generation, _ in failed:
            self._outbox.append(partial(generation.fail, error))
        for request, _, _ in failed:
            self._engine.abort(request)

    def _send(self) -> None:
        if not self._outbox:
            return
        assert self._loop is not None
        outbox, self._outbox = self._outbox, []
        self._loop.call_soon_threadsafe(_each, outbox)

    def _finish(self) -> None:
        with self._closing:
            self._closed = True
        self._stopping = True  # commands still queued are refused
        try:
            self._run_commands(wait=False)
            self._fail_all(EngineStopped("the engine has stopped"))
        except Exception:
            log.exception("the engine's requests could not be aborted")
        finally:
            self._send()
            self._close_engine()

    def _close_engine(self) -> None:
        try:
            if not self._engine.close(self._flush_timeout_s):
                log.warning("not all that was computed reached the store within the flush timeout")
        except Exception:
            log.exception("the engine could not be closed")


def _each(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _resolve(answer: asyncio.Future[Result], result: Result) -> None:
    if not answer.done():  # the caller may have been cancelled
        answer.set_result(result)


def _refuse(answer: asyncio.Future[Result], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
