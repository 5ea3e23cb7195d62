"""Random sequences of calls, compared with a dict."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.testing.backend_hooks import (
    BackendHooks,
    Rooms,
    block_id,
    content,
    get,
    put,
    sizes_listed,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kvkeep.store.backends import Backend

__all__ = ["BackendWalkTests"]

_NAMES = ["get", "put", "put", "put", "refuse", "sizes", "delete", "touch", "quarantine", "reopen"]
_SIZES = [1, 7, 4095, 4096, 4097, 20_000]
_BLOCKS = [block_id(n, space) for space in (1, 2) for n in range(3)]


class BackendStep(NamedTuple):
    """One call, with its blocks and record size."""

    name: str
    blocks: list[bytes]
    size: int


STEPS = st.lists(
    st.builds(
        BackendStep,
        name=st.sampled_from(_NAMES),
        blocks=st.lists(st.sampled_from(_BLOCKS), min_size=1, max_size=4),
        size=st.sampled_from(_SIZES),
    ),
    min_size=8,  # shorter walks seldom read a record that they put
    max_size=25,
)


class BackendWalk:
    """A random walk: calls on a backend and on the dict that must have the same content."""

    def __init__(self, hooks: BackendHooks, backend: Backend, place: Path) -> None:
        self.hooks = hooks
        self.backend = backend
        self.place = place
        self.model: dict[bytes, bytes] = {}
        self.versions = 0

    def clear(self) -> None:
        """Delete all records, which for some backends is cheaper than opening a new one."""
        self.backend.delete([one.block for one in self.backend.list()])
        self.model.clear()

    def take(self, step: BackendStep) -> None:
        """Make the call on the backend and on the dict, and compare the results."""
        block = step.blocks[0]
        if step.name == "put":
            self.versions += 1
            self.model[block] = content(block, self.versions, step.size)
            put(self.backend, block, self.model[block])
        elif step.name == "get":
            assert get(self.backend, block) == self.model.get(block)
        elif step.name == "refuse" and block in self.model:
            self.refuse(block)
        elif step.name == "delete":
            freed = self.backend.delete(step.blocks)
            gone = {one: self.model.pop(one) for one in step.blocks if one in self.model}
            assert freed == sum(map(len, gone.values()))
        elif step.name == "touch":
            self.backend.touch(step.blocks)
        elif step.name == "quarantine":
            self.backend.quarantine(block, "a test says so")
            self.model.pop(block, None)
        elif step.name == "reopen" and self.hooks.persistent:
            self.backend.flush()
            self.backend.close()
            self.backend = self.hooks.reopen(self.place)
        expected = [len(self.model[b]) if b in self.model else None for b in step.blocks]
        assert self.backend.sizes(step.blocks) == expected

    def refuse(self, block: bytes) -> None:
        """Get a record with a room that raises."""
        rooms = Rooms(error=InterruptedError("no room in this test"))
        try:
            self.backend.get(block, rooms)
        except InterruptedError as error:
            assert error is rooms.error  # noqa: PT017 - raises() would take the wrong one
        else:
            raise AssertionError("the room's exception was swallowed")
        assert rooms.asked == [len(self.model[block])]

    def compare(self) -> None:
        """Assert that backend and dict have the same records."""
        assert sizes_listed(self.backend) == {b: len(r) for b, r in self.model.items()}
        for block in _BLOCKS:
            assert get(self.backend, block) == self.model.get(block)


class BackendWalkTests(BackendHooks):
    """Tests of random sequences of all calls."""

    def test_any_walk_agrees_with_a_dict(self, tmp_path: Path) -> None:
        """Presence, size and content are right after any calls in any order."""
        place = tmp_path / "walks"
        place.mkdir()
        walk = BackendWalk(self, self.make_backend(place), place)

        @settings(max_examples=self.examples, deadline=None)
        @given(STEPS)
        def run(steps: list[BackendStep]) -> None:
            walk.clear()
            for step in steps:
                walk.take(step)
            walk.compare()

        try:
            run()
        finally:
            walk.backend.close()
