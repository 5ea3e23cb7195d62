"""A status ends with its engine, and hurts none; and it is served beside workers of their own."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from engines import BLOCK, engine, prompt
from serving import served
from vllm import SamplingParams
from watched import eventually, fetch, watched

from kvkeep.integrations.vllm.stats import METRICS, metric_of
from kvkeep.integrations.vllm.tier_figures import TIER_COUNTERS, TIER_GAUGES
from ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_it_ends_with_the_engine(llama: str, tmp_path: Path) -> None:
    """With a request of a client that is half sent, and an engine's request that still runs."""
    with watched(llama, [f"file://{tmp_path}?size=8MiB"]) as one:
        params = SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)
        one.engine.llm.llm_engine.add_request("open", {"prompt_token_ids": prompt(100)}, params)
        one.engine.llm.llm_engine.step()
        half = socket.create_connection(("127.0.0.1", one.port))
        half.sendall(b"GET /kv/live HTTP/1.1\r\nHost: localhost\r\n")
        began = time.monotonic()
        one.engine.core.shutdown()
        assert time.monotonic() - began < 60
        half.close()
        with socket.create_server(("127.0.0.1", one.port)):
            pass  # the port is free again


def test_a_port_in_use_is_a_warning(
    llama: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        extra = {"status": f"127.0.0.1:{taken.getsockname()[1]}"}
        tiers = [f"file://{tmp_path}?size=8MiB"]
        with (
            caplog.at_level(logging.WARNING, logger="kvkeep"),
            engine(llama, tiers, extra=extra) as one,
        ):
            assert one.ask([prompt(100)])[0].tokens
        assert "serves no status at 127.0.0.1" in caplog.text


def kvkeep(*arguments: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "kvkeep", *arguments], capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_server_with_workers_of_its_own(llama: str, tmp_path: Path) -> None:
    port = free_port()
    config = {
        "kv_connector": "KVKeepConnector", "kv_connector_module_path": "kvkeep.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "tiers": ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"],
            "compare_costs": False, "status": f"127.0.0.1:{port}",
        },
    }  # fmt: skip
    arguments = [
        "--kv-transfer-config", json.dumps(config), "--block-size", str(BLOCK),
        "--max-model-len", "900", "--num-gpu-blocks-override", "30",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with served(llama, arguments, tmp_path / "log", processes=True, anew=True) as one:
        mine = prompt(300, seed=1)
        asked = {"model": "tiny", "prompt": mine, "max_tokens": 4, "temperature": 0}
        first = json.loads(one.fetch("/v1/completions", asked))["id"]
        for seed in range(4):  # vLLM's own cache has no room for it any more
            other = {**asked, "prompt": prompt(700, seed=20 + seed)}
            one.fetch("/v1/completions", other)
        one.fetch("/v1/completions", asked)
        seen = kvkeep("top", "--once", url)
        assert "tiny" in seen
        assert "memory" in seen
        said = kvkeep("explain", url, first)
        assert "never seen" in said
        newest = fetch(f"{url}/kv/requests?last=1", None)["requests"][0]
        assert newest["reused"] == {"memory": 288}
        assert "computed" in kvkeep("explain", url)

        def page() -> str:
            return one.fetch("/metrics")

        eventually(lambda: "kvkeep_blocks{" in page() and "kvkeep_writes_total{" in page())
        names = set(re.findall(r"^# TYPE vllm:kvkeep_(\w+) ", page(), re.MULTILINE))
        expected = {f"{name}_total" for name in (*METRICS, *map(metric_of, TIER_COUNTERS))}
        assert {*expected, *TIER_GAUGES} <= names | {f"{name}_total" for name in names}
        filled = re.findall(r'kvkeep_used_bytes{.*rank="0",tier="file"} (\S+)', page())
        assert filled
        assert "\nvllm:generation_tokens_total{" in page()  # deploy/prometheus asks for it
        assert float(filled[0]) > 0
        live = fetch(f"{url}/kv/live", None)
        assert {tier["name"] for tier in live["tiers"]} == {"memory", "file"}

        # vLLM rests: both tell all that its last request did, and not what was a second before.
        def hits() -> list[int]:
            read = re.findall(r'kvkeep_hit_blocks_total{.*tier="memory"} (\S+)', page())
            now = fetch(f"{url}/kv/live", None)["tiers"]
            return [*map(int, map(float, read)), *(tier["hits"] for tier in now[:1])]

        eventually(lambda: hits() == [288 // BLOCK] * 2)
        one.stop()
    # vLLM's front end may find that its engine has ended, and logs its own traceback of that.
    assert not re.findall(r'File ".*/kvkeep/.*', (tmp_path / "log").read_text())
