"""Which vLLM runs the tests."""

from __future__ import annotations

import vllm

VERSION = tuple(int(part) for part in vllm.__version__.split(".")[:2])
OLD = VERSION < (0, 32)
