"""``vllm serve`` in processes of its own, and patience with them."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from engines import FORKS, fork_workers, start_forks
from vllm.logger import _configure_vllm_root_logger

from ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

IDLE_S = 60.0
"""So long a server that starts may neither compute nor say anything; one that imports does both."""


# What `vllm serve` runs; the command itself wants a distribution of the name vllm.
MODULE = "vllm.entrypoints.openai.api_server"


class Served:
    """One server; ``log`` has what it said.

    With ``processes`` as a server has them; without, its one worker is in that of the engine, which
    starts faster. It is a fork of a process that has imported vLLM, and so are those that it
    starts; if ``anew``, all are processes as the command starts them.
    """

    def __init__(
        self, model: str, arguments: Sequence[str], log: Path, *, processes: bool = False,
        anew: bool = False,
    ) -> None:  # fmt: skip
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        command = [
            "--model", model,
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
        log.touch()
        called = (anew, command, environment, str(log))
        start_forks()
        self.process = FORKS.Process(target=_serve, args=called)
        self.process.start()

    def wait(self) -> None:
        """Until it answers: as long as it takes, while it gets on."""
        done, moved = -1.0, time.monotonic()
        while not self._answers():
            if not self.process.is_alive():
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
        self.process.terminate()
        self.process.join()

    def kill(self) -> None:
        """End all that is left of it."""
        self.process.kill()  # which may not yet lead a group
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()


def _serve(anew: bool, command: Sequence[str], environment: dict[str, str], log: str) -> None:
    """Be a server."""
    os.setsid()
    with Path(log).open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    if anew:
        os.execve(sys.executable, [sys.executable, "-m", MODULE, *command], environment)
    os.environ.clear()
    os.environ.update(environment)
    _configure_vllm_root_logger()  # by this environment
    fork_workers()
    sys.argv = [MODULE, *command]
    runpy.run_module(MODULE, run_name="__main__")


@contextmanager
def served(model: str, arguments: Sequence[str], log: Path, **more: bool) -> Iterator[Served]:
    """A server that answers, and is gone afterwards."""
    one = Served(model, arguments, log, **more)
    try:
        one.wait()
        yield one
    finally:
        one.kill()
