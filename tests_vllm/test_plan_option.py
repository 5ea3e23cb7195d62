"""The option that `kvkeep plan` gives to paste is one that vLLM and the connector take."""

from __future__ import annotations

import json
import shlex

import pytest
from vllm.config import KVTransferConfig

from kvkeep.bench.replay import PlanCandidate
from kvkeep.cli.plan import vllm_option
from kvkeep.integrations.vllm.options import ConnectorOptions


@pytest.mark.parametrize("disk", [0, 3_000_000])
def test_vllm_takes_what_a_plan_gives(disk: int) -> None:
    chosen = PlanCandidate("returns", 200_000, disk, "inclusive" if disk else None)
    option, text = shlex.split(vllm_option(chosen, 131_072.0))
    assert option == "--kv-transfer-config"
    config = KVTransferConfig(**json.loads(text))
    assert config.kv_connector == "KVKeepConnector"
    assert config.is_kv_producer
    assert config.is_kv_consumer
    options = ConnectorOptions.parse(config.kv_connector_extra_config)
    assert options.tiers[0] == "memory://25000MiB?policy=returns"
    assert len(options.tiers) == 1 + bool(disk)
