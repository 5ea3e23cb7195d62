"""Bodies that are too large, too slow, or too many at once; on real sockets."""

from __future__ import annotations

import select
from pathlib import Path

import pytest
from guarded import answer, eventually, everything, guarded

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.http import BodyBudget

MIB = 1 << 20


def head(size: int, path: str = "/") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()


def chunked(size: int) -> bytes:
    start = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return start + b"%x\r\n" % size + b"x" * size + b"\r\n"


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 3 * MIB])
def test_a_body_comes_as_it_was_sent(size):
    with guarded(BodyBudget(largest=3 * MIB)) as server:
        assert answer(server.connect(head(size), b"x" * size)) == b"200 %d" % size
        pieces = chunked(size) if size else chunked(0)[: -len(b"0\r\n\r\n")]
        assert answer(server.connect(pieces, b"0\r\n\r\n")) == b"200 %d" % size


def test_all_bodies_together_have_a_budget():
    """Held open, they are refused beyond it; small ones never; and all of it is given back."""
    with guarded(BodyBudget(largest=4 * MIB, budget=48 * MIB)) as server:
        before = resident()
        slow = [server.connect(head(4 * MIB), b"x" * 3 * MIB) for _ in range(30)]
        eventually(lambda: server.bodies.refused["budget"] >= 14)
        assert 40 * MIB < server.bodies.held <= 48 * MIB
        told, _, _ = select.select(slow, [], [], 20)  # any of them: they are sent side by side
        assert everything(told[0]).startswith(b"HTTP/1.1 503 ")
        assert server.status("/", b"x" * 60_000) == 200
        assert resident() - before < 64 * MIB
        for one in slow:
            one.close()
        eventually(lambda: server.bodies.held == 0)
        assert resident() - before < 16 * MIB
        assert server.status("/", b"x" * 4 * MIB) == 200


def test_a_body_is_held_until_its_answer():
    with guarded(BodyBudget(largest=2 * MIB, budget=3 * MIB)) as server:
        one = server.connect(head(2 * MIB, "/hold"), b"x" * 2 * MIB)
        eventually(lambda: server.bodies.held > MIB)
        two = everything(server.connect(head(2 * MIB), b"x" * 2 * MIB))
        assert two.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in two.lower()
        server.release.set()
        assert answer(one).startswith(b"200 ")
        assert server.status("/", b"x" * 2 * MIB) == 200


def test_one_that_is_too_large_said_or_not():
    with guarded(BodyBudget(largest=MIB)) as server:
        assert everything(server.connect(head(MIB + 1), b"x" * (MIB + 1))).startswith(
            b"HTTP/1.1 413 "
        )
        assert everything(server.connect(chunked(MIB + 1))).startswith(b"HTTP/1.1 413 ")
        assert server.bodies.refused == {"too_large": 2, "late": 0, "budget": 0}


def test_one_that_never_comes():
    with guarded(BodyBudget(largest=MIB, seconds=0.2)) as server:
        for sent in (b"", b"x" * 100_000):
            told = everything(server.connect(head(MIB), sent))
            assert told.startswith(b"HTTP/1.1 408 ")
        assert server.bodies.refused["late"] == 2


@pytest.mark.parametrize("wrong", [{"largest": 0}, {"largest": 9, "budget": 8}])
def test_budgets_that_hold_no_body_are_refused(wrong):
    with pytest.raises(InvalidValue):
        BodyBudget(**wrong)
