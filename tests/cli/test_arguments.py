"""Counts and sizes are read alike, wherever they are given."""

from __future__ import annotations

from typing import Any

import pytest

from kvkeep.cli import _parser, main
from kvkeep.core.errors import InvalidValue
from kvkeep.store.backends.urls import TierURL


@pytest.mark.parametrize(
    ("words", "name", "wanted"),
    [
        (["serve", "--max-waiting", "1k"], "max_waiting", 1000),
        (["serve", "--memory", "1MiB"], "memory", 1 << 20),
        (["trace", "generate", "chat", "--out", "x", "--requests", "1M"], "requests", 1_000_000),
        (["demo", "--max-tokens", "1k"], "max_tokens", 1000),
    ],
)
def test_counts_of_commands(words: list[str], name: str, wanted: int) -> None:
    assert getattr(_parser().parse_args(words), name) == wanted


@pytest.mark.parametrize("wrong", ["lots", "1.5", "1e3", "", "9" * 5000, "5KiB"])
def test_what_is_no_count_says_what_is_one(wrong: str, capsys: Any) -> None:
    assert main(["serve", "--max-waiting", wrong]) == 2
    said = capsys.readouterr().err
    assert "argument --max-waiting" in said
    assert "as 500k or 1.5M" in said
    assert len(said.splitlines()[-1]) < 300


def test_an_amount_that_is_none_names_its_option(capsys: Any) -> None:
    assert main(["serve", "--memory", "much"]) == 2
    said = capsys.readouterr().err
    assert "argument --memory" in said
    assert "is no amount of memory" in said


def test_options_of_urls() -> None:
    url = TierURL("file:///x?size=2GB&threads=2k&more=1kib")
    assert url.size("size") == 2 * 10**9
    assert url.number("threads", 1, 1, 10_000) == 2000
    assert url.size("more") == 1024
    says = r"size=\S+ in file:///x: .*; write"
    with pytest.raises(InvalidValue, match=says):
        TierURL("file:///x?size=24G").size("size")
    with pytest.raises(InvalidValue, match=says):
        TierURL("file:///x?size=many").number("size", 1, 1, 5)
    with pytest.raises(InvalidValue, match="n in file:///x is 6; a whole number in 1 … 5"):
        TierURL("file:///x?n=6").number("n", 1, 1, 5)
