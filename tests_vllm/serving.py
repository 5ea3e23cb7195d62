"""``vllm serve`` in processes of its own, and patience with them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

IDLE_S = 60.0
"""So long a server that starts may neither compute nor say anything; one that imports does both."""


class Served:
    """One server; ``log`` has what it said.

    With ``processes`` as a server has them; without, its one worker is in that of the engine, which
    starts faster.
    """

    def __init__(
        self, model: str, arguments: Sequence[str], log: Path, *, processes: bool = False
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        # What `vllm serve` runs; the command itself wants a distribution of the name vllm.
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
            "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port),
            "--dtype", "float32", "--enforce-eager", "--enable-prompt-tokens-details",
            *([] if processes else ["--distributed-executor-backend", "uni"]), *arguments,
        ]  # fmt: skip
        # On CPUs `uni` is listened to where this is off, which is for `LLM` in a script's process.
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
            "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "300",
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        """Until it answers: as long as it takes, while it gets on."""
        done, moved = -1.0, time.monotonic()
        while not self._answers():
            if self.process.poll() is not None:
                pytest.fail(f"it ended:\n{self.log.read_text()[-4000:]}")
            if (progress := self._progress()) > done:
                done, moved = progress, time.monotonic()
            if time.monotonic() > moved + IDLE_S:
                pytest.fail(f"it stands still:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        with suppress(OSError, urllib.error.URLError):
            self.fetch("/health")
            return True
        return False

    def _progress(self) -> float:
        """What it said, in bytes, and computed, in tenths of a second that passed in full."""
        computed = 0.0
        with suppress(psutil.NoSuchProcess):
            one = psutil.Process(self.process.pid)
            for each in (one, *one.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    computed += sum(each.cpu_times()[:2])
        return self.log.stat().st_size + int(10 * computed)

    def fetch(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    def stop(self) -> None:
        """End it in order, as a supervisor would."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()

    def kill(self) -> None:
        """End all that is left of it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def served(model: str, arguments: Sequence[str], log: Path, **more: bool) -> Iterator[Served]:
    """A server that answers, and is gone afterwards."""
    one = Served(model, arguments, log, **more)
    try:
        one.wait()
        yield one
    finally:
        one.kill()
