"""The report of a replay: an HTML page, with its data as JSON beside it."""

from __future__ import annotations

from kvkeep.bench.replay.prices import Cost, Prices
from kvkeep.bench.replay.report.writing import write_report

__all__ = ["Cost", "Prices", "write_report"]
