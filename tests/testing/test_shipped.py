"""`kvkeep.testing`: imports on demand."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvkeep.testing


def test_the_suites_are_imported_when_they_are_asked_for() -> None:
    code = (
        "import sys, kvkeep.testing as t;"
        "assert not {'pytest', 'hypothesis'} & sys.modules.keys();"
        "t.PolicyTests; assert {'pytest', 'hypothesis'} < sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_every_name_is_there() -> None:
    for name in kvkeep.testing.__all__:
        assert getattr(kvkeep.testing, name)
    with pytest.raises(AttributeError, match="NoTests"):
        _ = kvkeep.testing.NoTests
