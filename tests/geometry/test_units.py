from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import format_bytes, parse_bytes, parse_count, parse_wait

BINARY = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
DECIMAL = ["kB", "MB", "GB", "TB", "PB", "EB"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("4GiB", 4 * 2**30),
        ("24 GB", 24 * 10**9),
        ("512MiB", 512 * 2**20),
        ("  24gib ", 24 * 2**30),
        ("24Gb", 24 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("0.1 KiB", 102),
        ("20Gi", 20 * 2**30),
        ("512 mi", 512 * 2**20),
        ("4096", 4096),
        ("4096 B", 4096),
        ("0", 0),
        (4096, 4096),
        (np.int64(4096), 4096),
    ],
)
def test_amounts_are_read(text: str | int, wanted: int) -> None:
    assert parse_bytes(text) == wanted


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "GiB",
        "4XB",
        "24G",
        "24 K",
        "-1GiB",
        "- 1",
        "nan",
        "NaN GiB",
        "inf",
        "1e9",
        "1,5GiB",
        "1_000",
        "4  GiB",
        "4GiB 2MiB",
        ".5GiB",
        "5.GiB",
        "٤GiB",
        "9" * 5000,
        -1,
        4.0,
        float("nan"),
        True,
        None,
        b"4GiB",
        np.float64(4),
        np.bool_(True),
    ],
)
def test_what_is_no_amount_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidValue, match="amount"):
        parse_bytes(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("amount", "wanted"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (128 * 1024, "128 KiB"),
        (70272, "68.6 KiB"),
        (24 * 2**30, "24 GiB"),
        (2**20 - 1, "1 MiB"),  # 1023.999 KiB would round to "1024 KiB"
        (2**80, f"{2**20} EiB"),
    ],
)
def test_amounts_are_written_for_people(amount: int, wanted: str) -> None:
    assert format_bytes(amount) == wanted


@pytest.mark.parametrize("wrong", [-1, 1.0, True, "4GiB", None])
def test_only_whole_amounts_are_written(wrong: object) -> None:
    with pytest.raises(InvalidValue, match="amount"):
        format_bytes(wrong)  # type: ignore[arg-type]


@given(st.integers(0, 2**70))
@example(1280)
def test_a_written_amount_reads_back_to_within_its_rounding(amount: int) -> None:
    text = format_bytes(amount)
    unit = text.split()[1]
    size = 1024 ** (["B", *BINARY].index(unit))
    assert abs(parse_bytes(text) - amount) < size / 20 + 1  # reading drops a fraction of a byte
    assert float(text.split()[0]) < 1024 or unit == "EiB"


@given(st.integers(0, 1023), st.sampled_from(BINARY))
def test_whole_units_survive_the_round_trip_exactly(number: int, unit: str) -> None:
    amount = parse_bytes(f"{number}{unit}")
    assert amount == number * 1024 ** (1 + BINARY.index(unit))
    assert parse_bytes(format_bytes(amount)) == amount


@given(st.integers(0, 10**9), st.sampled_from(DECIMAL))
def test_decimal_units_are_powers_of_a_thousand(number: int, unit: str) -> None:
    assert parse_bytes(f"{number} {unit}") == number * 1000 ** (1 + DECIMAL.index(unit))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("500k", 500_000), ("500K", 500_000), ("3M", 3_000_000), ("3m", 3_000_000),
        ("2G", 2 * 10**9), ("1.5 t", 15 * 10**11), (" 4096 ", 4096), ("0", 0), ("0.25k", 250),
        ("1.0", 1), (4096, 4096), (np.int64(7), 7),
    ],
)  # fmt: skip
def test_counts_are_read(text: str | int, wanted: int) -> None:
    assert parse_count(text) == wanted


@pytest.mark.parametrize(
    "wrong",
    ["", "k", "500x", "500 KiB", "500kB", "-1", "1.5", "1.0001k", "1e6", "1_000", "1,000", "nan",
     "٤k", "9" * 5000, "1" * 31, -1, 4.0, True, None, b"4k", float("inf")],
)  # fmt: skip
def test_what_is_no_count_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidValue, match="count") as refused:
        parse_count(wrong)  # type: ignore[arg-type]
    assert len(str(refused.value)) < 300


@given(st.integers(0, 10**6), st.sampled_from(["", "k", "m", "g", "t"]), st.booleans())
def test_counts_are_the_same_in_upper_and_lower_case(number: int, unit: str, upper: bool) -> None:
    scale = 1000 ** ["", "k", "m", "g", "t"].index(unit)
    assert parse_count(f"{number}{unit.upper() if upper else unit}") == number * scale


@given(st.integers(0, 999), st.sampled_from(BINARY + DECIMAL), st.booleans())
def test_amounts_are_the_same_in_upper_and_lower_case(number: int, unit: str, upper: bool) -> None:
    spelled = unit.upper() if upper else unit.lower()
    assert parse_bytes(f"{number}{spelled}") == parse_bytes(f"{number}{unit}")


@pytest.mark.parametrize("letter", "kmgtpeKMGTPE")
def test_a_letter_with_two_meanings_is_refused_with_both(letter: str) -> None:
    with pytest.raises(
        InvalidValue, match=f"write 1.5{letter.upper()}iB .* or 1.5{letter.upper()}B"
    ):
        parse_bytes(f"1.5{letter}")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("2.5", 2.5), ("0", 0), ("-1", -1), ("500ms", 0.5), ("5m", 300), ("2h", 7200), ("7d", 604800)],
)
def test_waits_are_read(text: str, wanted: float) -> None:
    assert parse_wait(text) == wanted


@pytest.mark.parametrize("wrong", ["", "soon", "5 minutes", "1e", "5M ", "9" * 13 + "d"])
def test_what_is_no_wait_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidValue, match="write seconds, as 30, or 500ms"):
        parse_wait(wrong)
