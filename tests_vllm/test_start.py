"""Wrong options end a start while vLLM makes its configuration; one line tells what is kept."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from engines import engine, prompt
from serving import Served
from tiered import tiered
from versions import NO_TIERS
from vllm.engine.arg_utils import EngineArgs

from kvkeep.core.errors import MissingExtra, StartRefused
from kvkeep.integrations.vllm.logs import join_logs
from kvkeep.integrations.vllm_plugin import register

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULE = {"kv_connector_module_path": "kvkeep.integrations.vllm"}
TIERS = {"tiers": ["memory://1MiB"]}


def kvkeep(extra: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KVKeepConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": extra, **more,
    }  # fmt: skip


def multi(*connectors: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)}, **more,
    }  # fmt: skip


def offloading(*tiers: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KVKeepSpec", "spec_module_path": "kvkeep.integrations.vllm.tier",
            "cpu_bytes_to_use": 1 << 28, "secondary_tiers": list(tiers),
        },
    }  # fmt: skip


def configure(model: str, transfer: dict[str, Any]) -> None:
    """What every start of vLLM does first, with or without a server."""
    EngineArgs(
        model=model, enforce_eager=True, max_model_len=512, dtype="float32",
        kv_transfer_config=transfer,
    ).create_engine_config()  # fmt: skip


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a name": (kvkeep({**TIERS, "load_timout": 1}, **MODULE), "did you mean 'load_timeout'?"),
    "a value": (kvkeep({"answers": "no"}, **MODULE), "answers is 'no'; true or false is needed"),
    "an option of a tier": (
        kvkeep({"tiers": ["memory://1MiB", "file:///nowhere?siez=1GiB"]}, **MODULE),
        "file:///nowhere has no option siez",
    ),
    "a size": (kvkeep({"tiers": ["memory://8gigs"]}, **MODULE), "8gigs"),
    "a scheme": (kvkeep({"tiers": ["disk:///x"]}, **MODULE), "no tier is called disk"),
    "a key": (kvkeep({"tiers": ["file:///x?encrypt=/no/key"]}, **MODULE), "/no/key"),
    "costs": (kvkeep({**TIERS, "cost": "/no/costs"}, **MODULE), "/no/costs"),
    "the registered name": (kvkeep({**TIERS, "load_timout": 1}), "did you mean 'load_timeout'?"),
    "inside another": (
        multi(kvkeep({"tiers": ["disk:///x"]}, **MODULE), kv_load_failure_policy="recompute"),
        "no tier is called disk",
    ),
    "what the other one does": (
        multi(kvkeep(TIERS, **MODULE)), 'Set "kv_load_failure_policy": "recompute"'
    ),
    "below offloading": (
        offloading({"type": "KVKeepTier", "tiers": ["file:///x?size=1GiB"], "bufer": 1}),
        "did you mean 'buffer'?",
    ),
    "memory below offloading": (
        offloading({"type": "KVKeepTier", "tiers": ["memory://1GiB"]}), "tiers have memory://"
    ),
}  # fmt: skip


def test_an_environment_without_the_extra_is_told_of_it_at_the_start(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(MissingExtra, match=r"pip install 'kvkeep\[store\]'$") as missing:
        configure(llama, kvkeep(TIERS))
    assert missing.value.__cause__ is missing.value.__context__ is None


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_option_ends_the_configuration(llama: str, wrong: str) -> None:
    if "offloading" in wrong and NO_TIERS:
        pytest.skip(NO_TIERS)
    register()
    transfer, said = WRONG[wrong]
    with pytest.raises(StartRefused) as refused:
        configure(llama, transfer)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value), "it is the last line of a traceback"
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__


@pytest.mark.parametrize(
    "right",
    [
        kvkeep(TIERS, **MODULE),
        kvkeep(TIERS),
        kvkeep({"tiers": ["file:///no/such/place?size=1GiB"]}, **MODULE),
        multi(kvkeep(TIERS, **MODULE), kv_load_failure_policy="recompute"),
        offloading({"type": "KVKeepTier", "tiers": ["file:///no/such/place?size=1GiB"]}),
        offloading({"type": "fs", "root_dir": "/no/such/place"}),
        offloading(),
    ],
    ids=str,
)
def test_what_is_right_is_opened_by_nobody_yet(llama: str, right: dict[str, Any]) -> None:
    register()
    configure(llama, right)
    assert not Path("/no/such/place").exists()


def test_a_server_ends_before_it_loads_anything(llama: str, tmp_path: Path) -> None:
    """By the module's path alone: an entry point may be forbidden."""
    transfer = kvkeep({**TIERS, "load_timout": 1}, **MODULE)
    arguments = ["--max-model-len", "512", "--kv-transfer-config", json.dumps(transfer)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "")
        one = Served(llama, arguments, tmp_path / "log", processes=True, anew=True)
    try:
        one.process.join(600)
        assert one.process.exitcode == 1
    finally:
        one.kill()
    said = (tmp_path / "log").read_text()
    last = said.strip().splitlines()[-1]
    assert "kvkeep.core.errors.StartRefused: kv_connector_extra_config has 'load_timout'; " in last
    assert last.endswith("did you mean 'load_timeout'?")
    assert "EngineCore" not in said, "no engine was started"


