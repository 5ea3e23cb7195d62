"""Element types of the KV cache: one name for each, however it is spelled."""

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
"""Every element type that pages can hold, by the name PyTorch gives it, with its bytes."""

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
    """Give the one name (a key of `DTYPES`) of an element type.

    Takes a spelling in use ("bf16", "fp8", "torch.float16", upper or lower case) or anything whose
    text is one, a ``torch.dtype`` for instance. "fp8" without more is E4M3, as in engines.

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
