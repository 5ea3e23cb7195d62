"""What a plan gives to paste is what the real parsers take, with the sizes of the plan."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.bench.replay import PlanCandidate
from kvkeep.cli import _parser
from kvkeep.cli.plan import moves_between_tiers, serve_command, vllm_option
from kvkeep.core.eviction import POLICIES
from kvkeep.core.geometry import parse_bytes
from kvkeep.integrations.options import EngineOptions
from kvkeep.store.tiers import TIERINGS, open_tiers, tiering

MODEL = Path("./my models/Llama")
SIZES = st.integers(1, 10**9)
SETTINGS = st.builds(
    PlanCandidate,
    st.sampled_from(sorted(POLICIES)),
    SIZES,
    SIZES,
    st.sampled_from(TIERINGS),
) | st.builds(PlanCandidate, st.sampled_from(sorted(POLICIES)), SIZES)
KINDS = st.sampled_from([0.5, 1024.0, 131_072.0, 72_000.5])


def near(text: str, tokens: int, size: float) -> bool:
    return abs(parse_bytes(text) - tokens * size) <= 1 << 20


@given(SETTINGS, KINDS)
def test_the_server_takes_its_command(chosen: PlanCandidate, size: float) -> None:
    words = shlex.split(serve_command(chosen, MODEL, size))
    assert words[0] == "kvkeep"
    args = _parser().parse_args(words[1:])
    assert args.model == MODEL
    assert args.no_store == (not chosen.disk_tokens)
    *above, below = args.tier or [None]
    if chosen.disk_tokens:
        assert tiering(args.tiering) is not None
        assert args.tiering == chosen.tiering
        assert near(below.partition("size=")[2].partition("&")[0], chosen.disk_tokens, size)
    # Blocks move between the tiers of a store. Its pool is none: it keeps what is written below.
    if moves_between_tiers(chosen):
        (memory,) = above
        place, _, query = memory.removeprefix("memory://").partition("?")
        assert near(place, chosen.memory_tokens, size)
        assert (query or "policy=lru") == f"policy={chosen.policy}"
    else:
        assert not above
        assert near(args.memory, chosen.memory_tokens, size)
        assert args.eviction == chosen.policy


@given(SETTINGS, KINDS)
def test_the_connector_takes_its_options(chosen: PlanCandidate, size: float) -> None:
    option, text = shlex.split(vllm_option(chosen, size))
    assert option == "--kv-transfer-config"
    config = json.loads(text)
    assert config["kv_connector"] == "KVKeepConnector"
    options = EngineOptions.from_json(config["kv_connector_extra_config"], "vLLM has")
    assert len(options.tiers) == 1 + bool(chosen.disk_tokens)
    assert near(
        options.tiers[0].removeprefix("memory://").partition("?")[0], chosen.memory_tokens, size
    )


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_its_tiers_open(policy: str, tmp_path: Path) -> None:
    chosen = PlanCandidate(policy, 100, 300, "inclusive")
    folder = str(tmp_path / "a folder & more?")
    (_, text) = shlex.split(vllm_option(chosen, 1 << 20))
    text = text.replace("/var/lib/kvkeep", quote(folder))
    memory, below = open_tiers(json.loads(text)["kv_connector_extra_config"]["tiers"])
    for tier, size in ((memory, 100), *((tier, 300) for tier in below)):
        assert tier.backend.capacity == size << 20
        tier.backend.close()
    assert Path(folder).is_dir()
