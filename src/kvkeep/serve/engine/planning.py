"""`PassPlanner`: chooses the tokens that the next step computes.

    grow ──▶ chunks ──▶ a forward pass

Older requests come first, and when pages run out, the youngest answer is preempted; so the oldest
can always go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvkeep.core.errors import OutOfPages
from kvkeep.serve.engine.scheduler import Refused

if TYPE_CHECKING:
    from kvkeep.serve.engine.answer import Answer
    from kvkeep.serve.engine.limits import Limits
    from kvkeep.serve.engine.offload.offload import Offload
    from kvkeep.serve.engine.passes import GroupPasses
    from kvkeep.serve.engine.scheduler import Scheduler

__all__ = ["Chunk", "PassPlanner"]


class Chunk(NamedTuple):
    """Tokens ``start`` … ``stop - 1`` of an answer's sequence, to be computed in this step.

    The last ``outputs`` of them need logits: none in the middle of a prompt.
    """

    answer: Answer
    start: int
    stop: int
    outputs: int


class PassPlanner:
    """Plans the passes over the running answers of a `Scheduler`.

    Thread safety: none. Cost of a step: O(running).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        limits: Limits,
        passes: GroupPasses | None = None,
        *,
        offload: Offload | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._passes = passes  # None: every layer keeps every token
        self._offload = offload
        self.refused: list[Refused] = []
        """Answers that can never go on, although no other runs; the step ends and clears them."""

    def grow(self) -> list[Answer]:
        """Append the newest token and drafts to each decoding answer's sequence, oldest first.

        Preempts the youngest when pages run out. Returns answers that cannot grow although no
        other is left to preempt: they have reached their greatest length.
        """
        running = self._scheduler.running
        spare = self._limits.step_tokens - sum(answer.decoding for answer in running)
        stuck: list[Answer] = []
        position = 0
        while position < len(running):
            answer = running[position]
            if answer.pending or not self._is_prepared(answer):
                drafted = self._append(answer, spare)
                if drafted is None:
                    victim = running[-1]
                    if len(running) == 1:
                        stuck.append(answer)
                        position += 1
                    else:
                        self._scheduler.preempt(victim)
                    continue
                spare -= drafted
            position += 1
        return stuck

    def _is_prepared(self, answer: Answer) -> bool:
        """Whether nothing is left to do before the pass over the newest token."""
        return self._passes is None or not answer.decoding or self._passes.is_prepared(answer)

    def _append(self, answer: Answer, spare: int) -> int | None:
        """Append the newest token and drafts; return the number of drafts, None if out of pages.

        With groups of layers, also prepare their pass; a call that returned None may be repeated.
        """
        sequence, passes = answer.running_sequence, self._passes
        if answer.pending:
            newest = answer.generated[-1]
            if passes is not None:
                spare = passes.most_drafts(answer, spare)
            drafts = answer.propose(spare)
            # No answer is preempted for drafts: if they do not fit, it goes on without.
            if drafts and self._append_drafts(answer, newest, drafts):
                return len(drafts)
            try:
                sequence.append(newest)
            except OutOfPages:
                return None
        if passes is not None and answer.decoding:
            try:
                passes.prepare(answer, sequence.num_tokens)
            except OutOfPages:
                return None
        return 0

    def _append_drafts(self, answer: Answer, newest: int, drafts: list[int]) -> bool:
        """Append the newest token and ``drafts``; return False, with nothing done, without room."""
        sequence, passes = answer.running_sequence, self._passes
        before = sequence.num_tokens
        try:
            sequence.append([newest, *drafts])
        except OutOfPages:
            return False
        answer.drafts = drafts
        if passes is not None:
            try:
                passes.prepare(answer, sequence.num_tokens)
            except OutOfPages:
                answer.drafts = []
                sequence.truncate(before)
                passes.verified(answer)
                return False
        return True

    def chunks(self) -> list[Chunk]:
        """Return the chunks to compute: newest tokens of decoding answers, then prompts in order.

        A prompt that waits for its load is left out.
        """
        chunks: list[Chunk] = []
        prompts: list[Answer] = []
        budget = self._limits.step_tokens
        loading = set() if self._offload is None else self._offload.waiting(self._scheduler.running)
        for answer in self._scheduler.running:
            sequence = answer.running_sequence
            if not answer.decoding:
                if id(answer) not in loading:
                    prompts.append(answer)
            elif answer.computed < sequence.num_tokens:
                chunk = Chunk(answer, answer.computed, sequence.num_tokens, 1 + len(answer.drafts))
                chunks.append(chunk)
                budget -= chunk.stop - chunk.start
        for answer in prompts:
            if budget <= 0:
                break
            stop = min(answer.computed + budget, answer.num_tokens)
            if self._passes is not None:
                if answer.sequence is None:
                    continue  # preempted for one before it
                found = self._prepared(self._passes, answer, stop)
                if found is None:
                    continue
                stop = found
            outputs = 1 if stop == answer.num_tokens else 0
            chunks.append(Chunk(answer, answer.computed, stop, outputs))
            budget -= stop - answer.computed
        if self._passes is not None:  # some may have been preempted for older ones
            chunks = [chunk for chunk in chunks if chunk.answer.sequence is not None]
        return chunks

    def _prepared(self, passes: GroupPasses, answer: Answer, stop: int) -> int | None:
        """Prepare a pass of ``answer`` up to ``stop``, or a shorter one; return where it ends.

        For the shortest one, younger answers are preempted. None if there is no room; if no other
        answer runs that could leave some, it is refused.
        """
        stop = passes.stop(answer, stop)
        while True:
            try:
                passes.prepare(answer, stop)
            except OutOfPages as error:
                shorter = passes.shorter(answer, stop)
                if shorter is not None:
                    stop = shorter
                elif not self._scheduler.preempt_for(answer):
                    if len(self._scheduler.running) == 1:
                        self.refused.append(Refused(answer, error))
                    return None
            else:
                return stop
