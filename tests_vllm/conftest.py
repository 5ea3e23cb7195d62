"""vLLM itself, on the CPU, in this process: one thread, so that busy cores do not slow it down.

Nothing here imports vLLM before it is needed: pytest-xdist's own process runs no test.
"""

from __future__ import annotations

import os

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    OMP_NUM_THREADS="1",
    NUMBA_NUM_THREADS="1",  # which, once it is imported, sets OMP's
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)

import shutil
import signal
import socket
import subprocess
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from ports import free_port
from skip_counts import pytest_terminal_summary  # noqa: F401 - a hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from engines import Answer


# A file is run by one worker; those that take longest come first, so that none is left for last.
SLOW_FILES = [
    "test_answers.py", "test_names_in_vllm.py", "test_public_prefixes.py",
    "test_costs.py", "test_both.py", "test_start.py", "test_tier_kill.py", "test_tier_models.py",
    "test_scheduling.py", "test_hybrids_apart.py", "test_ranks.py", "test_several_engines.py",
    "test_router_vllm.py",
]  # fmt: skip


def pytest_configure() -> None:
    # Engines of tests are eager; vLLM would still compile a helper of its sampler in each process.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from engines import freeze

    freeze()
    by_name = {name: at for at, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: by_name.get(item.path.name, len(by_name)))


@pytest.fixture
def ten_minutes_later(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and blocks to delete within ten minutes are gone when the next is asked for."""
    from kvkeep.integrations.vllm import kept

    def jump() -> None:
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 601)
        monkeypatch.setattr(kept, "time", later)
        monkeypatch.setattr(kept, "_DELETE_WAIT_S", 60.0)  # not the moment that a request waits

    return jump


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    from models import make_llama

    return make_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def cold(llama: str) -> list[Answer]:
    """What vLLM says without kvkeep. Only one engine can be in a process: this one comes first."""
    from engines import PROMPTS, engine

    with engine(llama) as plain:
        return plain.ask(PROMPTS)


class Server:
    """A redis-server of our own."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        binary = shutil.which("valkey-server") or shutil.which("redis-server")
        if binary is None:
            pytest.skip("no valkey-server and no redis-server here")
        command = [binary, "--port", str(self.port), "--save", "", "--dir", str(directory)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        self.close()
        pytest.fail("the server does not listen")

    def url(self, **options: str) -> str:
        more = "&".join(f"{name}={value}" for name, value in options.items())
        return f"valkey://127.0.0.1:{self.port}" + (f"?{more}" if more else "")

    def hang(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path)
    yield running
    running.close()
