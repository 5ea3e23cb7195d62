"""Tokens in every form that callers have them in."""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep import InvalidValue, PagedCache
from kvkeep.core.tokens import TOKEN_BYTES, TOKEN_DTYPE, as_tokens, common_length

LARGEST = 2**31 - 1
INTEGERS = [np.dtype(order + kind + str(size))
            for order in "<>" for kind in "iu" for size in (1, 2, 4, 8)]  # fmt: skip


@pytest.mark.parametrize(
    "tokens",
    [
        [3, 1, 2],
        (3, 1, 2),
        deque([3, 1, 2]),
        array("l", [3, 1, 2]),
        [np.int64(3), np.uint8(1), 2],
        np.array([3, 1, 2]),
        np.array([3.0, 1.0, 2.0]).astype(np.int16),
        memoryview(array("i", [3, 1, 2])),
        memoryview(array("q", [3, 1, 2])),
        np.array([3, 1, 2], "<i4").tobytes(),
        bytearray(np.array([3, 1, 2], "<i4").tobytes()),
        memoryview(np.array([3, 1, 2], "<i4").tobytes()),
        memoryview(np.array([3, 1, 2], "<i8").tobytes()).cast("q"),
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_forms_that_are_tokens(tokens: Any) -> None:
    assert as_tokens(tokens).tolist() == [3, 1, 2]
    assert as_tokens(tokens).dtype == TOKEN_DTYPE


def test_a_range_is_tokens() -> None:
    assert as_tokens(range(5, 8)).tolist() == [5, 6, 7]


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda dtype: dtype.str)
def test_every_integer_dtype(dtype: np.dtype[Any]) -> None:
    largest = min(int(np.iinfo(dtype).max), LARGEST)
    tokens = as_tokens(np.array([0, 1, largest], dtype))
    assert tokens.tolist() == [0, 1, largest]
    assert tokens.dtype.str == "<i4"
    # The bytes are what is hashed and compared: they must not depend on how the tokens came.
    assert tokens.tobytes() == np.array([0, 1, largest], "<i4").tobytes()
    assert len(tokens.tobytes()) == 3 * TOKEN_BYTES


@pytest.mark.parametrize(
    "dtype", [d for d in INTEGERS if np.iinfo(d).max > LARGEST], ids=lambda dtype: dtype.str
)
@pytest.mark.parametrize("beyond", [LARGEST + 1, 2**32 - 1])
def test_ids_that_narrowing_would_wrap_are_refused(dtype: np.dtype[Any], beyond: int) -> None:
    with pytest.raises(InvalidValue, match=f"got {beyond} at position 2"):
        as_tokens(np.array([0, 1, beyond, 2], dtype))


@pytest.mark.parametrize(
    "dtype", [d for d in INTEGERS if d.kind == "i"], ids=lambda dtype: dtype.str
)
def test_negative_ids_are_refused(dtype: np.dtype[Any]) -> None:
    with pytest.raises(InvalidValue, match="token ids lie in 0 … 2147483647, got -1 at position 1"):
        as_tokens(np.array([0, -1, 5], dtype))


def test_int32_comes_back_without_a_copy() -> None:
    tokens = np.arange(4, dtype=np.int32)
    assert as_tokens(tokens) is tokens


def test_views_are_read_in_their_order() -> None:
    tokens = np.arange(12, dtype=np.int32)
    assert as_tokens(tokens[::3]).tobytes() == np.array([0, 3, 6, 9], "<i4").tobytes()
    assert as_tokens(tokens[::-4]).tolist() == [11, 7, 3]
    assert as_tokens(tokens.reshape(3, 4)[:, 1]).tolist() == [1, 5, 9]
    read_only = tokens[:2]
    read_only.flags.writeable = False
    assert as_tokens(read_only).tolist() == [0, 1]


@pytest.mark.parametrize("nothing", [[], (), range(0), np.empty(0), np.empty(0, np.int8)], ids=repr)
def test_no_tokens_are_an_empty_row(nothing: Any) -> None:
    assert as_tokens(nothing).shape == (0,)
    assert as_tokens(nothing).dtype == TOKEN_DTYPE


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("1 2 3", "got str"),
        (b"123", r"int32 ids in little-endian order, got bytes of 3 bytes .*cast\('q'\)"),
        (bytearray(b"123"), "got bytearray of 3 bytes"),
        (memoryview(b"12345678")[::2], r"got bytes of 4 bytes and shape \(4,\)"),
        (memoryview(b"12345678").cast("B", (2, 4)), r"shape \(2, 4\)"),
        (memoryview(array("d", [1.0])), "float64"),
        (array("f", [1.0]), "float32"),
        ({1: 2}, "got dict"),
        ({1, 2}, "got set"),
        (frozenset({1}), "got frozenset"),
        (None, "got NoneType"),
        (5, "got int"),
        (np.int64(5), "got int64"),
        ((token for token in [1]), "got generator"),
        (iter([1]), "got list_iterator"),
        (map(int, "12"), "got map"),
        (object(), "got object"),
        (np.array(5), r"shape \(\)"),
        (np.zeros((1, 3), np.int32), r"shape \(1, 3\)"),
        (np.zeros((0, 3), np.int32), r"shape \(0, 3\)"),
        ([[1, 2], [3, 4]], r"shape \(2, 2\)"),
        ([[1, 2], [3]], "cannot be read as one row"),
        ([1, None], "object"),
        ([1, "2"], "integer ids"),
        (["1", "2"], "integer ids"),
        ([1.0, 2.0], "float64"),
        ([1, 2.5], "float64"),
        ([True, False], "bool"),
        (np.array([True, False]), "bool"),
        (np.array([1.0, 2.0], np.float32), "float32"),
        (np.array([1, 2], object), "object"),
        (np.array([1], "m8[s]"), "timedelta64"),
        (np.array([1], "M8[s]"), "datetime64"),
        (np.array([1 + 0j]), "complex128"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_row_of_tokens_is_refused_and_named(wrong: Any, named: str) -> None:
    with pytest.raises(InvalidValue, match=named):
        as_tokens(wrong)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("count", [3, 50])
def test_masked_values_are_no_ids(dtype: type, count: int) -> None:
    row = np.arange(count, dtype=dtype)
    for hidden in (0, -7):
        row[1] = hidden
        masked = np.ma.array(row, mask=[at == 1 for at in range(count)])
        with pytest.raises(InvalidValue, match="masked values"):
            as_tokens(masked)
        assert as_tokens(masked.compressed()).tolist() == [0, *range(2, count)]


def test_arrays_of_subclasses_are_read_as_arrays() -> None:
    class Strange(np.ndarray):
        def astype(self, *given: Any, **options: Any) -> Any:
            raise AssertionError("as_tokens uses what the subclass made of it")

    row = np.arange(50)
    for tokens in (row.view(Strange), np.ma.array(row)):
        assert type(as_tokens(tokens)) is np.ndarray
        assert as_tokens(tokens).tolist() == row.tolist()


def test_a_generator_is_refused_before_it_is_read() -> None:
    tokens = iter([1, 2, 3])
    with pytest.raises(InvalidValue):
        as_tokens(tokens)  # type: ignore[arg-type]
    assert list(tokens) == [1, 2, 3]


def test_tensors() -> None:
    torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        assert as_tokens(torch.tensor([3, 1, 2], dtype=dtype)).tolist() == [3, 1, 2]
    assert as_tokens(torch.arange(9).view(3, 3)[:, 0]).tolist() == [0, 3, 6]
    assert as_tokens([torch.tensor(3), torch.tensor(1)]).tolist() == [3, 1]
    with pytest.raises(InvalidValue, match=r"shape \(1, 3\)"):
        as_tokens(torch.ones(1, 3, dtype=torch.int64))
    for wrong in (
        torch.tensor([1.0]),
        torch.tensor([True]),
        torch.tensor([1.0], requires_grad=True),
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.int64, device="meta"),
    ):
        with pytest.raises(InvalidValue):
            as_tokens(wrong)


@pytest.mark.parametrize("last", [-1, 2**31, 2**64, 2.5, None, "2", [2]], ids=repr)
def test_a_long_list_is_refused_as_a_short_one_is(last: Any) -> None:
    messages = []
    for count in (1, 100):
        with pytest.raises(InvalidValue) as refused:
            as_tokens([1] * count + [last])
        messages.append(str(refused.value).split(" at position")[0].split(" shape")[0])
    assert messages[0] == messages[1]


def test_long_lists_of_other_integers() -> None:
    assert as_tokens([np.int64(5)] * 50).tolist() == [5] * 50
    assert as_tokens([0, 1, True] * 50).tolist() == [0, 1, 1] * 50
    with pytest.raises(InvalidValue, match="bool"):
        as_tokens([True] * 50)


def test_memory_can_change_once_the_tokens_are_read() -> None:
    """A cache keeps tokens of its own, not the caller's memory."""
    cache = PagedCache(16, 4)
    held = array("i", range(8))
    with cache.open(held) as sequence:
        held.append(8)  # a buffer that is still exported cannot grow
        held[0] = 99
        assert sequence.tokens.tolist() == list(range(8))
        sequence.publish()
    assert cache.match(held).num_tokens == 0
    assert cache.match(range(8)).num_tokens == 8


def test_dlpack_alone_is_enough() -> None:
    class Exporter:
        def __init__(self, values: np.ndarray) -> None:
            self.values = values

        def __dlpack__(self, **options: Any) -> Any:
            return self.values.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.values.__dlpack_device__()

    values = np.array([3, 1, 2], np.int32)
    tokens = as_tokens(Exporter(values))  # type: ignore[arg-type]
    assert tokens.tolist() == [3, 1, 2]
    assert np.shares_memory(tokens, values)
    assert as_tokens(Exporter(values.astype(np.int64))).tolist() == [3, 1, 2]  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="float64"):
        as_tokens(Exporter(np.ones(3)))  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match=r"shape \(1, 3\)"):
        as_tokens(Exporter(values.reshape(1, 3)))  # type: ignore[arg-type]


