"""`Worker`: the thread that owns the engine, and how the event loop talks to it."""

from __future__ import annotations

import asyncio
import logging
import threading
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

__all__ = ["Call", "EngineStopped", "Generation", "Job", "Worker"]

log = logging.getLogger("kvkeep.server")

Result = TypeVar("Result")


class EngineStopped(RuntimeError):
    """The thread that owns the engine has ended; nothing can be asked of it any more."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One prompt for the engine."""

    prompt: TokenArray
    params: SamplingParams
    namespace: Namespace
    store: bool
    answers: bool = True
    session: str | None = None
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One client's request: the ``id`` of its answer, the endpoint, and its HTTP headers."""

    id: str
    endpoint: str
    headers: Mapping[str, str] = field(repr=False)

    def origin(self, number: int) -> RequestOrigin:
        """Return the origin of job ``number``: with the answer's id; further jobs id.1, id.2 …"""
        id = f"{self.id}.{number}" if number else self.id
        return RequestOrigin(id, self.endpoint, self.headers)


class Generation:
    """What comes of the jobs of one ``call``: their deltas, each with the number of its job.

    Thread safety: none; it belongs to the event loop. Memory: a client that does not read leaves
    its deltas here, at most one for each token that its jobs may generate. The engine never waits.
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
        """Whether the engine is through with all jobs."""
        return not self._unfinished

    async def next(self) -> list[tuple[int, Delta]]:
        """All deltas that have come since, at least one; none when all jobs are finished.

        Raises what a job failed with; the deltas before that come first.
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
        """A delta of job ``number``."""
        if delta.error is not None:
            self.fail(delta.error)
            return
        self._deltas.append((number, delta))
        self._unfinished -= delta.completion is not None
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """No more comes; the first error is the one that is told."""
        self._error = self._error or error
        self._changed.set()


class Worker:
    """The thread that owns an engine: obeys commands, steps while there is work, sleeps otherwise.

    Commands are obeyed in order between two steps, so that what an abort frees is free before the
    next step. What a step brings goes to the event loop in one piece. An exception out of a step
    fails the requests that the engine has, and no later ones; one out of an abort ends the thread.

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
        # Guards the moment after which no command is taken any more.
        self._door = threading.Lock()
        self._closed = False
        # These two are the thread's own.
        self._requests: dict[int, tuple[Request, Generation, int]] = {}
        self._outbox: list[Callable[[], None]] = []

    @property
    def alive(self) -> bool:
        """Whether the engine can be asked for anything."""
        return self._thread.is_alive() and not self._closed

    def start(self) -> None:
        """Begin; what the engine says goes to the event loop that this is called in."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End after the step at hand, give all requests up, and wait for the thread.

        Which waits until the engine's store has what was computed, ``flush_timeout_s`` at most.
        """

        def end() -> None:
            self._stopping = True

        self._post(end)
        self._thread.join()

    async def submit(self, generation: Generation) -> None:
        """Hand all jobs of ``generation`` to the engine, or none: raises what `Engine.add` does."""
        await self.call(partial(self._add, generation))

    def abort(self, generation: Generation) -> None:
        """Give up what is unfinished of ``generation``, before the engine's next step."""
        self._post(partial(self._abort, generation))

    async def call(self, function: Callable[[], Result]) -> Result:
        """``function()`` in the engine's thread, between two steps; raises what it raises."""
        assert self._loop is not None, "the worker was not started"
        answer: asyncio.Future[Result] = self._loop.create_future()

        def command() -> None:
            if self._stopping:
                self._outbox.append(partial(_refuse, answer, EngineStopped("it is stopping")))
                return
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 - it is raised where it was asked for
                self._outbox.append(partial(_refuse, answer, error))
            else:
                self._outbox.append(partial(_resolve, answer, result))

        if not self._post(command):
            raise EngineStopped("the engine has stopped")
        return await answer

    # --- in the thread -----------------------------------------------------------------------

    def _post(self, command: Callable[[], None]) -> bool:
        """Whether the command was taken; one that is taken is obeyed."""
        with self._door:
            if not self._closed:
                self._commands.put(command)
            return not self._closed

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._obey(wait=not self._engine.has_work)
                if self._engine.has_work and not self._stopping:
                    self._step()
                self._send()
        except Exception:
            log.exception("the engine's thread ends: it can neither step nor give its requests up")
        finally:
            self._end()

    def _obey(self, *, wait: bool) -> None:
        if wait:
            self._commands.get()()
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _step(self) -> None:
        try:
            deltas = self._engine.step()
        except Exception as error:
            # The engine turns what it can into errors of single requests; this is the rest.
            log.exception("a step failed; the requests at hand are given up")
            self._give_up(error)
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
                        turn=job.turn,
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

    def _give_up(self, error: Exception) -> None:
        given_up = list(self._requests.values())
        self._requests.clear()
        for _, generation, _ in given_up:
            self._outbox.append(partial(generation.fail, error))
        for request, _, _ in given_up:
            self._engine.abort(request)

    def _send(self) -> None:
        if not self._outbox:
            return
        assert self._loop is not None
        outbox, self._outbox = self._outbox, []
        self._loop.call_soon_threadsafe(_each, outbox)

    def _end(self) -> None:
        with self._door:
            self._closed = True
        self._stopping = True  # what is still asked for is refused
        try:
            self._obey(wait=False)
            self._give_up(EngineStopped("the engine has stopped"))
        except Exception:
            log.exception("the engine could not give its requests up")
        finally:
            self._send()
            self._close()

    def _close(self) -> None:
        try:
            if not self._engine.close(self._flush_timeout_s):
                log.warning("the store did not take all that was computed in time")
        except Exception:
            log.exception("the engine could not be closed")


def _each(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _resolve(answer: asyncio.Future[Result], result: Result) -> None:
    if not answer.done():  # who asked may have gone
        answer.set_result(result)


def _refuse(answer: asyncio.Future[Result], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
