"""Real servers as fixtures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from browsing import opened  # noqa: F401 - fixtures
from real_server import running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from real_server import Running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One server for all tests of a module."""
    with running() as one:
        yield one


@pytest.fixture(scope="module")
def start_server() -> Any:
    """``with start_server(limits=Limits(…), **settings) as server:`` for one of your own."""
    return running
