"""What goes to a terminal: texts made harmless, numbers for people, bars that add up."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvkeep.cli.drawing import ago, amount, percent, plural, seconds, stacked, trend, visible


@given(st.text(st.characters(categories=["Cc", "Cf", "Cs", "Co", "Zl", "Zp", "L", "Mn", "Zs"])))
@example("\x1b]52;c;aGk=\x07")
@example("\u202eevil\u2066")
@example("\x9b31m\x90\ud800")
def test_nothing_that_is_made_visible_acts(hostile):
    shown = visible(hostile)
    assert shown.isprintable()
    assert visible(shown) == shown
    shown.encode()  # no half of a surrogate pair is left
    for character in shown:
        assert unicodedata.category(character)[0] != "C"
        assert unicodedata.bidirectional(character) not in {
            "LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"
        }  # fmt: skip


def test_what_is_harmless_stays_as_it_is():
    for text in ("", "plain [bold]text[/bold] :smile:", "שלום, 世界 – naïve"):
        assert visible(text) == text
    assert visible("a\x1b[31m\n\x7f\u202e\x9b") == "a␛[31m␊␡\\u202e\\u009b"


@given(st.lists(st.floats(0, 1e18), max_size=8), st.integers(0, 200))
def test_the_parts_of_a_bar_fill_it(parts, width):
    cells = stacked(parts, width)
    assert len(cells) == len(parts)
    assert sum(cells) == (width if sum(parts) > 0 else 0)
    assert all(cells[at] >= 0 and (part > 0 or cells[at] == 0) for at, part in enumerate(parts))
    if sum(part > 0 for part in parts) <= width:
        assert all(cells[at] > 0 for at, part in enumerate(parts) if part > 0)


@given(st.integers(0, 1 << 62))
@example(1052631578947369)
def test_amounts_are_short(number):
    shown = amount(number)
    assert len(shown) <= 7
    digits, _, unit = shown.partition(" ")
    back = float(digits.replace(",", "")) * 1000.0 ** " kMGTP".index(unit or " ")
    assert back == pytest.approx(number, rel=0.051, abs=0.5)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (percent(0, 0), "–"), (percent(0, 5), "0 %"), (percent(1, 1000), "<1 %"),
        (percent(999, 1000), "99 %"), (percent(5, 5), "100 %"), (percent(38, 100), "38 %"),
        (seconds(None), "–"), (seconds(0.0004), "0.4 ms"), (seconds(0.412), "412 ms"),
        (seconds(0.9996), "1.00 s"), (seconds(1.239), "1.24 s"), (seconds(34), "34 s"),
        (ago(-3), "0 s"), (ago(300), "5 min"), (ago(7980), "2.2 h"), (ago(3e6), "35 d"),
        (plural(1, "token"), "1 token"), (plural(1200, "token"), "1,200 tokens"),
        (amount(9999), "9,999"), (amount(12_345), "12.3 k"), (amount(999_600), "1.0 M"),
    ],
)  # fmt: skip
def test_numbers_for_people(shown, expected):
    assert shown == expected


def test_a_trend_has_its_newest_right_and_blanks_where_nothing_was():
    assert trend([(0, 10), (5, 10), (10, 10), (0, 0)], 1) == "▁▄█ "
    assert trend([(9, 9), (0, 10), (10, 10)], 2) == "█▄"
    assert trend([], 1) == ""
