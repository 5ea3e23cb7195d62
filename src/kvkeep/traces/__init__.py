"""Traces: requests with their times and what their prompts have in common, to be replayed.

Read from files (`open_trace`), made by generators (`generate`), captured from a server (`Capture`).
"""

from __future__ import annotations

from kvkeep.traces.capture import Capture, CaptureStats, Seen
from kvkeep.traces.native import Header, TraceWriter, write_trace
from kvkeep.traces.reading import FORMATS, FileTrace, open_trace
from kvkeep.traces.request import Request, Served, Trace

__all__ = [
    "FORMATS",
    "Capture",
    "CaptureStats",
    "FileTrace",
    "Header",
    "Request",
    "Seen",
    "Served",
    "Trace",
    "TraceWriter",
    "open_trace",
    "write_trace",
]
