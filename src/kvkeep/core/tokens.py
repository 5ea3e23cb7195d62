"""Tokens in the form that all of kvkeep uses: a 1-D little-endian int32 array."""

from __future__ import annotations

from array import array as typed_array
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    TokenArray = npt.NDArray[np.int32]
    TokensLike = Sequence[int] | npt.ArrayLike

__all__ = [
    "TOKEN_BYTES", "TOKEN_DTYPE", "as_row", "as_tokens", "check_range",
    "common_length", "single_token",
]  # fmt: skip

TOKEN_DTYPE = np.dtype("<i4")
TOKEN_BYTES = TOKEN_DTYPE.itemsize
_FIRST_STEP = 256
_FEW = 16  # up to so many tokens, a Python loop is faster than a NumPy call
_TOKEN_MAX = np.iinfo(TOKEN_DTYPE).max


def as_tokens(tokens: TokensLike) -> TokenArray:
    """Return ``tokens`` as a 1-D int32 array, without a copy if they lie in memory as int32.

    Takes a NumPy array, an ``array.array`` or a typed ``memoryview``, a tensor of any device that
    has ``cpu()`` (torch's) or another object with ``__array__`` or DLPack, a list or a tuple; and
    ``bytes``, ``bytearray`` or a ``memoryview`` of bytes, read as int32 in little-endian order.
    Raises `InvalidValue` for other shapes, other types, and ids outside 0 … 2³¹-1.

    Cost of 32,768 tokens: int32 one pass to check the range (2 µs), int64 a copy besides (10 µs), a
    list 0.2 ms. A tensor on a GPU is copied to the host, and the caller waits for everything queued
    on its stream: where steps must not wait, keep a host copy of the tokens.
    """
    array = as_row(tokens)
    check_range(array)
    return array


def as_row(tokens: TokensLike) -> TokenArray:
    """Return what `as_tokens` returns, without the range check of an int32 array.

    The caller uses `check_range` for tokens that may be new. Tokens that equal stored ones are in
    range, so a cached prompt needs no pass over all of it.
    """
    array: npt.NDArray[Any] = tokens if type(tokens) is np.ndarray else _from_objects(tokens)
    if array.ndim != 1:
        raise InvalidValue(
            f"tokens are one row of ids, got an array of shape {array.shape}; pass one prompt"
        )
    if array.dtype != TOKEN_DTYPE:
        if array.size == 0:
            return np.empty(0, TOKEN_DTYPE)
        if array.dtype.kind not in "iu":
            raise InvalidValue(f"tokens are integer ids, got values of type {array.dtype}")
        if _outside(array):  # before narrowing, which would wrap
            _refuse_range(array)
        return array.astype(TOKEN_DTYPE, copy=False)
    return array


def check_range(array: TokenArray, start: int = 0) -> None:
    """Raise `InvalidValue` for negative ids from ``start`` on; an int32 cannot be too large."""
    more = len(array) - start
    if more <= 0:
        return
    lowest = min(array[start:].tolist()) if more <= _FEW else np.minimum.reduce(array[start:])
    if lowest < 0:
        _refuse_range(array)


def single_token(tokens: TokensLike | int) -> int | None:
    """Return the token if ``tokens`` is plainly one valid token; None leaves it to `as_tokens`.

    Engines append one token at a time, and making an array of it would cost more than the append.
    """
    if isinstance(tokens, list) and len(tokens) == 1:
        tokens = tokens[0]
    elif isinstance(tokens, np.ndarray) and tokens.dtype == TOKEN_DTYPE and tokens.shape == (1,):
        tokens = tokens.item()
    if type(tokens) is int and 0 <= tokens <= _TOKEN_MAX:
        return tokens
    return None


def common_length(left: npt.NDArray[np.integer], right: npt.NDArray[np.integer]) -> int:
    """Return how many leading elements two 1-D arrays of tokens or page ids share.

    Cost: one pass over the shared part, and about 1 µs per power of 16 in its length.
    """
    length = min(len(left), len(right))
    start, step = 0, _FIRST_STEP
    while start < length:
        stop = min(start + step, length)
        differs = left[start:stop] != right[start:stop]
        at = int(differs.argmax())
        if differs[at]:
            return start + at
        start, step = stop, step * 16
    return length


def _outside(array: npt.NDArray[Any]) -> bool:
    """Whether an array of integers that is not empty has values outside 0 … 2³¹-1."""
    dtype = array.dtype
    if dtype.itemsize < TOKEN_BYTES:
        return dtype.kind == "i" and bool(array.min() < 0)
    # One pass: as unsigned integers, negative ones are larger than any token.
    return bool(np.maximum.reduce(array.view(dtype.str.replace("i", "u"))) > _TOKEN_MAX)


def _from_objects(tokens: Any) -> npt.NDArray[Any]:
    if isinstance(tokens, list | tuple) and len(tokens) > _FEW:
        return _from_list(tokens)
    if isinstance(tokens, bytes | bytearray):
        return _from_bytes(memoryview(tokens))
    if isinstance(tokens, memoryview) and tokens.format == "B":
        return _from_bytes(tokens)
    if isinstance(tokens, np.ndarray) and np.ma.is_masked(tokens):
        raise InvalidValue("tokens have masked values; pass the ids alone: tokens.compressed()")
    if hasattr(tokens, "cpu"):
        try:
            tokens = tokens.cpu()  # other errors are those of the device
        except NotImplementedError as error:  # torch's, of a tensor without values
            raise InvalidValue(f"tokens cannot be read as one row of ids: {error}") from error
    return _as_array(tokens)


def _as_array(tokens: Any) -> npt.NDArray[Any]:
    """Return what NumPy reads in an object, without a copy where it has memory to show."""
    try:
        if hasattr(tokens, "__dlpack__") and not hasattr(tokens, "__array__"):
            array: npt.NDArray[Any] = np.from_dlpack(tokens)
        else:
            array = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError, RuntimeError, BufferError) as error:
        raise InvalidValue(f"tokens cannot be read as one row of ids: {error}") from error
    if array.ndim == 0:  # text, sets, generators …
        raise InvalidValue(f"tokens are a list or an array of ids, got {type(tokens).__name__}")
    return array


def _from_list(tokens: list[int] | tuple[int, ...]) -> npt.NDArray[Any]:
    """Read a long list by `array.array`, which takes a quarter of NumPy's time.

    What that refuses, and what could be a list of booleans, NumPy reads and names.
    """
    try:
        fast: npt.NDArray[Any] = np.frombuffer(typed_array("Q", tokens), np.uint64)
    except (TypeError, ValueError, OverflowError):
        return _as_array(tokens)
    return fast if np.maximum.reduce(fast) > 1 else _as_array(tokens)


def _from_bytes(data: memoryview) -> npt.NDArray[Any]:
    """Read bytes as int32 in little-endian order, without a copy."""
    if data.ndim != 1 or not data.contiguous or data.nbytes % TOKEN_BYTES:
        raise InvalidValue(
            "tokens given as bytes are one row of int32 ids in little-endian order, got "
            f"{type(data.obj).__name__} of {data.nbytes} bytes and shape {data.shape}; ids of "
            "another type: memoryview(data).cast('q') for int64"
        )
    return np.frombuffer(data, TOKEN_DTYPE)


def _refuse_range(array: npt.NDArray[np.generic]) -> None:
    wide = array.astype(object)
    at = next(i for i, value in enumerate(wide) if not 0 <= value <= _TOKEN_MAX)
    raise InvalidValue(f"token ids lie in 0 … {_TOKEN_MAX}, got {wide[at]} at position {at}")
