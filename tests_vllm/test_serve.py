"""``vllm serve`` as the documentation says, and its Prometheus page."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from engines import BLOCK, Answer, engine, prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parents[1] / "docs" / "vllm.md"


def documented(tiers: list[str]) -> str:
    """The command line's JSON, with places that are here."""
    match = re.search(r"--kv-transfer-config '(\{.*?\})'", DOCS.read_text(), re.DOTALL)
    assert match
    config = json.loads(match[1])
    assert config["kv_connector_extra_config"]["tiers"]
    config["kv_connector_extra_config"]["tiers"] = tiers
    return json.dumps(config)


@contextmanager
def served(model: str, tiers: list[str], log: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` runs; the command itself wants a package of the name vllm.
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
        "--kv-transfer-config", documented(tiers), "--port", str(port), "--host", "127.0.0.1",
        "--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", "2048",
        "--enforce-eager",
    ]  # fmt: skip
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    url = f"http://127.0.0.1:{port}"
    with (
        log.open("w") as out,
        subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        ) as process,
    ):
        try:
            until = time.monotonic() + 400
            while True:
                try:
                    fetch(f"{url}/health")
                    break
                except (OSError, urllib.error.URLError):
                    if process.poll() is not None or time.monotonic() > until:
                        pytest.fail(f"it does not serve:\n{log.read_text()[-4000:]}")
                    time.sleep(0.3)
            yield url
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def fetch(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


@pytest.mark.timeout(600)
def test_the_command_line_of_the_documentation(
    llama: str, cold: list[Answer], tmp_path: Path
) -> None:
    del cold  # one engine at a time
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    mine, other = prompt(300, seed=1), prompt(200, seed=2)
    with engine(llama, tiers) as one:
        said = one.ask([mine])[0]
    with served(llama, tiers, tmp_path / "log") as url:
        page = fetch(f"{url}/metrics")
        assert _metric(page, "loaded_tokens") == 0
        model = json.loads(fetch(f"{url}/v1/models"))["data"][0]["id"]

        def ask(tokens: list[int], **more: object) -> str:
            body = {"model": model, "prompt": tokens, "max_tokens": 6, "temperature": 0}
            answer = fetch(f"{url}/v1/completions", body | {"ignore_eos": True} | more)
            return str(json.loads(answer)["choices"][0]["text"])

        # What another process stored.
        assert ask(mine).split() == [f"t{token}" for token in said.tokens]
        ask(other, kv_transfer_params={"kvkeep": {"store": False}})
        ask(other, kv_transfer_params={"kvkeep": {"stored": False}})
        until = time.monotonic() + 30
        while time.monotonic() < until:
            page = fetch(f"{url}/metrics")
            if _metric(page, "ignored_params") and _metric(page, "saved_tokens"):
                break
            time.sleep(0.2)
        assert _metric(page, "loaded_tokens") == 288
        assert _metric(page, "saved_tokens") == 192
        assert _metric(page, "ignored_params") == 1
        assert _metric(page, "hit_blocks", 'tier="file"') == 9
    # It ended in order: what it had was written.
    log = (tmp_path / "log").read_text()
    assert "did not write all" not in log
    with engine(llama, tiers) as one:
        assert one.ask([other])[0].cached == 192


def _metric(page: str, name: str, labels: str = "") -> float:
    lines = [
        line for line in page.splitlines()
        if line.startswith(f"vllm:kvkeep_{name}_total{{") and labels in line
    ]  # fmt: skip
    return float(lines[0].rpartition(" ")[2]) if lines else 0.0
