"""Which vLLM runs the tests."""

from __future__ import annotations

import vllm

VERSION = tuple(int(part) for part in vllm.__version__.split(".")[:2])
OLD = VERSION < (0, 32)
# Why the tests of the tier below vLLM's offloading are skipped; empty if they are not.
NO_TIERS = "vLLM 0.30 has too little for KVKeepTier" if VERSION < (0, 31) else ""
