"""Engines with several ranks, at once, on one store; each in a process of its own.

The processes are forks of one that has imported vLLM, and so are their workers: a spawned one takes
nine seconds of a core for imports alone.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines import Answer, prompt
from tiered import tiered

from kvkeep.integrations.vllm.offload import lookups

if TYPE_CHECKING:
    from collections.abc import Sequence

LENGTHS = (31, 65, 97, 200, 333)
_FORK = multiprocessing.get_context("fork")
_LONGEST_S = 300.0


def asked(writer: int) -> list[list[int]]:
    """The prompts of the engine with ``writer`` ranks; 0: those that all ask at once."""
    return [prompt(length, seed=60 + writer) for length in LENGTHS]


def together(model: str, tier: str, directory: str, ranks: str) -> None:
    """In a process of its own: run engines with so many ranks each ("1 2 4") at once."""
    every = [int(each) for each in ranks.split()]
    meeting = Meeting(Path(directory), every)
    processes = [_FORK.Process(target=_run, args=(model, tier, each, meeting)) for each in every]
    for process in processes:
        process.start()
    try:
        until = time.monotonic() + _LONGEST_S
        while any(process.exitcode is None for process in processes):
            assert time.monotonic() < until, "engines do not end"
            assert not any(process.exitcode for process in processes), "an engine has failed"
            time.sleep(0.1)
        assert not any(process.exitcode for process in processes), "an engine has failed"
    finally:
        for process in processes:
            process.kill()


@dataclass(frozen=True)
class Meeting:
    """Where engines wait for each other: those with so many ranks each."""

    directory: Path
    every: Sequence[int]

    def wait(self, where: str, ranks: int) -> None:
        """Wait until the engines of all ranks are there."""
        (self.directory / f"{where} {ranks}").touch()
        until = time.monotonic() + _LONGEST_S
        while not all((self.directory / f"{where} {each}").exists() for each in self.every):
            assert time.monotonic() < until, f"the engine with {ranks} ranks waits alone"
            time.sleep(0.02)


def _run(model: str, tier: str, ranks: int, meeting: Meeting) -> None:
    """Write, wait until all have written, and read what each has written."""
    more: dict[str, Any] = {"max_model_len": 1024, "num_gpu_blocks_override": 256}
    options = {"load_timeout": 60.0}
    lookups.LOOKUP_S = 20.0  # several engines share the machine
    if ranks > 1:
        more |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
    told: dict[str, Any] = {}
    with tiered(model, tier, options=options, **more) as one:

        def ask(prompts: list[list[int]]) -> list[object]:
            return _plain(one.ask(prompts, max_tokens=3))

        def written() -> None:
            one.forget_all()  # which waits until all is given to the store
            assert one.store.flush(60.0)

        told["cold"] = ask(asked(ranks))
        written()
        meeting.wait("written", ranks)
        for writer in meeting.every:
            one.forget_all()
            told[f"of {writer}"] = ask(asked(writer))
        meeting.wait("read", ranks)
        told["at once"] = ask(asked(0))
        written()
        meeting.wait("written at once", ranks)
        told["after it"] = ask(asked(0))
        told["failed"] = one["failed_tokens"]
        told["namespace"] = repr(one.store.namespace)
        meeting.wait("done", ranks)
    (meeting.directory / f"{ranks}.json").write_text(json.dumps(told))


def _plain(answers: Sequence[Answer]) -> list[object]:
    return [[a.tokens, [list(step.items()) for step in a.logprobs], a.cached] for a in answers]


def answers_of(told: Sequence[Any]) -> list[Answer]:
    return [
        Answer(tuple(tokens), tuple({int(t): p for t, p in step} for step in logprobs), cached)
        for tokens, logprobs, cached in told
    ]
