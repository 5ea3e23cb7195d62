"""Element types of the KV cache, and their spellings."""

from __future__ import annotations

from typing import Final

from kvkeep.core.errors import InvalidValue

__all__ = ["DTYPES", "normalise_dtype"]

DTYPES: Final[dict[str, int]] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
"""Bytes of every element type that pages can hold, by its name in PyTorch."""

_SPELLINGS: Final[dict[str, str]] = {
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e4m3fn": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "i8": "int8",
}


def normalise_dtype(dtype: object) -> str:
    """Return the name (a key of `DTYPES`) of an element type.

    Takes a common spelling ("bf16", "fp8", "torch.float16", upper or lower case) or an object whose
    text is one, such as a ``torch.dtype``. Plain "fp8" is E4M3, as in engines.

    Raises:
        InvalidValue: no element type of that name is known.
    """
    name = str(dtype).strip().lower().removeprefix("torch.")
    name = _SPELLINGS.get(name, name)
    if name not in DTYPES:
        known = ", ".join(DTYPES)
        raise InvalidValue(
            f"dtype is {dtype!r}; known are {known}, and short forms such as bf16 or fp8"
        )
    return name
