"""The versions of engines beside which kvkeep is tested."""

from __future__ import annotations

from typing import Final

__all__ = ["TESTED"]

TESTED: Final = {"vllm": ("0.31", "0.32", "0.33"), "sglang": ("0.5.23",)}
"""By package. A version stands for all those that begin with it."""
