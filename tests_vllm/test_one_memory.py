"""Two vLLM processes share one memory; one of them is killed and comes back warm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from engines import LENGTHS, PROMPTS, Answer, engine, found, same

from kvkeep.store.backends.shm import ShmBackend


class Neighbour:
    """An engine in another process that answers `PROMPTS` again and again until it is killed."""

    def __init__(self, model: str, tier: str) -> None:
        code = "import sys, conftest, test_one_memory; test_one_memory.answer(*sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, model, tier],
            cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def round(self) -> list[Answer]:
        """Wait for the answers of one round."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("["):
                return [
                    Answer(
                        tuple(tokens), tuple({int(k): v for k, v in one.items()} for one in logs), n
                    )
                    for tokens, logs, n in json.loads(line)
                ]
        raise AssertionError(f"the engine ended with {self.process.wait()}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def answer(model: str, tier: str) -> None:
    """What a neighbour does; called in its process."""
    with engine(model, [tier]) as one:
        while True:
            answers = one.ask(PROMPTS)
            print(json.dumps([[a.tokens, a.logprobs, a.cached] for a in answers]), flush=True)
            one.forget()


@pytest.mark.skipif(sys.platform != "linux", reason="shm:// needs Linux")
def test_a_killed_engine_comes_back_warm(llama: str, cold: list[Answer], tmp_path: Path) -> None:
    tier = f"shm://64MiB?dir={tmp_path}"
    whole = sum(map(found, LENGTHS))
    with engine(llama, [tier]) as one:
        first = one.ask(PROMPTS)
        same(cold, first)
        for turn in range(2):
            other = Neighbour(llama, tier)
            try:
                warm = other.round()
                same(cold, warm)
                assert sum(one.cached for one in warm) == whole, f"turn {turn}"
            finally:
                other.kill()  # in the middle of its next round, or of its beginning
            one.forget()
            again = one.ask(PROMPTS)
            same(cold, again)
            assert sum(one.cached for one in again) == whole
    with ShmBackend(None, directory=str(tmp_path)) as backend:
        backend.check()
        assert backend.lost == 0
        assert not backend.arena.books.holders_all.any()
