"""The names that kvkeep has in vLLM, by its entry point."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvkeep.integrations import vllm_plugin

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP = "vllm.general_plugins"
PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def entry_point() -> EntryPoint:
    ((name, value),) = PROJECT["entry-points"][GROUP].items()
    return EntryPoint(name, value, GROUP)


# What the name brings along, then two engines, each in a fork: importing vLLM takes 9 s of a core.
ENGINES = f"""
import json, logging, os, sys
from importlib.metadata import EntryPoint
import vllm.distributed.kv_transfer.kv_connector.factory
import vllm.v1.kv_offload.factory, vllm.v1.kv_offload.tiering.factory
before = set(sys.modules)
logging.basicConfig(level=logging.INFO)
EntryPoint("kvkeep", sys.argv[1], {GROUP!r}).load()()
assert not any(name.startswith("kvkeep.store") for name in sys.modules)
assert "kvkeep.integrations.vllm" not in sys.modules
print("new", sorted({{name.split(".")[0] for name in set(sys.modules) - before}}))
print("registered", file=sys.stderr, flush=True)
from vllm import LLM, SamplingParams
import vllm.v1.engine.core

def serve(settings):
    assert "kvkeep.integrations.vllm" not in sys.modules
    one = LLM(
        sys.argv[2], enforce_eager=True, max_model_len=1024, dtype="float32", block_size=32,
        num_gpu_blocks_override=64, skip_tokenizer_init=True, kv_transfer_config=settings,
    )
    def ask():
        params = SamplingParams(max_tokens=1, detokenize=False)
        (done,) = one.generate([{{"prompt_token_ids": list(range(3, 203))}}], params)
        return done.num_cached_tokens
    assert not ask()
    assert one.reset_prefix_cache()
    print("cached", ask(), flush=True)

for settings in json.loads(sys.argv[3]):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
    else:
        try:
            serve(settings)
        finally:
            os._exit(sys.exc_info()[0] is not None)
"""


def test_a_name_suffices_and_imports_nothing_and_says_nothing(llama: str) -> None:
    """In processes of their own, which import nothing of kvkeep: vLLM does.

    vLLM runs the entry point in each of its processes, whether or not kvkeep is used.
    """
    transfer = {"kv_connector": "KVKeepConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {"tiers": ["memory://16MiB"]}}  # fmt: skip
    inside = {"kv_connector": "MultiConnector", "kv_role": "kv_both",
              "kv_load_failure_policy": "recompute",
              "kv_connector_extra_config": {"connectors": [transfer]}}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", ENGINES, entry_point().value, llama, json.dumps([transfer, inside])],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines().count("cached 192") == 2
    assert "new ['kvkeep']" in done.stdout.splitlines()
    said, registered, _ = done.stderr.partition("registered\n")
    assert registered
    assert "kvkeep" not in said


@pytest.mark.parametrize("error", [ImportError, AttributeError, TypeError])
def test_another_vllm_is_no_error(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def changed(*args: Any) -> None:
        raise error

    registers: list[Callable[..., None]] = []
    monkeypatch.setattr(KVConnectorFactory, "register_connector", changed)
    monkeypatch.setattr(vllm_plugin, "_tier", lambda: registers.append(changed))
    vllm_plugin.register()
    assert registers == [changed], "one registry does not depend on another"
