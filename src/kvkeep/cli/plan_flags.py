"""What a plan recommends as commands and options to paste."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from pathlib import Path

    from kvkeep.bench.replay import PlanCandidate

__all__ = ["moves_between_tiers", "serve_command", "vllm_option"]

_FOLDER = "/var/lib/kvkeep"  # the place of a disk tier in what is to be pasted
_MIB = 1 << 20
_USUAL = "lru"


def moves_between_tiers(chosen: PlanCandidate) -> bool:
    """Whether a setting's tiering does more than to write everything below.

    The pool of a server does this much: what it computes is written below, and stays in the pool.
    """
    return chosen.tiering not in {None, "inclusive"}


def serve_command(chosen: PlanCandidate, model: Path, bytes_per_token: float) -> str:
    """Return the ``kvkeep serve`` that uses this setting; without a cache, it stores nothing.

    The memory is the pool's; where the tiering moves blocks between memory and disk, it is a tier.
    """
    words = ["kvkeep", "serve", "--model", str(model)]
    if chosen.policy is None:
        return shlex.join([*words, "--no-store"])
    if moves_between_tiers(chosen):
        for tier in _tiers(chosen, bytes_per_token):
            words += ["--tier", tier]
        return shlex.join([*words, "--tiering", str(chosen.tiering)])
    words += ["--memory", _bytes(chosen.memory_tokens * bytes_per_token)]
    words += ["--eviction", _policy(chosen)]
    if not chosen.disk_tokens:
        return shlex.join([*words, "--no-store"])
    words += ["--tier", _disk(chosen, bytes_per_token), "--tiering", str(chosen.tiering)]
    return shlex.join(words)


def vllm_option(chosen: PlanCandidate, bytes_per_token: float) -> str:
    """Return the ``--kv-transfer-config`` of vLLM with the memory and disk of a setting.

    A setting without a cache has none: do not ask for it.
    """
    assert chosen.policy is not None
    config = {
        "kv_connector": "KVKeepConnector",
        "kv_connector_module_path": "kvkeep.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": _tiers(chosen, bytes_per_token)},
    }
    return f"--kv-transfer-config {shlex.quote(json.dumps(config))}"


def _tiers(chosen: PlanCandidate, bytes_per_token: float) -> list[str]:
    memory = _bytes(chosen.memory_tokens * bytes_per_token)
    tiers = [f"memory://{memory}{_query(chosen, '?')}"]
    return [*tiers, _disk(chosen, bytes_per_token)] if chosen.disk_tokens else tiers


def _disk(chosen: PlanCandidate, bytes_per_token: float) -> str:
    size = _bytes(chosen.disk_tokens * bytes_per_token)
    return f"file://{quote(_FOLDER)}?size={size}{_query(chosen, '&')}"


def _query(chosen: PlanCandidate, mark: str) -> str:
    policy = _policy(chosen)
    return "" if policy == _USUAL else f"{mark}policy={policy}"


def _policy(chosen: PlanCandidate) -> str:
    assert chosen.policy is not None
    return chosen.policy


def _bytes(amount: float) -> str:
    """Return an amount for the parsers of sizes: whole GiB where it is some, else MiB."""
    mib = max(1, round(amount / _MIB))
    return f"{mib}MiB" if mib % 1024 else f"{mib // 1024}GiB"
