"""Names of others as labels: visible, short, bounded, and never two the same."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.observe.telemetry import label
from kvkeep.observe.telemetry.labels import visible

HOSTILE = [
    "a\nb", "a\x1b[31mred", "\x00", "\u202egnp.exe", "a\u2028b", "\ud800", "\u200b", "x" * 500,
    'quo"te', "back\\slash", "\x7f", "other", "default", "",
]  # fmt: skip


def test_what_can_be_seen_stays():
    assert label("tenant-1") == "tenant-1"
    assert label("Größe 日本 🙂") == "Größe 日本 🙂"
    assert visible('{"a": "b\\"}') == '{"a": "b\\"}'


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", "a␊b"),
        ("\x1b[2J", "␛[2J"),
        ("\x7f", "␡"),
        ("\u202eabc", "\\u202eabc"),
        ("\ud800", "\\ud800"),
        ("\x85", "\\x85".replace("x", "u00")),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_what_would_act_is_shown_instead(text, shown):
    assert visible(text) == shown


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_become_short_visible_labels(name):
    shown = label(name)
    assert 0 < len(shown) <= 64
    assert all(unicodedata.category(char)[0] != "C" for char in shown)
    assert "\n" not in shown
    shown.encode()  # there is no half a character in it


def test_ours_are_not_taken_for_names_of_others():
    assert label("") == "default"
    assert label("default").startswith("default~")
    assert label("other").startswith("other~")


@given(st.lists(st.text(max_size=80), unique=True, max_size=40))
def test_two_names_are_two_labels(names):
    assert len({label(name) for name in names}) == len(names)


def test_names_that_differ_where_they_are_cut_or_shown_alike_are_two():
    assert label("x" * 100 + "a") != label("x" * 100 + "b")
    assert label("a\n") != label("a␊")
    assert label("\u202e") != label("\\u202e")
