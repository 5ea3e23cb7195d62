"""Inside vLLM's MultiConnector, which gives its connectors copies of the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from engines import LENGTHS, PROMPTS, Answer, engine, found, same
from test_failures import records
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

import kvkeep.integrations.vllm
from kvkeep.integrations.vllm.stats import KVKeepStats

if TYPE_CHECKING:
    from pathlib import Path

ALL = sum(min(found(length), length - 1) for length in LENGTHS)


def multi(*connectors: dict[str, Any], **outer: Any) -> dict[str, Any]:
    """Settings of an engine with all of ``connectors``."""
    inside = {"kv_connector_extra_config": {"connectors": list(connectors)}}
    return {"kv_transfer_config": {"kv_connector": "MultiConnector", "kv_role": "kv_both"} | inside
            | outer}  # fmt: skip


def kvkeep_in(*tiers: str, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KVKeepConnector", "kv_role": role,
        "kv_connector_module_path": "kvkeep.integrations.vllm",
        "kv_connector_extra_config": {"tiers": list(tiers), "compare_costs": False, **extra},
    }  # fmt: skip


def example(path: Path) -> dict[str, Any]:
    """vLLM's own, which loads in the step itself."""
    return {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(path)},
    }  # fmt: skip


def flip(disk: Path) -> int:
    """One bit in every third record, and how many."""
    files = records(disk)[::3]
    for file in files:
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
    return len(files)


@pytest.mark.parametrize("first", ["kvkeep", "example"])
def test_a_flipped_bit_costs_time_and_no_answer(
    llama: str, cold: list[Answer], tmp_path: Path, first: str
) -> None:
    tiers = ["memory://64MiB", f"file://{tmp_path}/kv?size=256MiB"]
    connectors = [kvkeep_in(*tiers), example(tmp_path / "example")]
    if first == "example":
        connectors.reverse()
    settings = multi(*connectors, kv_load_failure_policy="recompute")
    with engine(llama, **settings) as one:
        same(cold, one.ask(PROMPTS))
    assert flip(tmp_path / "kv") > 20
    if first == "example":  # the one that is asked first has nothing
        settings = multi(example(tmp_path / "other"), connectors[1],
                         kv_load_failure_policy="recompute")  # fmt: skip
    with engine(llama, **settings) as one:
        same(cold, one.ask(PROMPTS))
        assert 0 < one["failed_tokens"] < ALL
        assert 0 < one["loaded_tokens"] < ALL


def test_pages_that_another_connector_failed_to_fill_are_not_stored(
    llama: str, cold: list[Answer], tmp_path: Path
) -> None:
    tiers = ["memory://64MiB", f"file://{tmp_path}/kv?size=256MiB"]
    failing = {"kv_connector": "Failing", "kv_connector_module_path": "failing",
               "kv_role": "kv_both"}  # fmt: skip
    with engine(
        llama, **multi(failing, kvkeep_in(*tiers), kv_load_failure_policy="recompute")
    ) as one:
        same(cold, one.ask(PROMPTS))
        assert one["saved_tokens"] > 0
    with engine(llama, tiers) as one:
        same(cold, one.ask(PROMPTS))
        assert one["loaded_tokens"] > 0


@pytest.mark.parametrize(
    ("inside", "outer", "said"),
    [
        ({}, {}, 'Set "kv_load_failure_policy": "recompute" beside'),
        ({}, {"kv_load_failure_policy": "fail"}, 'Set "kv_load_failure_policy": "recompute" besid'),
        ({}, {"kv_load_failure_policy": "recompute", "kv_role": "kv_producer"},
         'kv_role is "kv_producer" for MultiConnector and "kv_both"'),
    ],
)  # fmt: skip
def test_what_the_outer_configuration_must_say_is_told_at_the_start(
    llama: str, inside: dict[str, Any], outer: dict[str, Any], said: str
) -> None:
    with (
        pytest.raises(Exception, match=said) as refused,
        engine(llama, **multi(kvkeep_in("memory://1MiB", **inside), **outer)),
    ):
        pass
    assert "\n" not in str(refused.value)


def test_one_kvkeep_in_an_engine(llama: str) -> None:
    two = multi(kvkeep_in("memory://1MiB"), kvkeep_in("memory://2MiB"),
                kv_load_failure_policy="recompute")  # fmt: skip
    with pytest.raises(Exception, match="two KVKeepConnectors in one engine"), engine(llama, **two):
        pass


def test_counts_that_crossed_a_process_are_counts_again() -> None:
    assert KVConnectorFactory.get_connector_class_by_name("KVKeepConnector") is (
        kvkeep.integrations.vllm.KVKeepConnector
    )
    stats = MultiConnector.build_kv_connector_stats({"KVKeepConnector": {"hit_tokens": 3.0}})
    assert stats is not None
    assert isinstance(stats.data["KVKeepConnector"], KVKeepStats)
    assert stats.reduce() == {"KVKeepConnector": {"kvkeep hit_tokens": 3}}
