"""What a start logs: in vLLM's log, and one line that tells what is kept."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

import pytest
from engines import engine, prompt
from tiered import tiered

from kvkeep.integrations.vllm.kept import join_logs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engines import Answer

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


def test_one_line_says_what_is_kept_and_where(
    llama: str, cold: list[Answer], tmp_path: Path, lines: Lines
) -> None:
    del cold  # at its first start in a process vLLM sets its log up again
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
