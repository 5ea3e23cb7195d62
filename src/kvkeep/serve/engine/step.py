"""`EngineStep`: one forward pass over the chunks that the `Scheduler` chose, and its deltas.

admit, receive, grow, chunks ──▶ copies ──▶ forward ──▶ publish ──▶ choose ──▶ emit
                                                                      │
                       drafts are verified, rejected ones truncated; answers fork
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch

from kvkeep.core.errors import OutOfPages
from kvkeep.observe.usage import Notifier, PromptComputed
from kvkeep.serve.engine.attention.batch import Piece
from kvkeep.serve.engine.request import BY_ARRIVAL, Answer, Delta
from kvkeep.serve.engine.sampling import choose, logprobs_of

if TYPE_CHECKING:
    from kvkeep.core.cost import LearnedPrefill
    from kvkeep.observe.usage import RequestEnded
    from kvkeep.serve.engine.offload.offload import Offload
    from kvkeep.serve.engine.request import Request
    from kvkeep.serve.engine.runner import Runner
    from kvkeep.serve.engine.sampling import TokenLogprob
    from kvkeep.serve.engine.scheduler import Chunk, GroupPasses, PassPlanner, Scheduler
    from kvkeep.serve.engine.stats import EngineStats

__all__ = ["EngineStep", "PassTimer"]

_MOST_PENDING: Final = 64


class PassTimer:
    """Times passes, on a GPU to when their results are there; nothing waits for that.

    `begin`, the pass, and `end` are in one thread. Thread safety: none.
    """

    def __init__(self, prefill: LearnedPrefill, device: torch.device) -> None:
        self._prefill = prefill
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._began: Any = None
        self._pending: deque[tuple[list[tuple[int, int]], Any, Any]] = deque()

    def begin(self) -> None:
        """Note that a pass begins."""
        self._began = self._mark() if self._on_gpu else perf_counter()

    def end(self, pieces: list[tuple[int, int]]) -> None:
        """Note that the pass over ``pieces``, (start, stop) of each, was handed to the device."""
        if not self._on_gpu:
            self._prefill.observe(pieces, perf_counter() - self._began)
            return
        self._pending.append((pieces, self._began, self._mark()))
        if len(self._pending) > _MOST_PENDING:
            self._pending.popleft()
        self.learn()

    def learn(self) -> None:
        """Tell the times of passes whose results are there."""
        while self._pending and self._pending[0][2].query():
            pieces, began, ended = self._pending.popleft()
            self._prefill.observe(pieces, began.elapsed_time(ended) / 1e3)

    def _mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        # Without a stream it would be one of the thread's current device, which may be another.
        event.record(torch.cuda.current_stream(self._device))
        return event


_log = logging.getLogger(__name__)


class EngineStep:
    """Runs the steps of an `Engine`. Thread safety: none."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        planner: PassPlanner,
        stats: EngineStats,
        *,
        timer: PassTimer,
        offload: Offload | None,
        notifier: Notifier | None = None,
        passes: GroupPasses | None = None,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._planner = planner
        self._passes = passes
        self._stats = stats
        self._timer = timer
        self._offload = offload
        self._notifier = notifier or Notifier()
        # Requests that ended in this step: emitted after the step's other events about them.
        self._over: list[RequestEnded] = []

    def run(self) -> list[Delta]:
        """Run one step; see `Engine.step`."""
        deltas: list[Delta] = []
        try:
            self._run(deltas)
        finally:
            over, self._over = self._over, []
            for event in over:
                self._notifier.emit(event)
        return deltas

    def _run(self, deltas: list[Delta]) -> None:
        scheduler, planner = self._scheduler, self._planner
        refused = scheduler.admit()
        if refused is not None:
            deltas.append(self._fail(refused.answer.request, refused.error))
        if self._offload is not None:
            self._offload.receive(scheduler.running)
        for answer in planner.grow():
            self._end_stuck(answer, deltas)
        chunks = planner.chunks()
        while planner.refused:
            stopped = planner.refused.pop()
            deltas.append(self._fail(stopped.answer.request, stopped.error))
        if chunks:
            try:
                self._compute(chunks, deltas)
            except Exception as error:  # noqa: BLE001 - the requests of the pass fail, the engine goes on
                _log.exception("a step over %d sequences failed", len(chunks))
                requests = {chunk.answer.request.id: chunk.answer.request for chunk in chunks}
                deltas.extend(
                    self._fail(request, error)
                    for request in requests.values()
                    if request.id in scheduler.requests
                )
        else:
            idle = not scheduler.running or any(answer.loading for answer in scheduler.running)
            assert idle or self._passes is not None, "a runnable answer was idle"
            if self._passes is not None:  # before a load writes to pages that these read
                self._runner.copy(self._passes.copies())
            if self._offload is not None and scheduler.requests:
                self._offload.pause()

    def _compute(self, chunks: list[Chunk], deltas: list[Delta]) -> None:
        runner, observed = self._runner, bool(self._notifier.observers)
        began = perf_counter() if observed else 0.0
        sequences = [chunk.answer.running_sequence for chunk in chunks]
        if self._passes is not None:
            runner.copy(self._passes.copies())
        copies = [copy for sequence in sequences for copy in sequence.copies()]
        if self._offload is None:
            runner.copy(copies)
        else:
            self._offload.copy(copies)
        logits = self._forward(chunks)
        self._stats.steps += 1
        self._stats.computed_tokens += sum(chunk.stop - chunk.start for chunk in chunks)
        for chunk in chunks:
            chunk.answer.computed = chunk.stop
        for chunk in chunks:
            if not chunk.answer.drafts:  # drafts are published once they are verified
                self._checkpoint(chunk.answer)
                self._publish(chunk.answer)
        self._choose(chunks, logits, deltas)
        if observed:
            self._report_computed(chunks, perf_counter() - began)

    def _forward(self, chunks: list[Chunk]) -> torch.Tensor:
        """Compute ``chunks``, and learn from those of prompts how long that takes."""
        self._timer.begin()
        logits = self._runner.forward([_piece(chunk) for chunk in chunks])
        if any(not chunk.answer.generated for chunk in chunks):
            self._timer.end([(chunk.start, chunk.stop) for chunk in chunks])
        return logits

    def _report_computed(self, chunks: list[Chunk], seconds: float) -> None:
        """Report the prompt tokens computed of each request, with their share of the step."""
        share = seconds / sum(chunk.stop - chunk.start for chunk in chunks)
        computed: dict[int, tuple[Request, int]] = {}
        for answer, start, stop, _ in chunks:
            request = answer.request
            tokens = min(stop, request.prompt_tokens) - start
            if tokens > 0:
                before = computed.get(request.id, (request, 0))[1]
                computed[request.id] = request, before + tokens
        for request, tokens in computed.values():
            self._notifier.emit(PromptComputed(request.record, tokens, share * tokens))

    def _checkpoint(self, answer: Answer) -> None:
        """Copy the state, if a checkpoint was planned at the end of the pass."""
        if self._passes is not None and (copy := self._passes.ended(answer)) is not None:
            self._runner.copy([copy])

    def _publish(self, answer: Answer) -> None:
        """Publish computed full pages to the cache, and hand full blocks to the store."""
        sequence = answer.running_sequence
        if (
            answer.request.store
            and answer.computed - sequence.num_published >= self._runner.page_size
        ):
            sequence.publish(answer.computed)
        if self._offload is not None:
            self._offload.save(answer)

    # --- choosing ----------------------------------------------------------------------------

    def _choose(self, chunks: list[Chunk], logits: torch.Tensor, deltas: list[Delta]) -> None:
        """Choose a token for each row of logits, in one call."""
        answers: list[Answer] = []
        rows: list[int] = []
        row = 0
        for answer, _, _, outputs in chunks:
            if outputs:
                for one in self._forks(answer):
                    answers.append(one)
                    rows.extend(range(row, row + outputs))
            row += outputs
        if not answers:
            return
        if rows != list(range(len(logits))):
            logits = logits[rows]
        how = [answer.row(ahead) for answer in answers for ahead in range(1 + len(answer.drafts))]
        tokens = choose(logits, how)
        wanted = [
            answer.request.params.logprobs
            for answer in answers
            for _ in range(1 + len(answer.drafts))
        ]
        logprobs = logprobs_of(logits, tokens, wanted)
        at = 0
        for answer in answers:
            count = 1 + len(answer.drafts)
            self._take(answer, tokens[at : at + count], logprobs[at : at + count], deltas)
            at += count

    def _forks(self, answer: Answer) -> list[Answer]:
        """Return the answers that use this logits row: all of the request at the prompt's end."""
        request = answer.request
        if request.forked or request.params.n == 1:
            return [answer]
        forks = [answer]
        for index in range(1, request.params.n):
            try:
                other = answer.fork(index)
            except OutOfPages:  # no room for its state: it waits, and computes the prompt's end
                other = Answer(request, index)
            request.live.append(other)
            if other.sequence is None:
                self._scheduler.wait(other)
            else:
                self._scheduler.run(other)
                forks.append(other)
        return forks

    def _take(
        self,
        answer: Answer,
        tokens: list[int],
        logprobs: list[TokenLogprob | None],
        deltas: list[Delta],
    ) -> None:
        """Accept the chosen tokens: one, and one more for each draft that was right."""
        runner, drafts = self._runner, answer.drafts
        taken = 0
        for token, logprob in zip(tokens, logprobs, strict=True):
            answer.accept(token, logprob, ends=runner.end_tokens, longest=runner.max_tokens)
            taken += 1
            if answer.finish_reason or (taken <= len(drafts) and drafts[taken - 1] != token):
                break
        self._stats.generated_tokens += taken
        if drafts:
            self._stats.drafted_tokens += len(drafts)
            self._stats.accepted_drafts += taken - 1
            sequence = answer.running_sequence
            sequence.truncate(sequence.num_tokens - len(drafts) + taken - 1)
            answer.computed = sequence.num_tokens
            if self._passes is not None:
                answer.computed = self._passes.verified(answer)
            answer.verified_drafts(taken - 1)
            self._checkpoint(answer)
            self._publish(answer)
        self._emit(answer, deltas)

    # --- results -----------------------------------------------------------------------------

    def _emit(self, answer: Answer, deltas: list[Delta]) -> None:
        """Add the answer's delta; end the answer if finished, and its request if it was last."""
        request = answer.request
        deltas.append(answer.delta())
        if answer.finish_reason is None:
            return
        if self._offload is not None:
            self._offload.save(answer, last=True)
        self._scheduler.remove(answer)
        request.live.remove(answer)
        request.ended.append(answer)
        if not request.live:
            self._end(request, sorted(request.ended, key=BY_ARRIVAL), deltas)

    def _end(self, request: Request, answers: list[Answer], deltas: list[Delta]) -> None:
        """End a request with these answers; ``deltas[-1]`` is its last."""
        self._stats.finished += 1
        self._scheduler.leave(request)
        choices = tuple(answer.choice() for answer in answers)
        completion = request.completion(choices)
        self._over.append(request.ended_as(completion))
        deltas[-1] = replace(deltas[-1], completion=completion)

    def _end_stuck(self, answer: Answer, deltas: list[Delta]) -> None:
        """End an answer for which the pool has no page left, at the length it has."""
        answer.finish("length")
        self._emit(answer, deltas)

    def _fail(self, request: Request, error: Exception) -> Delta:
        self._stats.failed += 1
        self._over.append(request.ended_now("failed"))
        self._scheduler.leave(request)
        return Delta(request, 0, error=error)


def _piece(chunk: Chunk) -> Piece:
    answer, start, stop, outputs = chunk
    sequence = answer.running_sequence
    tokens, groups = sequence.tokens[start:stop], sequence.groups
    if groups is None:
        return Piece(tokens, start, sequence.pages, outputs)
    return Piece(tokens, start, sequence.pages, outputs, rows=groups.tables, state=groups.state)
