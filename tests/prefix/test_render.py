"""The tree as text: what it shows, what it leaves out and counts, and that text stays text."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvkeep import InvalidValue, PagedCache
from kvkeep.core.prefix.render import draw


def shown(cache: PagedCache, width: int = 120, **options: object) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None)
    console.print(draw("top", cache.runs(), **options))  # type: ignore[arg-type]
    return out.getvalue().splitlines()


def store(cache: PagedCache, tokens: list[int]) -> None:
    with cache.open(tokens) as sequence:
        sequence.copies()
        sequence.publish()


@pytest.fixture
def cache() -> PagedCache:
    cache = PagedCache(64, 2)
    for last in range(5):
        store(cache, [1, 2, 3, 4, 10 + last, 0])
        store(cache, [1, 2, 3, 4, 10 + last, 0, 7, 7])
    return cache


def test_every_run_has_a_line_with_its_figures(cache: PagedCache) -> None:
    lines = shown(cache)
    runs = list(cache.runs())
    assert len(lines) == 1 + len(runs)
    assert "4 tokens · 2 pages [0,1] · 0 refs" in lines[1]
    assert sum(len(run.pages) for run in runs) == cache.stats().pages_cached
    with cache.open([1, 2, 3, 4, 10, 0, 99]):
        assert any("1 ref " in line for line in shown(cache))
    cache.pin([1, 2, 3, 4])
    assert "pinned" in shown(cache)[1]


def test_what_is_left_out_is_counted(cache: PagedCache) -> None:
    total_runs, total_pages = len(list(cache.runs())), cache.stats().pages_cached
    lines = shown(cache, depth=1)
    assert lines[2].endswith(f"… {total_runs - 1} more runs, {total_pages - 2} pages")
    lines = shown(cache, branches=2)
    drawn = [line for line in lines if "tokens" in line]
    hidden = int(lines[-1].split("…")[1].split()[0])
    assert len(drawn) + hidden == total_runs
    assert lines[-1].startswith("    └── … 3 more run")


def test_lines_are_bounded_in_all(cache: PagedCache) -> None:
    total_runs = len(list(cache.runs()))
    lines = shown(cache, lines=3)
    assert sum("tokens" in line for line in lines) == 3
    left_out = [int(line.split("…")[1].split()[0]) for line in lines if "more run" in line]
    assert 3 + sum(left_out) == total_runs


def test_text_is_never_more_than_text(cache: PagedCache) -> None:
    hostile = "[bold red]x\x1b[31m\r\n\x07\u202e"
    lines = shown(cache, decode=lambda tokens: hostile)
    text = "\n".join(lines)
    assert "[bold red]" in text
    assert r"\x1b" in text
    assert not set("\x1b\r\x07\u202e") & set(text)
    assert all(len(line) <= 120 for line in shown(cache, decode=lambda tokens: "long " * 99))


def test_empty_and_wrong() -> None:
    cache = PagedCache(8, 2)
    assert shown(cache) == ["top"]
    with pytest.raises(InvalidValue, match="depth is 0; a whole number of at least 1"):
        shown(cache, depth=0)
