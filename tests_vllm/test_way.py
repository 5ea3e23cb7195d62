"""What a hit goes through, from the scheduler's question to the filled pages: it only gets shorter.

Counted are kvkeep's files, calls in them and objects that they make: see `ways`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from engines import engine, found, prompt

from kvkeep.integrations.vllm.connector import KVKeepConnector
from ways import Recorder, Way

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTH, ROUNDS = 200, 8


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.close()


class Hit:
    """Records from `get_num_new_matched_tokens` until `get_transfer_results` names the request."""

    def __init__(self, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ways: list[Way] = []
        self._recorder = recorder
        self._recording: Any = None
        asks = KVKeepConnector.get_num_new_matched_tokens
        ends = KVKeepConnector.get_transfer_results

        def asked(connector: KVKeepConnector, *given: Any) -> Any:
            if self._recording is None:
                self._recording = recorder.way()
                self.ways.append(self._recording.__enter__())
            return asks(connector, *given)

        def ended(connector: KVKeepConnector, *given: Any) -> Any:
            results = ends(connector, *given)
            if results.finished_recving:
                self._recording.__exit__(None, None, None)
                self._recording = None
            return results

        monkeypatch.setattr(KVKeepConnector, "get_num_new_matched_tokens", asked)
        monkeypatch.setattr(KVKeepConnector, "get_transfer_results", ended)


def test_a_hit(llama: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = prompt(LENGTH, seed=80)
    with engine(llama, ["memory://64MiB"]) as one:
        one.ask([mine])
        with monkeypatch.context() as patch:
            hit = Hit(recorder, patch)
            for _ in range(ROUNDS):  # the first one imports and starts what it needs
                one.forget()
                (answer,) = one.ask([mine])
                assert answer.cached == found(LENGTH)
    ways = hit.ways[1:]
    assert len(ways) == ROUNDS - 1
    # How many idle steps pass while it loads depends on the machine.
    least = min(ways, key=lambda way: way.calls)
    adapter = {file for file in least.files if file.startswith("integrations")}
    assert len(adapter) <= 15, sorted(adapter)
    assert least.within(files=50, calls=600, objects=24), least
