"""Reports how many tests a run skipped, by reason: a plugin of pytest for all suites."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
    )
    if reasons:
        terminalreporter.section(f"{reasons.total()} skipped, by reason")
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count:5}  {reason}")
