"""SGLang's real host pools, page functions and storage factory, on a machine without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import without_gpu  # noqa: F401 - before anything else of SGLang's

_TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(_TESTS / "backends"), str(_TESTS)]  # real servers, and their ports
