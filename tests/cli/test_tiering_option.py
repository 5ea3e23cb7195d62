"""``--tiering``: from a name on the command line to what the store does."""

from __future__ import annotations

import argparse

import pytest

from kvkeep.cli import main
from kvkeep.cli.model import add_model_arguments, load
from kvkeep.cli.tiers import add_store_arguments, open_store

pytestmark = pytest.mark.model


def test_it_is_what_the_store_does() -> None:
    parser = argparse.ArgumentParser()
    add_model_arguments(parser, memory="4MiB")
    add_store_arguments(parser, default="none")
    runner, _ = load(parser.parse_args([]), dtype=None)
    for words, policy in (
        ([], "Inclusive(admit_after=1)"),
        (["--tiering", "exclusive:3"], "Exclusive(admit_after=3)"),
    ):
        args = parser.parse_args(words)
        with open_store(args, runner, name="tiny", tiers=["memory://1MiB"]) as store:
            assert repr(store._tiered.policy) == policy


@pytest.mark.parametrize("tiers", [[], ["--tier", "memory://1MiB"]], ids=["none named", "named"])
def test_a_name_that_means_none_is_one_line(
    tiers: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", "--memory", "64MiB", *tiers, "--tiering", "best"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvkeep: error: no tiering 'best'")
    assert "there are inclusive, inclusive:2, exclusive, exclusive:2" in line
