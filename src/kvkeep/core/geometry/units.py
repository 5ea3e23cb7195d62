"""Element types of the KV cache; amounts of memory, counts, and times as text."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TYPE_CHECKING, Final, SupportsIndex

from kvkeep.core.errors import InvalidValue, told, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "DTYPES",
    "format_bytes",
    "normalise_dtype",
    "parse_bytes",
    "parse_count",
    "parse_seconds",
    "parse_wait",
]

DTYPES: Final[dict[str, int]] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
"""Bytes of every element type that pages can hold, by its name in PyTorch."""

_SPELLINGS: Final = {
    "float32": "fp32 f32 float",
    "float16": "fp16 f16 half",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8 fp8_e4m3 fp8_e4m3fn float8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "int8": "i8",
}
_DTYPES: Final = {
    text: name for name, others in _SPELLINGS.items() for text in (name, *others.split())
}

# Thirty digits exceed any memory, and are few enough for int().
_AMOUNT: Final = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?) ?([A-Za-z]*)")
_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_LETTERS: Final = "kmgtpe"  # alone, powers of 1000 to some tools, of 1024 to others
_BYTES: Final = {"": 1, "b": 1} | {
    letter + unit: base**power
    for power, letter in enumerate(_LETTERS, start=1)
    for unit, base in (("b", 1000), ("i", 1024), ("ib", 1024))
}
_COUNTS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_MILLISECONDS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LONGEST: Final = 100 * 365 * 86_400_000  # every system supports waits of up to 292 years


def normalise_dtype(dtype: object) -> str:
    """Return the name (a key of `DTYPES`) of an element type.

    Takes a common spelling ("bf16", "fp8", "torch.float16", upper or lower case) or an object whose
    text is one, such as a ``torch.dtype``. Plain "fp8" is E4M3, as in engines.

    Raises:
        InvalidValue: no element type of that name is known.
    """
    name = _DTYPES.get(str(dtype).strip().lower().removeprefix("torch."))
    if name is None:
        raise InvalidValue(
            f"dtype is {dtype!r}; known are {', '.join(DTYPES)}, and short forms such as bf16 or "
            "fp8"
        )
    return name


def parse_bytes(amount: str | SupportsIndex) -> int:
    """Return an amount of memory in bytes: ``4096``, ``"24GiB"``, ``"24 GB"``, ``"1.5 TiB"``.

    KiB, MiB, GiB, TiB, PiB, EiB are powers of 1024, also as Kubernetes writes them (Gi), and kB,
    MB, GB, TB, PB, EB powers of 1000, in upper or lower case; a bare number is bytes. A fraction of
    a byte is dropped. "24G" is refused, as tools disagree about its meaning, and `parse_count`
    reads it as a count.

    Raises:
        InvalidValue: the text is no such amount, or the number is negative, a float or a bool.
    """
    if not isinstance(amount, str):
        return whole("an amount of bytes", amount, 0)
    number = _read(amount.lower(), _BYTES)
    if number is not None:
        return int(number)
    if (match := _AMOUNT.fullmatch(amount.strip())) and match[2].lower() in {*_LETTERS}:
        letter = match[2].upper()
        raise InvalidValue(
            f"{told(amount)} is no amount of memory: {letter} has two meanings; write "
            f"{match[1]}{letter}iB for powers of 1024, or {match[1]}{letter}B for powers of 1000"
        )
    raise InvalidValue(
        f"{told(amount)} is no amount of memory; write a number and a unit: KiB, MiB, GiB, "
        "TiB (powers of 1024), kB, MB, GB, TB (powers of 1000), in upper or lower case, as "
        "24GiB or 1.5TB; or plain bytes"
    )


def parse_count(amount: str | SupportsIndex) -> int:
    """Return a number of tokens, pages or requests: ``4096``, ``"3M"``, ``"500k"``, ``"1.5 G"``.

    k, M, G and T are powers of 1000, in upper or lower case.

    Raises:
        InvalidValue: the text is no such count or no whole number, or the number is negative, a
            float or a bool.
    """
    if not isinstance(amount, str):
        return whole("a count", amount, 0)
    number = _read(amount.lower(), _COUNTS)
    if number is None or number.denominator != 1:
        raise InvalidValue(
            f"{told(amount)} is no count; write a whole number, or a number and k, M, G or T "
            "(powers of 1000), in upper or lower case, as 500k or 1.5M"
        )
    return int(number)


def format_bytes(amount: SupportsIndex) -> str:
    """Return bytes as text: ``"128 KiB"``, ``"68.6 KiB"``, ``"24 GiB"``.

    In powers of 1024, to one decimal, which is omitted when it is zero.

    Raises:
        InvalidValue: the amount is negative or no whole number.
    """
    number = whole("an amount of bytes", amount, 0)
    for power, unit in enumerate(_BINARY):
        tenths = round(Fraction(10 * number, 1024**power))
        # Compared after rounding: 1023.96 KiB is 1 MiB, never "1024 KiB".
        if tenths < 10 * 1024 or unit == _BINARY[-1]:
            break
    ones, tenth = divmod(tenths, 10)
    return f"{ones}.{tenth} {unit}" if tenth else f"{ones} {unit}"


def parse_seconds(text: str) -> float:
    """Return a time in seconds: ``"500ms"``, ``"30s"``, ``"10m"``, ``"12h"``, ``"7d"``.

    Raises:
        InvalidValue: the text is no such time, not above zero, or above 100 years.
    """
    milliseconds = _read(text, _MILLISECONDS)
    if not milliseconds:
        raise InvalidValue(f"{told(text)} is no time above zero; write 500ms, 30s, 10m, 12h or 7d")
    if milliseconds > _LONGEST:
        raise InvalidValue(f"{told(text)} is longer than 100 years; leave it out for ever")
    return float(milliseconds / 1000)


def parse_wait(text: str) -> float:
    """Return a time in seconds, given as such or with its unit: ``"2.5"``, ``"0"``, ``"5m"``.

    For limits and intervals, whose plain numbers are seconds everywhere. Zero, less and nan are
    left to the caller to judge.

    Raises:
        InvalidValue: the text is neither a number nor a time.
    """
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return parse_seconds(text)
    except InvalidValue:
        raise InvalidValue(
            f"{told(text)} is no time; write seconds, as 30, or 500ms, 30s, 5m, 12h or 7d"
        ) from None


def _read(text: str, units: Mapping[str, int]) -> Fraction | None:
    """Return a number times its unit; None if the text is something else."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None or match[2] not in units:
        return None
    return Fraction(match[1]) * units[match[2]]
