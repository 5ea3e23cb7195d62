"""A pytest plugin for `make quick`: leave out the test functions that `tests/slow_tests.txt` names.

    make quick         # the tests of the quick directories, without the slow ones
    make slow-tests    # run these directories completely, and write the list anew

A test function is slow if one of its cases took `SECONDS` or longer when the list was written. A
name that no longer exists does no harm; a new slow test runs until the list is written again.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

SECONDS = 0.1
ALWAYS = "tests/test_architecture.py"
"""Runs although it is slow: a new import in the wrong direction should fail at once."""
_LIST = Path(__file__).parent.parent / "tests" / "slow_tests.txt"
_slowest: dict[str, float] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--write-slow``."""
    parser.addoption("--write-slow", action="store_true", help="run all, and write the list")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the slow tests."""
    if config.getoption("write_slow"):
        return
    slow = set(_LIST.read_text("utf-8").splitlines())
    left_out = [item for item in items if _function(item.nodeid) in slow]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _function(item.nodeid) not in slow]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the longest time of each test function."""
    if report.when == "call":
        name = _function(report.nodeid)
        _slowest[name] = max(report.duration, _slowest.get(name, 0.0))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the list, once for all workers of xdist."""
    if session.config.getoption("write_slow") and not hasattr(session.config, "workerinput"):
        slow = (name for name, seconds in _slowest.items() if seconds >= SECONDS)
        names = sorted(name for name in slow if not name.startswith(ALWAYS))
        _LIST.write_text("".join(f"{name}\n" for name in names), "utf-8")


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0]
