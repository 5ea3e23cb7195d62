"""``vllm serve`` as the documentation says, ended and started again, and its Prometheus page."""

from __future__ import annotations

import json
import re
import shlex
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from engines import BLOCK, prompt
from serving import served

if TYPE_CHECKING:
    from serving import Served

DOCS = Path(__file__).parents[1] / "docs" / "vllm.md"


def documented(tiers: list[str]) -> list[str]:
    """The arguments that the documentation gives to ``vllm serve``, with tiers that are here."""
    match = re.search(r"^vllm serve MODEL (.*?)\n```", DOCS.read_text(), re.DOTALL | re.MULTILINE)
    assert match
    arguments = shlex.split(match[1])
    config = json.loads(arguments.pop())
    assert config["kv_connector_extra_config"]["tiers"]
    config["kv_connector_extra_config"] |= {"tiers": tiers, "compare_costs": False}
    return [*arguments, json.dumps(config)]


@dataclass(frozen=True)
class Said:
    text: str
    logprobs: tuple[float, ...]
    cached: int


def ask(one: Served, tokens: list[int], **wishes: object) -> Said:
    asked = {
        "model": "tiny", "prompt": tokens, "max_tokens": 6, "temperature": 0, "logprobs": 1,
        "ignore_eos": True,
    }  # fmt: skip
    if wishes:
        asked["kv_transfer_params"] = {"kvkeep": wishes}
    answer = json.loads(one.fetch("/v1/completions", asked))
    (choice,) = answer["choices"]
    details = answer["usage"]["prompt_tokens_details"] or {}
    return Said(
        choice["text"],
        tuple(choice["logprobs"]["token_logprobs"]),
        details.get("cached_tokens") or 0,
    )


def metric(page: str, name: str, labels: str = "") -> float:
    lines = [
        line for line in page.splitlines()
        if line.startswith(f"vllm:kvkeep_{name}_total{{") and labels in line
    ]  # fmt: skip
    return float(lines[0].rpartition(" ")[2]) if lines else 0.0


def counted(one: Served, name: str, expected: float, labels: str = "") -> None:
    """The page is written behind the answers."""
    until = time.monotonic() + 60
    while (found := metric(one.fetch("/metrics"), name, labels)) != expected:
        assert time.monotonic() < until, f"{name} is {found}, and not {expected}"
        time.sleep(0.1)


def test_the_command_line_of_the_documentation(llama: str, tmp_path: Path) -> None:
    arguments = [
        *documented(["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]),
        "--block-size", str(BLOCK), "--max-model-len", "2048", "--num-gpu-blocks-override", "256",
        "--shutdown-timeout", "300",  # as documented, and longer: the machine may be busy
    ]  # fmt: skip
    mine, other, last = prompt(300, seed=1), prompt(200, seed=2), prompt(1500, seed=3)
    past = prompt(100, seed=4)
    with served(llama, arguments, tmp_path / "first", processes=True) as one:
        cold = ask(one, mine)
        assert ask(one, other, store=False).cached == 0
        assert ask(one, past).cached == 0
        counted(one, "saved_tokens", 288 + 96)
        counted(one, "ignored_params", 0)
        assert ask(one, mine, stored=False).cached == 288  # vLLM's own; the wish is not followed
        counted(one, "ignored_params", 1)
        assert metric(one.fetch("/metrics"), "loaded_tokens") == 0
        late = ask(one, last)
        one.stop()
    # Right after its last answer; all was written.
    log = (tmp_path / "first").read_text()
    lines = re.findall(
        r"(INFO|WARNING) \S+ \S+ \[\S+\] (kvkeep \S+ keeps|kv_transfer_params) (.*)", log
    )
    assert [line[:2] for line in lines] == [
        ("INFO", f"kvkeep {version('kvkeep')} keeps"),
        ("WARNING", "kv_transfer_params"),
    ]
    assert "0 blocks found" in lines[0][2]
    assert "there are store, load, ttl, pin; did you mean 'store'?" in lines[1][2]
    assert "did not write all" not in log
    # vLLM may say that it kills an engine that has ended by itself: two of its threads wait for it.
    assert "kill" not in log.lower().partition("all workers exited gracefully")[0]

    with served(llama, arguments, tmp_path / "second", processes=True) as one:
        assert ask(one, past, load=False).cached == 0, "it was not to be loaded"
        warm = ask(one, mine)
        assert warm.cached == 288
        assert warm.text == cold.text
        assert warm.logprobs == pytest.approx(cold.logprobs, abs=1e-4)
        assert ask(one, other).cached == 0, "it was not to be stored"
        again = ask(one, last)
        assert again.cached == 1472
        assert again.logprobs == pytest.approx(late.logprobs, abs=1e-4)
        counted(one, "loaded_tokens", 288 + 1472)
        counted(one, "hit_tokens", 288 + 1472)
        counted(one, "hit_blocks", (288 + 1472) / BLOCK, 'tier="file"')
        counted(one, "failed_tokens", 0)
