"""Our commands as processes of their own: servers that can be stopped and killed, and the proxy."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

import httpx

import warm
from ports import free_port
from warm import KVKEEP


class Process:
    """One of our commands, and what it prints."""

    def __init__(self, *arguments: str) -> None:
        self.lines: list[str] = []
        self.process = warm.Popen(
            [*KVKEEP, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def end(self, how: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self._thread.join()
            self.process.stdout.close()  # type: ignore[union-attr]


class Instance:
    """A server of ours that publishes its events; it can be killed and started again."""

    def __init__(self, *options: str) -> None:
        self.options = options
        self.port, events = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.events = f"tcp://127.0.0.1:{events}"
        self.replay = f"tcp://127.0.0.1:{events + 1}"
        self.start()

    def start(self) -> None:
        self.process = Process(
            "serve", "--port", str(self.port), "--memory", "16MiB", "--no-store",
            "--events", self.events, *self.options,
        )  # fmt: skip

    def ready(self) -> bool:
        assert self.process.process.poll() is None, self.process.text
        try:
            return httpx.get(f"{self.url}/health").is_success
        except httpx.TransportError:
            return False

    def requests(self) -> int:
        return httpx.get(f"{self.url}/kv/stats").json()["cache"]["opened"]


def route(made: list[Instance], *options: str) -> tuple[Process, str]:
    """A proxy in front of these, or of those that ``options`` name, and its address."""
    port = free_port()
    listed = (
        "--instances", ",".join(one.url for one in made),
        "--events", ",".join(one.events for one in made),
        "--replay", ",".join(one.replay for one in made),
    )  # fmt: skip
    started = Process("route", "--port", str(port), *(listed if made else ()), *options)
    return started, f"http://127.0.0.1:{port}"
