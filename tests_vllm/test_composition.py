"""Beside vLLM's other connectors, in roles, and through sleep."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from engines import LENGTHS, PROMPTS, Answer, engine, found, prompt, same
from test_multi import flip, kvkeep_in, multi

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Server

ALL = sum(map(found, LENGTHS))


def offloading(size: int = 64 << 20) -> dict[str, Any]:
    """vLLM's own tier in memory."""
    return {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": size, "spec_name": "CPUOffload", "spec_module_path": "cpu_offload",
        },
    }  # fmt: skip


def nixl() -> dict[str, Any]:
    """NIXL's, which transfers KV between engines; alone here, so it has nothing to transfer."""
    return {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")


@pytest.mark.parametrize("first", [True, False], ids=["kvkeep first", "kvkeep last"])
@pytest.mark.parametrize("other", [offloading, pytest.param(nixl, marks=needs_nixl)])
def test_hits_and_a_flipped_bit_beside_another(
    llama: str, cold: list[Answer], tmp_path: Path, other: Any, first: bool
) -> None:
    tiers = ["memory://64MiB", f"file://{tmp_path}/kv?size=256MiB"]
    connectors = [kvkeep_in(*tiers), other()]
    settings = multi(*(connectors if first else connectors[::-1]),
                     kv_load_failure_policy="recompute")  # fmt: skip
    with engine(llama, **settings) as one:
        same(cold, one.ask(PROMPTS))
        one.forget()
        again = one.ask(PROMPTS)
        same(cold, again)
        assert sum(answer.cached for answer in again) >= ALL - len(LENGTHS)
    # vLLM's own tiers are empty now, and every third record of ours is damaged.
    assert flip(tmp_path / "kv") > 20
    with engine(llama, **settings) as one:
        answers = one.ask(PROMPTS)
        assert all(len(answer.tokens) == 6 for answer in answers), "an empty answer"
        same(cold, answers)
        assert one["failed_tokens"] > 0
        assert one["loaded_tokens"] > 0


def test_one_engine_computes_and_another_one_answers(
    llama: str, cold: list[Answer], server: Server
) -> None:
    """P/D: a producer that loads nothing, and a consumer that stores nothing."""
    tiers = ["memory://16MiB", server.url()]

    def role(name: str) -> dict[str, Any]:
        return {"kv_transfer_config": kvkeep_in(*tiers, role=name)}

    for _ in range(2):
        with engine(llama, **role("kv_producer")) as producer:
            computed = producer.ask(PROMPTS, max_tokens=1)
            assert [answer.cached for answer in computed] == [0] * len(PROMPTS)
            assert producer["loaded_tokens"] == 0
            assert producer["saved_tokens"] > 0
    fresh = prompt(200, seed=50)
    with engine(llama, **role("kv_consumer")) as consumer:
        answers = consumer.ask(PROMPTS)
        same(cold, answers)
        assert [answer.cached for answer in answers] == [found(length) for length in LENGTHS]
        consumer.ask([fresh])
        assert consumer["saved_tokens"] == 0
    with engine(llama, **role("kv_consumer")) as consumer:
        assert consumer.ask([fresh])[0].cached == 0