def test_an_export_that_fails_is_named() -> None:
    class Refuses:
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("not this layout")

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    with pytest.raises(InvalidValue, match="cannot be read as one row of ids: not this layout"):
        as_tokens(Refuses())  # type: ignore[arg-type]


@given(st.lists(st.integers(-3, LARGEST + 3), max_size=40))
def test_a_row_is_kept_or_refused_never_changed(tokens: list[int]) -> None:
    if all(0 <= token <= LARGEST for token in tokens):
        assert as_tokens(tokens).tolist() == tokens
    else:
        with pytest.raises(InvalidValue):
            as_tokens(tokens)


# --- tensors of other devices ----------------------------------------------------------------


class DeviceTensor:
    """What a tensor on a GPU looks like from outside: NumPy cannot read it, `cpu` copies it."""

    def __init__(self, values: Any, device: tuple[int, int] = (2, 0)) -> None:
        self.values = values
        self.device = device
        self.copies = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self) -> Any:
        self.copies += 1
        return self.values


def test_a_tensor_of_another_device_is_copied_once() -> None:
    tensor = DeviceTensor(np.array([3, 1, 2]))
    assert as_tokens(tensor).tolist() == [3, 1, 2]
    assert tensor.copies == 1
    with pytest.raises(InvalidValue, match="got -1 at position 1"):
        as_tokens(DeviceTensor(np.array([3, -1])))
    with pytest.raises(InvalidValue, match="one row of ids"):
        as_tokens(DeviceTensor(np.zeros((2, 2), np.int64)))
    with pytest.raises(InvalidValue, match="integer ids"):
        as_tokens(DeviceTensor(np.zeros(2)))


def test_an_error_of_the_device_is_not_taken_for_a_mistake() -> None:
    class Broken(DeviceTensor):
        def cpu(self) -> Any:
            raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access") as raised:
        as_tokens(Broken([1]))
    assert not isinstance(raised.value, InvalidValue)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_torch_tensors(device: str) -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.int64, torch.int32, torch.uint8):
        assert as_tokens(torch.tensor([3, 1, 2], dtype=dtype, device=device)).tolist() == [3, 1, 2]
    with pytest.raises(InvalidValue, match="integer ids"):
        as_tokens(torch.zeros(3, device=device))
    with pytest.raises(InvalidValue, match="one row of ids"):
        as_tokens(torch.zeros((1, 3), dtype=torch.int64, device=device))


@given(st.integers(0, 5000), st.integers(0, 5000), st.one_of(st.none(), st.integers(0, 4999)))
def test_the_common_length_of_two_rows(long: int, short: int, differs: int | None) -> None:
    left, right = np.arange(long, dtype=np.int32), np.arange(short, dtype=np.int32)
    if differs is not None and differs < short:
        right[differs] = -1
    both = min(long, short)
    expected = both if differs is None else min(both, differs)
    assert common_length(left, right) == common_length(right, left) == expected
