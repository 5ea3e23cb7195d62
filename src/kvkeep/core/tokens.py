"""Tokens in the form that all of kvkeep uses: a 1-D little-endian int32 array."""

from __future__ import annotations

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
_DLPACK_CPU = 1
_FIRST_STEP = 256
_TOKEN_MAX = np.iinfo(TOKEN_DTYPE).max


def as_tokens(tokens: TokensLike) -> TokenArray:
    """Return ``tokens`` as a 1-D int32 array, without a copy if it is one already.

    Takes a list, a tuple, a NumPy array, anything NumPy reads as an array of integers (a CPU
    tensor), or a tensor on another device that has ``cpu()`` (torch's). Raises `InvalidValue` for
    other shapes, other types, and ids outside 0 … 2³¹-1. Cost: one pass over the tokens. A tensor
    on a GPU is copied to the host, and the caller waits for everything queued on its stream: where
    steps must not wait, keep a host copy of the tokens.
    """
    array = as_row(tokens)
    check_range(array)
    return array


def as_row(tokens: TokensLike) -> TokenArray:
    """Return what `as_tokens` returns, without the range check of an int32 array.

    The caller uses `check_range` for tokens that may be new. Tokens that equal stored ones are in
    range, so a cached prompt needs no pass over all of it.
    """
    array: npt.NDArray[Any] = tokens if isinstance(tokens, np.ndarray) else _from_objects(tokens)
    if array.ndim != 1:
        raise InvalidValue(
            f"tokens are one row of ids, got an array of shape {array.shape}; pass one prompt"
        )
    if array.dtype != TOKEN_DTYPE:
        if array.size == 0:
            return np.empty(0, TOKEN_DTYPE)
        if array.dtype.kind not in "iu":
            raise InvalidValue(f"tokens are integer ids, got values of type {array.dtype}")
        if array.max() > _TOKEN_MAX or array.min() < 0:  # before narrowing, which would wrap
            _refuse_range(array)
        return array.astype(TOKEN_DTYPE, copy=False)
    return array


def check_range(array: TokenArray, start: int = 0) -> None:
    """Raise `InvalidValue` for negative ids from ``start`` on; an int32 cannot be too large."""
    if len(array) > start and np.minimum.reduce(array[start:]) < 0:
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


def _from_objects(tokens: TokensLike) -> npt.NDArray[np.generic]:
    tokens = _on_host(tokens)  # its errors have messages of their own
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise InvalidValue(f"tokens cannot be read as one row of ids: {error}") from error
    if array.ndim == 0 or isinstance(tokens, bytearray):  # text, sets, generators …
        raise InvalidValue(f"tokens are a list or an array of ids, got {type(tokens).__name__}")
    return array


def _on_host(tokens: Any) -> Any:
    """Return a tensor of another device as one on the host, by its ``cpu()``; all else as it is.

    The device is read from ``__dlpack_device__``, so no library is imported.
    """
    device = getattr(tokens, "__dlpack_device__", None)
    if device is None or isinstance(tokens, np.ndarray):
        return tokens
    try:
        kind = int(device()[0])
    except Exception as error:
        raise InvalidValue(
            f"tokens are a {type(tokens).__name__} whose device cannot be read: {error}"
        ) from error
    if kind == _DLPACK_CPU:
        return tokens
    to_host = getattr(tokens, "cpu", None)
    if not callable(to_host):
        raise InvalidValue(
            f"tokens are a {type(tokens).__name__} on a device (DLPack type {kind}) and have no "
            "cpu(); copy them to the host first"
        )
    return to_host()


def _refuse_range(array: npt.NDArray[np.generic]) -> None:
    wide = array.astype(object)
    at = next(i for i, value in enumerate(wide) if not 0 <= value <= _TOKEN_MAX)
    raise InvalidValue(f"token ids lie in 0 … {_TOKEN_MAX}, got {wide[at]} at position {at}")
