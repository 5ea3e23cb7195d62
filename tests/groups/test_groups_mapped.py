"""Maps, drawings and figures of a cache with groups: where requests resume, and what that takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from symbolic import BOTH, GRID, STATE, WINDOW, SymbolicEngine, prompt

from kvkeep.core.prefix.render import draw

if TYPE_CHECKING:
    from kvkeep.core.groups import GroupLayout

LAYOUTS = pytest.mark.parametrize("layout", [WINDOW, STATE, BOTH, GRID])


@LAYOUTS
@pytest.mark.parametrize("prefix", ["radix", "chain"])
def test_a_map_adds_up_to_what_the_pool_holds(layout: GroupLayout, prefix: str) -> None:
    engine = SymbolicEngine(900, layout, prefix=prefix)
    for number in range(4):
        engine.run(prompt(0, 40) + prompt(number % 2, 40) + prompt(10 + number, 30)).close()
    stats = engine.cache.stats()
    for nodes in (400, 3):
        made = engine.cache.map(nodes=nodes)
        assert made.pages + made.group_pages == stats.pages_used
        assert made.group_pages == stats.groups.pages == sum(n.group_pages for n in made.nodes)
    whole = engine.cache.map()
    found = [at for node in whole.nodes for at in node.checkpoints]
    assert len(found) == stats.groups.checkpoints
    for node in whole.nodes:
        if node.namespace is not None:
            continue
        view = engine.cache.node(node.id)
        assert view.node.checkpoints == node.checkpoints
        first, size = view.start * layout.page_size, node.pages * layout.page_size
        assert all(first < at <= first + size for at in node.checkpoints)
    by_state = stats.pages_by_state()
    assert by_state["private"] == 0
    assert sum(by_state.values()) == stats.pages_total


def test_a_drawing_marks_where_requests_resume() -> None:
    pytest.importorskip("rich")
    from rich.console import Console

    def drawn(engine: SymbolicEngine) -> str:
        console = Console(width=200, record=True, file=None, force_terminal=False)
        with console.capture() as said:
            console.print(draw("all", engine.cache.runs()))
        return said.get()

    engine = SymbolicEngine(900, STATE)
    engine.run(prompt(1, 62)).close()
    assert "60 tokens · 15 pages" in drawn(engine)
    assert " · resumes at 60 · " in drawn(engine)
    for length in (8, 16, 24, 32, 40):
        engine.run(prompt(1, length) + prompt(2, 3)).close()
        engine.run(prompt(1, length) + prompt(3, 3)).close()
    assert " · resumes at 8 · " in drawn(engine)
    keys = SymbolicEngine(900, STATE, prefix="chain")
    keys.run(prompt(1, 62)).close()
    assert " · resumes at page 15 · " in drawn(keys)


@LAYOUTS
def test_counts_of_groups(layout: GroupLayout) -> None:
    engine = SymbolicEngine(160, layout)
    for number in range(6):
        engine.run(prompt(number % 4, 60)).close()
    stats = engine.cache.stats()
    gone = stats.groups.checkpoints_evicted + stats.groups.checkpoints_replaced
    assert stats.groups.checkpoints == stats.groups.checkpoints_stored - gone
    assert stats.groups.rows == stats.groups.rows_stored - stats.groups.rows_evicted
