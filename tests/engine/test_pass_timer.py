"""When passes are over on a GPU; CUDA's events are stand-ins: no emulated device has a queue."""

from __future__ import annotations

from typing import ClassVar

import torch

from kvkeep.core.cost import LearnedPrefill
from kvkeep.serve.engine.step import PassTimer


class Event:
    """Takes a second a stream's mark, and is over at once."""

    marks: ClassVar[list[object]] = []

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object = None) -> None:
        self.marks.append(stream)
        self.at = len(self.marks)

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at - self.at)


def test_events_are_of_the_stream_of_the_device(monkeypatch):
    """A thread's current device is another one where the engine runs on `cuda:1`."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
    told = []
    prefill = LearnedPrefill()
    monkeypatch.setattr(LearnedPrefill, "observe", lambda _self, *what: told.append(what))
    timer = PassTimer(prefill, torch.device("cuda:1"))
    timer.begin()
    timer.end([(0, 64)])
    assert Event.marks == ["stream of cuda:1"] * 2
    assert told == [([(0, 64)], 1.0)]
