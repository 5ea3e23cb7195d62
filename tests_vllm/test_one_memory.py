"""Two vLLM processes share one memory; one of them is killed and comes back warm."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from engines import LENGTHS, PROMPTS, Answer, beside, engine, found, same

from kvkeep.store.backends.shm import ShmBackend

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path


class Neighbour:
    """An engine in another process that answers `PROMPTS` again and again until it is killed."""

    def __init__(self, model: str, tier: str) -> None:
        self.process, self._said = beside("test_one_memory:answer", model, tier)

    def round(self) -> list[Answer]:
        """Wait for the answers of one round."""
        try:
            answers: list[Answer] = self._said.recv()
        except EOFError:
            self.process.join()
            raise AssertionError(f"the engine ended with {self.process.exitcode}") from None
        return answers

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._said.close()


def answer(says: Connection, model: str, tier: str) -> None:
    """What a neighbour does; called in its process."""
    with engine(model, [tier]) as one:
        while True:
            says.send(one.ask(PROMPTS))
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
        assert not backend._rows.held(backend._rows.layout.rows).any()
