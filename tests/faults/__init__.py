"""Faults on demand, for the tests, the soak run and the benchmarks of kvkeep itself.

    CountingBackend    a backend around another one that counts its calls
    FaultyBackend      the same, which fails, hangs, slows down, loses or damages records on demand
    FaultProxy         a TCP proxy that refuses, hangs, cuts, slows down and damages connections

With ``tests/`` on ``sys.path`` (as pytest puts it there): ``from faults import FaultyBackend``.
"""

from __future__ import annotations

from faults.backends import CALLS, CountingBackend, FaultyBackend
from faults.proxy import FaultProxy

__all__ = ["CALLS", "CountingBackend", "FaultProxy", "FaultyBackend"]
