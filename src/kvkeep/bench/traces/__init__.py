"""Traces: requests with their times and their common prefixes, to be replayed.

Read from files (`open_trace`), generated (`generate`), captured from a server (`Capture`).
"""

from __future__ import annotations

from kvkeep.bench.traces.capture import Capture, CaptureStats, Seen
from kvkeep.bench.traces.generators import KINDS, GeneratedTrace, generate
from kvkeep.bench.traces.native import TraceHeader, TraceWriter, write_trace
from kvkeep.bench.traces.reading import FORMATS, FileTrace, open_trace
from kvkeep.bench.traces.request import Served, Trace, TraceRequest

__all__ = [
    "FORMATS",
    "KINDS",
    "Capture",
    "CaptureStats",
    "FileTrace",
    "GeneratedTrace",
    "Seen",
    "Served",
    "Trace",
    "TraceHeader",
    "TraceRequest",
    "TraceWriter",
    "generate",
    "open_trace",
    "write_trace",
]
