"""`JobRecorder`: what a capture is told of one client's request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.bench.traces import Seen, Served

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.bench.traces import Capture
    from kvkeep.serve.engine import Completion
    from kvkeep.serve.server.worker import Job

__all__ = ["JobRecorder"]


class JobRecorder:
    """Notes each job of a request once: when it has ended, or when the request is given up.

    A job that came to no good end was looked up in the cache, too, and may have left some of its
    prompt there; it is noted without an answer.
    """

    def __init__(self, capture: Capture, kind: str) -> None:
        self._capture = capture
        self._kind = kind
        self._arrived = 0.0
        self._jobs: dict[int, Job] = {}

    def begin(self, jobs: Sequence[Job], arrived: float) -> None:
        """The engine has taken these; ``arrived`` is of `time.perf_counter`."""
        self._jobs = dict(enumerate(jobs))
        self._arrived = arrived

    def end(self, number: int, done: Completion) -> None:
        """Job ``number`` is through."""
        served = Served(done.cached_tokens, done.loaded_tokens, done.ttft_s, done.seconds)
        self._note(self._jobs.pop(number), done.choices[0].tokens, served)

    def close(self) -> None:
        """Nothing more comes."""
        for job in self._jobs.values():
            self._note(job, (), None)
        self._jobs.clear()

    def _note(self, job: Job, answer: Sequence[int], served: Served | None) -> None:
        self._capture.note(
            Seen(
                arrived=self._arrived,
                prompt=job.prompt,
                namespace=job.namespace,
                answer=answer,
                store=job.store,
                kind=self._kind,
                served=served,
            )
        )
