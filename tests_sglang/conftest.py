"""SGLang's real host pools, page functions and storage factory, on a machine without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import without_gpu  # noqa: F401 - before anything else of SGLang's
from sglang.srt import runtime_context

if TYPE_CHECKING:
    from collections.abc import Iterator

_TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(_TESTS / "backends"), str(_TESTS)]  # real servers, and their ports

from skip_counts import pytest_terminal_summary  # noqa: E402, F401 - a hook


@pytest.fixture(autouse=True)
def _no_server_stays() -> Iterator[None]:
    """The arguments of a server are SGLang's for the whole process: they end with their test."""
    yield
    runtime_context.reset_context()
