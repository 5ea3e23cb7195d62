"""An engine whose memory holds tags instead of numbers: each names the whole prefix it depends on.

It computes nothing without reading what a real model would read, so wrong rows, states and pages
are found at the pass that would have used them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep import PagedCache
from kvkeep.core.groups import GroupLayout, StateSpec, WindowSpec

if TYPE_CHECKING:
    from collections.abc import Sequence as Tokens

    from kvkeep import Sequence
    from kvkeep.core.prefix.render import PrefixRun

__all__ = ["BOTH", "GRID", "STATE", "WINDOW", "SymbolicEngine", "brute_force", "prompt"]

WINDOW = GroupLayout(4, (WindowSpec(8, 2),))
STATE = GroupLayout(4, (), StateSpec(5))
GRID = GroupLayout(4, (), StateSpec(5, 16))
BOTH = GroupLayout(4, (WindowSpec(8, 2),), StateSpec(5))


def prompt(number: int, tokens: int) -> list[int]:
    """Tokens that no other number has."""
    return [1000 * number + at for at in range(tokens)]


class SymbolicEngine:
    """A `PagedCache` with groups, and the memory of its pages as tags."""

    def __init__(self, num_pages: int, layout: GroupLayout, **options: Any) -> None:
        self.layout = layout
        self.size = layout.page_size
        self.cache = PagedCache(num_pages, layout, **options)
        self.slots = np.full((num_pages, self.size), None, object)  # KV of tokens
        self.states: dict[int, object] = {}  # page of a state → (tag, number of the page in it)
        self.computed = 0

    # --- memory ----------------------------------------------------------------------------------

    def tag(self, group: object, tokens: Tokens[int], at: int, salt: str = "") -> object:
        """The KV of token ``at`` in a group, or the state before it: of its whole prefix."""
        return (group, salt, hash(tuple(tokens[: at + 1])), at)

    def write_state(self, pages: np.ndarray, tag: object) -> None:
        for number, page in enumerate(pages.tolist()):
            self.slots[page] = None  # what was there is gone
            self.states[page] = (tag, number)

    def make(self, seq: Sequence) -> None:
        """Make all copies that wait."""
        for copy in seq.copies():
            self.slots[copy.dst] = None
            self.slots[copy.dst, : copy.tokens] = self.slots[copy.src, : copy.tokens]
        assert seq.groups is not None
        for copy in seq.groups.copies():
            self.copy_state(copy)

    def reach(self, seq: Sequence, stop: int) -> None:
        """Prepare a pass, and make the copies of rows."""
        assert seq.groups is not None
        for copy in seq.groups.reach(stop):
            for src, dst in zip(copy.src.tolist(), copy.dst.tolist(), strict=True):
                self.slots[dst] = None
                self.slots[dst, : copy.tokens] = self.slots[src, : copy.tokens]

    def copy_state(self, copy: Any) -> None:
        for src, dst in zip(copy.src.tolist(), copy.dst.tolist(), strict=True):
            self.slots[dst] = None
            self.states[dst] = self.states.get(src)

    # --- passes ----------------------------------------------------------------------------------

    def step(self, seq: Sequence, stop: int, *, keep: bool = True) -> None:
        """Compute up to ``stop``, and leave a checkpoint if one is planned there and ``keep``."""
        groups = seq.groups
        assert groups is not None
        tokens, salt = seq.tokens.tolist(), str(seq.namespace)
        start = groups.position
        wanted = keep and stop in groups.stops
        self.make(seq)
        self.reach(seq, stop)
        self.reads(seq, tokens, start, salt)
        for at in range(start, stop):
            page, offset = divmod(at, self.size)
            self.slots[seq.pages[page], offset] = self.tag("base", tokens, at, salt)
            self.states.pop(int(seq.pages[page]), None)
            for window, table in enumerate(groups.tables):
                for part in table[page].tolist():
                    assert part >= 0, "no row for a token of the pass"
                    self.states.pop(part, None)
                    self.slots[part, offset] = self.tag(window, tokens, at, salt)
        if groups.state is not None and stop > start:
            self.write_state(groups.state, self.tag("state", tokens, stop - 1, salt))
        self.computed += stop - start
        if wanted:
            copy = groups.checkpoint(stop)
            if copy is not None:
                self.copy_state(copy)

    def reads(self, seq: Sequence, tokens: list[int], start: int, salt: str) -> None:
        """Assert that all that the pass from ``start`` on reads is right."""
        groups = seq.groups
        assert groups is not None
        for at in range(start):
            page, offset = divmod(at, self.size)
            found = self.slots[seq.pages[page], offset]
            assert found == self.tag("base", tokens, at, salt), f"wrong KV of token {at}"
        for window, (spec, table) in enumerate(
            zip(self.layout.windows, groups.tables, strict=True)
        ):
            first = (
                start // spec.span * spec.span if spec.chunked else max(0, start - spec.span + 1)
            )
            for at in range(first, start):
                page, offset = divmod(at, self.size)
                for part in table[page].tolist():
                    assert part >= 0, f"the row of token {at} is gone"
                    found = self.slots[part, offset]
                    assert found == self.tag(window, tokens, at, salt), f"wrong row of token {at}"
        if groups.state is not None and start:
            tag = self.tag("state", tokens, start - 1, salt)
            for number, page in enumerate(groups.state.tolist()):
                assert self.states.get(page) == (tag, number), f"wrong state at token {start}"

    def run(self, prompt: Tokens[int], *, chunk: int = 64, namespace: str = "") -> Sequence:
        """Open a prompt and compute all of it, in passes that end at its stops."""
        seq = self.cache.open(list(prompt), namespace)
        self.finish(seq, chunk)
        return seq

    def finish(self, seq: Sequence, chunk: int = 64) -> None:
        """Compute and publish the rest of a sequence."""
        groups = seq.groups
        assert groups is not None
        while groups.position < seq.num_tokens:
            ends = [stop for stop in groups.stops if stop > groups.position]
            self.step(seq, min([groups.position + chunk, seq.num_tokens, *ends]))
            seq.publish(groups.position)


def brute_force(engine: SymbolicEngine, prompt: Tokens[int], namespace: str = "") -> int:
    """Return the longest prefix, in tokens, that all groups allow: each position is tried."""
    cache, layout = engine.cache, engine.layout
    index = cache.tree
    size = layout.page_size
    row = np.array(prompt[:-1], np.int32)
    from kvkeep.core.keys import as_namespace

    space = as_namespace(namespace)
    match = index.match(index.encoder(space).lookup(row), space)
    if match is None:
        return 0
    assert cache.board is not None
    rows = cache.board.rows
    points = {point for run in cache.runs(namespace) for point in _ends(run)}

    def keeps(window: int, page: int) -> bool:
        return rows[window][match.pages[page], 0] >= 0

    def has_state(page: int) -> bool:
        return match.pages[page - 1] in points

    for page in range(len(match.pages), 0, -1):
        position = page * size
        needed = True
        for window, spec in enumerate(layout.windows):
            first = (
                position // spec.span * spec.span
                if spec.chunked
                else max(0, position - spec.span + 1)
            )
            needed &= all(keeps(window, at // size) for at in range(first, position))
        if needed and (layout.state is None or has_state(page)):
            return position
    return 0


def _ends(run: PrefixRun) -> list[int]:
    """The base pages of a run at whose end checkpoints are."""
    return [int(run.pages[point - run.start - 1]) for point in run.points]
