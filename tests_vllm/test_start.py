"""What a start logs: in vLLM's log, and one line that tells what is kept."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from kvkeep.integrations.vllm.kept import join_logs

if TYPE_CHECKING:
    from collections.abc import Iterator


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
