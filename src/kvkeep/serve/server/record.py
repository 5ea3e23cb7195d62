"""`JobRecorder`: hands one client's request to a capture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.bench.traces import Seen, Served
from kvkeep.core.returns import stop_after

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from kvkeep.bench.traces import Capture
    from kvkeep.serve.engine import Completion
    from kvkeep.serve.server.worker import Job

__all__ = ["JobRecorder"]


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
