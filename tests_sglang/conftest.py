"""SGLang's real host pools, page functions and storage factory, on a machine without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import without_gpu  # noqa: F401 - before anything else of SGLang's

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "backends"))  # real servers
