"""Forks of answers, and what happens if a pool has no room for their states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import OutOfPages
from kvkeep.serve.engine.answer import Answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.serve.engine.beams import Pick
    from kvkeep.serve.engine.request import Request
    from kvkeep.serve.engine.scheduler import Scheduler

__all__ = ["fork_or_wait", "replace_beams"]


def fork_or_wait(scheduler: Scheduler, answer: Answer, index: int) -> Answer:
    """Add answer ``index`` of the request of ``answer``, whose prompt is computed.

    It is a fork that runs. If there is no room for its state, it waits, without a sequence, and
    computes the end of the prompt again.
    """
    request = answer.request
    try:
        other = answer.fork(index)
    except OutOfPages:
        other = Answer(request, index)
    request.live.append(other)
    if other.sequence is None:
        scheduler.wait(other)
    else:
        scheduler.run(other)
    return other


def replace_beams(scheduler: Scheduler, request: Request, picks: Sequence[Pick]) -> None:
    """Replace the beams of ``request`` by those that its search picked.

    The last pick of each beam takes over its sequence, the others are forks. Preempts younger
    requests for room. Raises `OutOfPages` if there is still none; the beams are as they were then.
    """
    parents = request.live
    last = {pick.parent: index for index, pick in enumerate(picks)}
    forks: dict[int, Answer] = {}
    try:
        for index, pick in enumerate(picks):
            if index != last[pick.parent]:
                forks[index] = _fork(scheduler, parents[pick.parent], index, pick.token)
    except OutOfPages:
        for fork in forks.values():
            fork.running_sequence.close()
        raise
    beams: list[Answer] = []
    for index, pick in enumerate(picks):
        if index in forks:
            beam = forks[index]
            scheduler.run(beam)
        else:
            parent = parents[pick.parent]
            beam = parent.follow(index, pick.token)
            scheduler.replace(parent, beam)
        beams.append(beam)
    for number, parent in enumerate(parents):
        if number not in last:
            scheduler.remove(parent)
    request.live = beams


def _fork(scheduler: Scheduler, beam: Answer, index: int, token: int) -> Answer:
    while True:
        try:
            return beam.fork(index, token)
        except OutOfPages:
            if not scheduler.preempt_for(beam):
                raise
