"""The driver's side: starts a worker, asks it, and ends it; every wait has an end."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peers.work import Case, Sizes, System

__all__ = ["Peer"]

ROOT = Path(__file__).parents[2]
START_S = 180.0
ANSWER_S = 300.0


class Peer:
    """The worker of one system.

    ``missing`` says why it cannot measure anything, or is empty; ``version`` is the system's.
    """

    def __init__(self, system: System, sizes: Sizes, cpu: int, directory: Path, log: IO[str]):
        self.system = system
        self.missing = self.version = ""
        self.cases: frozenset[str] = frozenset()
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        python = ROOT / system.environment / "bin" / "python"
        if not python.exists():
            self.missing = f"{system.environment} is not set up"
            return
        directory.mkdir()
        places = [ROOT / "src", ROOT / "benchmarks", *os.environ.get("PYTHONPATH", "").split(":")]
        self._process = subprocess.Popen(
            [python, "-m", "peers.worker", system.module, system.variant,
             json.dumps(asdict(sizes)), str(cpu), directory],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            env={**os.environ, "PYTHONPATH": ":".join(map(str, places)), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def begin(self) -> None:
        """Wait until the worker has imported its system; all that were started import together."""
        if self._process is None:
            return
        answer = self._answer(START_S)
        self.missing = answer.get("missing") or answer.get("failed") or ""
        self.version = answer.get("ready", "")
        self.cases = frozenset(answer.get("cases", ()))
        if self.missing:
            self.close()

    def seconds(self, case: Case) -> float | str:
        """Measure a case once; a reason if it failed."""
        if self._process is None:
            return self.missing
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answer says that it ended
            line = json.dumps({"case": case.name, "clock": case.clock, "times": case.times}) + "\n"
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        answer = self._answer(ANSWER_S)
        return float(answer["seconds"]) if "seconds" in answer else str(answer["failed"])

    def _answer(self, limit: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        until = time.monotonic() + limit
        while b"\n" not in self._rest:
            ready, _, _ = select.select([source], [], [], max(0.0, until - time.monotonic()))
            read = os.read(source, 1 << 16) if ready else b""
            if not read:
                self.missing = "its worker ended" if ready else f"no answer in {limit:.0f} s"
                self.close()
                return {"failed": self.missing}
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End the worker: by its input's end, or after ten seconds by a signal."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
