"""Bytes at token positions: how they are given, and the keys that are made of them."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.core.errors import InvalidValue
from kvkeep.core.extras import Extra, as_extras, extras_between, signed
from kvkeep.core.keys import chain_keys
from kvkeep.core.tokens import as_tokens

A, B = (hashlib.sha256(data).digest() for data in (b"a", b"b"))
EXTRAS = st.lists(st.tuples(st.integers(0, 11), st.sampled_from([b"", b"a", b"b"])), max_size=5)
TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=12, max_size=12)


def test_extras_are_sorted_and_those_of_one_position_keep_their_order() -> None:
    given = [(3, b"b"), (1, b"a"), (3, b"a")]
    assert as_extras(given, 4) == (Extra(1, A), Extra(3, B), Extra(3, A))
    assert as_extras(iter(given), 4) == as_extras(given, 4)
    assert as_extras(None, 4) == as_extras([], 4) == ()


def test_bytes_come_in_any_form_and_what_is_hashed_is_the_same() -> None:
    image = np.arange(24, dtype=np.uint8).reshape(4, 6)
    forms = [
        image.tobytes(),
        bytearray(image),
        memoryview(image),
        memoryview(np.asfortranarray(image)),
    ]
    assert len({as_extras([(0, form)], 1) for form in forms}) == 1
    assert as_extras([[np.int64(2), b"a"]], 3) == (Extra(2, A),)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ([(4, b"a")], "position of an extra is 4"),
        ([(-1, b"a")], "position of an extra is -1"),
        ([(10**6000, b"a")], "position of an extra"),
        ([(1.0, b"a")], "position of an extra is 1.0"),
        ([(True, b"a")], "position of an extra is True"),
        ([(1, "a")], "is str; bytes"),
        ([(1, np.zeros(3))], "is ndarray; bytes"),
        ([(1, None)], "is NoneType; bytes"),
        ([b"a"], r"a pair \(position, bytes\)"),
        ([(1, b"a", 2)], "a pair"),
        ([5], "a pair"),
        (b"abc", r"extra=\[\(position, data\)\]"),
        ({1: b"a"}, r"extra=\[\(position, data\)\]"),
        ("abc", r"extra=\[\(position, data\)\]"),
        (7, r"rows of \(position, bytes\)"),
        ([(1, b"a")] * 65_537, "at most 65536"),
    ],
)
def test_what_is_no_extra_is_refused(extra: object, said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        as_extras(extra, 4)  # type: ignore[arg-type]


def described(parent: bytes, tokens: list[int], extras: list[tuple[int, bytes]]) -> bytes:
    """The key of one block as docs/keys.md says it, with nothing of ours."""
    said = b"".join(token.to_bytes(4, "little") for token in tokens)
    if extras:
        said += b"\xff\xff\xff\xff"
        for position, data in sorted(extras, key=lambda one: one[0]):
            said += position.to_bytes(4, "little") + hashlib.sha256(data).digest()
    return hashlib.sha256(parent + said).digest()


@given(tokens=TOKENS, extra=EXTRAS, size=st.sampled_from([1, 2, 3, 5, 12]))
def test_keys_are_those_of_the_description(
    tokens: list[int], extra: list[tuple[int, bytes]], size: int
) -> None:
    keys = chain_keys(b"root", as_tokens(tokens).tobytes(), size * 4, as_extras(extra, 12))
    parent, expected = b"root", []
    for start in range(0, 12 - size + 1, size):
        own = [(at - start, data) for at, data in extra if start <= at < start + size]
        parent = described(parent, tokens[start : start + size], own)
        expected.append(parent)
    assert keys == expected


@given(tokens=TOKENS, one=EXTRAS, other=EXTRAS, size=st.sampled_from([2, 3, 4]))
def test_keys_are_equal_as_far_as_the_extras_are(
    tokens: list[int], one: list[tuple[int, bytes]], other: list[tuple[int, bytes]], size: int
) -> None:
    raw = as_tokens(tokens).tobytes()
    extras = as_extras(one, 12), as_extras(other, 12)
    ours, theirs = (chain_keys(b"", raw, size * 4, some) for some in extras)
    same = next(
        (at for at in range(12) if len({extras_between(some, at, at + 1) for some in extras}) > 1),
        12,
    )
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [
        (at + 1) * size <= same for at in range(12 // size)
    ]


@given(tokens=TOKENS, one=EXTRAS, other=EXTRAS)
def test_signed_rows_tell_extras_apart_and_leave_other_tokens(
    tokens: list[int], one: list[tuple[int, bytes]], other: list[tuple[int, bytes]]
) -> None:
    row = as_tokens(tokens)
    ours, theirs = as_extras(one, 12), as_extras(other, 12)
    first, second = signed(row, ours), signed(row, theirs)
    assert row.tolist() == tokens, "changed in place"
    for at in range(12):
        own = extras_between(ours, at, at + 1), extras_between(theirs, at, at + 1)
        assert (first[at] == second[at]) == (own[0] == own[1])
        assert (first[at] < 0) == bool(own[0])