# --- logs -------------------------------------------------------------------------------------


@pytest.fixture
def apart() -> Iterator[logging.Logger]:
    """kvkeep's loggers as they are before an engine starts."""
    ours, theirs = logging.getLogger("kvkeep"), logging.getLogger("vllm")
    before, level = ours.parent, theirs.level
    ours.parent = logging.getLogger()
    ours.setLevel(logging.NOTSET)
    yield ours
    ours.parent = before
    theirs.setLevel(level)
    ours.setLevel(logging.NOTSET)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append((record.levelname, record.getMessage()))


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, theirs = Lines(), logging.getLogger("vllm")
    theirs.addHandler(handler)
    yield handler
    theirs.removeHandler(handler)


def test_what_kvkeep_logs_appears_where_vllm_logs(apart: logging.Logger, lines: Lines) -> None:
    log = logging.getLogger("kvkeep.tiers")
    logging.getLogger("vllm").setLevel(logging.INFO)
    log.info("before")
    join_logs()
    join_logs()
    log.info("one")
    log.debug("less than vLLM's level")
    logging.getLogger("vllm").setLevel(logging.WARNING)
    log.info("less than its new level")
    log.warning("two")
    assert lines.said == [("INFO", "one"), ("WARNING", "two")]
    assert apart.parent is logging.getLogger("vllm")


def test_handlers_of_the_operators_own_stay(apart: logging.Logger, lines: Lines) -> None:
    own = Lines()
    apart.addHandler(own)
    try:
        join_logs()
        logging.getLogger("kvkeep.vllm").warning("one")
    finally:
        apart.removeHandler(own)
    assert (own.said, lines.said) == ([("WARNING", "one")], [])


def test_one_line_says_what_is_kept_and_where(llama: str, tmp_path: Path, lines: Lines) -> None:
    logging.getLogger("vllm").setLevel(logging.INFO)
    tiers = ["memory://1MiB", f"file://{tmp_path}/kv?size=1MiB"]
    with engine(llama, tiers) as running:
        running.ask([prompt(200)])
        namespace = running.store.namespace
    began = [said for level, said in lines.said if level == "INFO" and " keeps " in said]
    assert len(began) == 1
    line = re.fullmatch(
        r"kvkeep [\d.]+ keeps blocks of 32 tokens \(64 KiB\) in memory://1MiB \(1 MiB, 1 MiB free, "
        rf"0 blocks found\); file://{tmp_path}/kv \(1 MiB, 1 MiB free, 0 blocks found\); namespace "
        "([0-9a-f]{12})",
        began[0],
    )
    assert line, began
    assert [path.name[:12] for path in (tmp_path / "kv").iterdir() if len(path.name) == 32] == [
        line[1]
    ]
    assert namespace
    lines.said.clear()
    with engine(llama, tiers):
        pass
    (again,) = [said for _, said in lines.said if " keeps " in said]
    found = r"/kv \(1 MiB, 639\.2 KiB free, 6 blocks found, 384\.8 KiB of this namespace\)"
    assert re.search(found, again), again


def test_one_line_of_a_tier_below_offloading(llama: str, tmp_path: Path, lines: Lines) -> None:
    logging.getLogger("vllm").setLevel(logging.INFO)
    with tiered(llama, f"file://{tmp_path}/kv?size=1MiB") as running:
        running.ask([prompt(70)], kvkeep={"stor": True})
    (began,) = [said for level, said in lines.said if level == "INFO" and " keeps " in said]
    assert re.fullmatch(
        r"kvkeep [\d.]+ keeps chunks of up to 64 KiB in "
        rf"file://{tmp_path}/kv \(1 MiB, 1 MiB free, 0 blocks found\); namespace [0-9a-f]{{12}}",
        began,
    ), began
    (wrong,) = [said for level, said in lines.said if level == "WARNING" and "kvkeep has" in said]
    assert "did you mean 'store'?" in wrong
