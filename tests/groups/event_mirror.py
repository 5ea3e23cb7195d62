"""A mirror of a cache with groups that knows nothing but its events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.events import Evicted, GroupsStored, Stored
from kvkeep.core.keys import as_namespace

if TYPE_CHECKING:
    from collections.abc import Sequence as Tokens

    from kvkeep.core.events import Event
    from kvkeep.core.groups import GroupLayout

__all__ = ["EventMirror"]


class EventMirror:
    """Knows which prompts are cached, and where a request can resume."""

    def __init__(self, layout: GroupLayout) -> None:
        self.layout = layout
        self.names: dict[int, tuple[object, ...]] = {}  # page → namespace and all tokens to its end
        self.rows: list[set[int]] = [set() for _ in layout.windows]
        self.points: set[int] = set()
        self.freed = 0

    def see(self, event: Event) -> None:
        size = self.layout.page_size
        if isinstance(event, Stored):
            name = (event.namespace, ()) if event.parent < 0 else self.names[event.parent]
            tokens = event.tokens.tolist()
            for at, page in enumerate(event.pages.tolist()):
                assert page not in self.names
                name = (name[0], (*name[1], *tokens[at * size : (at + 1) * size]))
                self.names[page] = name
        elif isinstance(event, GroupsStored):
            for window, pages in enumerate(event.rows):
                there = set(pages.tolist())
                assert len(there) == len(pages)
                assert there <= set(self.names), "a row of a page that is not stored"
                assert not there & self.rows[window], "a row is stored twice"
                self.rows[window] |= there
            for page, tokens in event.checkpoints:
                assert page not in self.points
                assert len(self.names[page][1]) == tokens
                self.points.add(page)
        elif isinstance(event, Evicted):
            if event.groups is not None:
                for window, pages in enumerate(event.groups.rows):
                    assert set(pages.tolist()) <= self.rows[window], "a row went twice"
                    self.rows[window] -= set(pages.tolist())
                for page, tokens in event.groups.checkpoints:
                    assert len(self.names[page][1]) == tokens
                    self.points.remove(page)
            for page in event.pages.tolist():
                del self.names[page]
                assert page not in self.points, "a checkpoint outlives its page"
                assert not any(page in rows for rows in self.rows), "a row outlives its page"
            self.freed += event.freed

    def resume(self, prompt: Tokens[int], namespace: str = "") -> int:
        """Return how many tokens of a prompt need no computing."""
        size, space = self.layout.page_size, as_namespace(namespace)
        pages = {name: page for page, name in self.names.items()}
        path: list[int] = []
        while (end := (len(path) + 1) * size) < len(prompt):
            page = pages.get((space, tuple(prompt[:end])))
            if page is None:
                break
            path.append(page)
        for count in range(len(path), 0, -1):
            at = count * size
            if self.layout.state is not None:
                if path[count - 1] in self.points:
                    return at
                continue
            if all(
                path[page] in self.rows[window]
                for window, spec in enumerate(self.layout.windows)
                for page in range(spec.first_needed(at, size), count)
            ):
                return at
        return 0
