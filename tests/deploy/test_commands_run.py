"""The commands of units and pods, run with their own configuration: from start to drain.

Only places and sizes are others: free ports, a folder of the test's, little memory.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from deployed import Command, commands

import warm
from ports import free_port
from warm import KVKEEP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(os.name != "posix", reason="signals"),
]

KEY = "a-long-secret"
PROMPT = "The same words in every prompt, so that there is something to find again. " * 8


class Place:
    """Where a server and a router of one configuration are tried."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {port: free_port() for port in ("8000", "8080", "5557", "5558")}
        (folder / "key").mkdir()
        (folder / "key/api-key").write_text(KEY, "utf-8")

    def url(self, command: Command) -> str:
        return f"http://127.0.0.1:{self.ports[str(command.section['port'])]}"

    def config(self, command: Command) -> Path:
        """Write the command's configuration with this place's ports, folders and sizes."""
        text = command.config.read_text("utf-8")
        for pattern, instead in (
            (r"\b(8000|8080|5557|5558)\b", lambda port: str(self.ports[port[0]])),
            (r"/var/lib/kvkeep|/etc/kvkeep", str(self.folder)),
            (r"0\.0\.0\.0", "127.0.0.1"),
            (r"dns://[^:]+", "dns://localhost"),
            (r"memory://\w+", "memory://16MiB"),
            (r"size=\w+", "size=256MiB"),
            (r'(?m)^memory = ".*"$', 'memory = "64MiB"'),
            (r'(?m)^ *"valkey://.*\n', ""),
        ):
            text = re.sub(pattern, instead, text)
        file = self.folder / "kvkeep.toml"
        file.write_text(text, "utf-8")
        return file

    @contextmanager
    def started(self, command: Command) -> Iterator[Process]:
        """Run the command until the end of the block."""
        file = str(self.config(command))
        words = [re.sub(r"^/etc/kvkeep/kvkeep\.toml$", file, word) for word in command.words]
        environment = {"KVKEEP_CONFIG": file, "XDG_CACHE_HOME": str(self.folder / "cache")}
        process = Process(words, environment)
        try:
            yield process
        finally:
            process.kill()


class Process:
    """A command of kvkeep's, and what it prints."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        self.printed: list[str] = []
        self._process = warm.Popen(
            [*KVKEEP, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )  # fmt: skip
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.printed.append(line)

    def alive(self) -> bool:
        return self._process.poll() is None

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def exit_code(self) -> int:
        return self._process.wait(60)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reading.join()
        self._process.stdout.close()  # type: ignore[union-attr]

    def text(self) -> str:
        return "".join(self.printed)


def status(url: str, path: str) -> int | None:
    """The status of a probe; None if nothing listens."""
    try:
        return httpx.get(f"{url}{path}", timeout=5).status_code
    except httpx.TransportError:
        return None


def eventually(true: Callable[[], bool], process: Process, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert process.alive(), process.text()
        assert time.monotonic() < end, process.text()
        time.sleep(0.02)


def ask(url: str, **more: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, **more}
    headers = {"authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    return answer.raise_for_status().json()


def stored_on_disk(url: str) -> float:
    """Blocks in the server's tier on disk."""
    headers = {"authorization": f"Bearer {KEY}"}
    text = httpx.get(f"{url}/metrics", headers=headers).raise_for_status().text
    (found,) = re.findall(r'^kvkeep_store_blocks{tier="file"} (\S+)$', text, re.MULTILINE)
    return float(found)


def pairs() -> list[Any]:
    """A server and a router for each configuration that has both."""
    found: dict[Path, dict[str, Command]] = {}
    for one in commands():
        found.setdefault(one.config, {}).setdefault(one.name, one)
    return [
        pytest.param(each["serve"], each["route"], id=each["serve"].where)
        for each in found.values()
        if "route" in each
    ]


@pytest.mark.parametrize(("serve", "route"), pairs())
def test_from_the_start_to_the_drain(serve, route, tmp_path):
    place = Place(tmp_path)
    server, router = place.url(serve), place.url(route)
    with place.started(route) as routing:
        eventually(lambda: status(router, "/livez") == 200, routing)
        assert status(router, "/ready") == 503, "no server is up yet"
        with place.started(serve) as serving:
            seen: set[int | None] = set()

            def ready() -> bool:
                seen.add(status(server, "/ready"))
                return 200 in seen

            eventually(ready, serving)
            assert seen <= {None, 503, 200}
            assert status(server, "/livez") == 200
            eventually(lambda: status(router, "/ready") == 200, routing)
            first = ask(router)
            assert ask(router)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

            lines: list[str] = []
            asking = threading.Thread(target=stream, args=(router, lines))
            asking.start()
            eventually(lambda: bool(lines), serving)
            serving.terminate()
            eventually(lambda: status(server, "/ready") == 503, serving)
            assert status(server, "/livez") == 200, "what drains is alive"
            asking.join(60)
            assert serving.exit_code() == 0, serving.text()
            assert lines[-1] == "data: [DONE]"
        eventually(lambda: status(router, "/ready") == 503, routing)

        with place.started(serve) as serving:  # what was computed is on its disk
            eventually(lambda: status(router, "/ready") == 200, serving)
            assert stored_on_disk(server) > 0
            assert ask(server)["choices"][0]["text"] == first["choices"][0]["text"]
            serving.terminate()
            assert serving.exit_code() == 0
        routing.terminate()
        assert routing.exit_code() == 0, routing.text()
    assert "Traceback" not in routing.text() + serving.text()


def stream(url: str, lines: list[str]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60
    ) as answer:
        lines.extend(filter(None, answer.iter_lines()))  # one by one, as they come
